/* test_batch_format.c - the first line of a batch: batch lines, prompts, or a file that is neither
 * and what is said about it. */
#include <stdio.h>
#include <string.h>

#include "deploy/generate/batch_format.h"
#include "shared/base/buf.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

struct first_line {
    struct str text;
    bool prompts;
    const char *refused; /* a part of the sentence; NULL: the line is good */
};

#define JSONL "a batch file has one JSON object on each line (jq -c '.[]' writes it so)"
#define WHOLE "a batch file has one whole JSON object on each line"

static const struct first_line FIRST_LINES[] = {
    { STR("{\"custom_id\":\"a\"}"), false, NULL },
    { STR("  {\"custom_id\":\"a\"}\r"), false, NULL },
    { STR("{\"custom_id\":\"a\",\"bo"), false, NULL }, /* its own line is refused, others are not */
    { STR("What is {\"x\": 1}?"), true, NULL },
    { STR("[INST] Who? [/INST]"), true, NULL },
    { STR("[1, 2] is what?"), true, NULL },
    { STR("Why does } end it"), true, NULL },
    { STR("Fill in {{name}}"), true, NULL },
    { STR("["), true, JSONL },
    { STR(" [ {\"custom_id\":\"a\"}, {"), true, JSONL },
    { STR("[{\"custom_id\":\"a\"}]"), true, JSONL },
    { STR("[\"Who?\", \"Why?\"]"), true,
      "a file of prompts has one prompt on each line (jq -r '.[]' writes it so)" },
    { STR("{"), false, WHOLE " (jq -c . writes it so)" },
    { STR("om_id\":\"a\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":[5]}}"), true, WHOLE },
    { STR("\xff\xfe{\0\"\0"), true, "iconv -f UTF-16 -t UTF-8" },
    { STR("\xfe\xff\0{\0\""), true, "iconv -f UTF-16 -t UTF-8" },
    { STR("{\0\"\0a\0"), false, "a 0 byte" },
    { STR("\x1f\x8b\x08\0\0"), true, "a 0 byte" },
};

TEST(the_first_line_decides)
{
    for (size_t i = 0; i < COUNT_OF(FIRST_LINES); i++) {
        const struct first_line *l = &FIRST_LINES[i];
        struct err err = { 0 };
        bool prompts = !l->prompts;
        enum status st = batch_format_of(l->text, "in.txt", 3, &prompts, &err);
        CHECK_STATUS(st, l->refused ? ERR_FORMAT : OK);
        if (!l->refused) CHECK_EQ_INT(prompts, l->prompts);
        else if (!str_starts(str_of(err.text), "in.txt, line 3: ") || !strstr(err.text, l->refused))
            test_fail(__FILE__, __LINE__, "%zu: %s", i, err.text);
    }
}

static enum status check(const char *path, struct str text, struct err *err)
{
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(text.p, 1, text.n, f) == text.n);
    fclose(f);
    return batch_format_check(path, err);
}

/* Before the model is loaded; whatever it cannot tell is left to whoever reads the file. */
TEST(the_beginning_of_a_file_is_looked_at)
{
    struct err err = { 0 };
    struct buf long_line = { 0 };
    char path[512];
    snprintf(path, sizeof path, "%s/in.jsonl", test_tmpdir());
    CHECK_OK(check(path, STR(""), &err));
    CHECK_OK(check(path, STR("\n\nWho?\n[\n"), &err));
    CHECK_OK(check(path, STR("Who?\n{\"name\":\"a\"}\n{\"body\":{}}"), &err));
    CHECK_OK(check(path, STR("Who?\n{\"body\":{}\n"), &err));
    CHECK_STATUS(check(path, STR("\nWho?\n\n {\"body\":{}}\n"), &err), ERR_FORMAT);
    CHECK(strstr(err.text, "/in.jsonl, line 4: a JSON object, but line 2 made this a file of "
                           "prompts; take that line out, or make it a JSON object too"));
    CHECK_OK(check(path, STR("\xef\xbb\xbf{\"custom_id\":\"a\"}\n"), &err));
    CHECK_OK(batch_format_check("/dev/zero", &err));
    CHECK_OK(batch_format_check("/nonexistent/in", &err));
    CHECK_STATUS(check(path, STR("\r\n \n[\n{}]"), &err), ERR_FORMAT);
    CHECK(str_starts(str_of(err.text), path) && strstr(err.text, "/in.jsonl, line 3: the file is"));
    CHECK_STATUS(check(path, STR("\xef\xbb\xbf[{\"custom_id\":\"a\"}]"), &err), ERR_FORMAT);
    buf_add_c(&long_line, "[{\"custom_id\":\"");
    for (int i = 0; i < 100000; i++) buf_add_char(&long_line, 'x');
    CHECK_STATUS(check(path, buf_str(&long_line), &err), ERR_FORMAT);
    memset(long_line.data, '}', long_line.len);
    memcpy(long_line.data, "\"a\": ", 5);
    CHECK_OK(check(path, buf_str(&long_line), &err));
    buf_release(&long_line);
}

TEST_MAIN(CASE(the_first_line_decides), CASE(the_beginning_of_a_file_is_looked_at))
