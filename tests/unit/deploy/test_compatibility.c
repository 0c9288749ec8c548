/* test_compatibility.c - every entry of the compatibility table has an effect and a sentence, and
 * notes at start name the variables that are set. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/options/compatibility.h"
#include "tests/harness/test.h"

struct notes {
    struct buf text;
    int n;
};

static void collect(void *arg, const char *sentence)
{
    struct notes *notes = arg;
    notes->n++;
    buf_printf(&notes->text, "%s\n", sentence);
}

TEST(every_entry_has_an_effect_and_a_sentence)
{
    size_t n = 0;
    for (const struct compat_entry *entry = COMPATIBILITY; entry->name; entry++, n++) {
        enum option_effect effect;
        const char *sentence;
        if (!compatibility_resolve(entry, &effect, &sentence))
            test_fail(__FILE__, __LINE__, "%s relies on an option that does not exist",
                      entry->name);
        CHECK(sentence && *sentence);
        CHECK(effect == EFFECT_WORKS || effect == EFFECT_ACCEPTED || effect == EFFECT_REFUSED);
    }
    CHECK(n > 100);
}

TEST(variables_without_effect_are_said_once_each)
{
    struct notes notes = { 0 };
    clearenv();
    setenv("HCCL_BUFFSIZE", "256", 1);       /* has an entry */
    setenv("VLLM_SOMETHING_NEW", "1", 1);    /* only its family has */
    setenv("BKCL_SOCKET_IFNAME", "eth0", 1); /* likewise */
    compatibility_env_notes(false, collect, &notes);
    CHECK_EQ_INT(notes.n, 3);
    CHECK(strstr(notes.text.data, "HCCL_BUFFSIZE: ") != NULL);
    CHECK(strstr(notes.text.data, "VLLM_SOMETHING_NEW: ") != NULL);
    CHECK(strstr(notes.text.data, "BKCL_SOCKET_IFNAME: ") != NULL);
    buf_release(&notes.text);
}

TEST(variables_that_work_or_say_nothing_are_not_mentioned)
{
    struct notes notes = { 0 };
    clearenv();
    setenv("FD_LOG_DIR", "/tmp", 1);     /* an option reads it */
    setenv("VLLM_API_KEY", "k", 1);      /* likewise, though VLLM_* is not read */
    setenv("HCCL_IF_IP", "", 1);         /* empty: absent */
    setenv("http_proxy", "http://p", 1); /* often set for others */
    setenv("PATH", "/bin", 1);
    setenv("BATON_PORT", "1", 1);
    compatibility_env_notes(false, collect, &notes);
    CHECK_EQ_INT(notes.n, 0);
    buf_release(&notes.text);
}

TEST(the_page_has_a_row_per_name_and_no_broken_cells)
{
    struct buf page = { 0 };
    compatibility_markdown(&page);
    size_t n_rows = 0;
    struct str rest = buf_str(&page), line;
    while (str_split(&rest, '\n', &line)) {
        if (!str_starts(line, "| `")) continue;
        size_t n_bars = 0;
        for (size_t i = 0; i < line.n; i++)
            n_bars += line.p[i] == '|' && (i == 0 || line.p[i - 1] != '\\');
        if (n_bars != 5) test_fail(__FILE__, __LINE__, "%.*s", STR_ARG(line));
        n_rows++;
    }
    size_t n = 0;
    for (const struct compat_entry *entry = COMPATIBILITY; entry->name; entry++) n++;
    CHECK_EQ_INT(n_rows, n);
    buf_release(&page);
}

TEST_MAIN(CASE(every_entry_has_an_effect_and_a_sentence),
          CASE(variables_without_effect_are_said_once_each),
          CASE(variables_that_work_or_say_nothing_are_not_mentioned),
          CASE(the_page_has_a_row_per_name_and_no_broken_cells))
