/* test_log.c - the format of lines, levels, the log file and the rate limit. */
#include <errno.h>
#include <fcntl.h>
#include <regex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/base/log.h"
#include "shared/base/log/log_repeats.h"
#include "tests/harness/test.h"

static char path[600];
static char text[1 << 20];

/* Sends the log to a file in a fresh directory. stderr is closed, as the lines would mix with those
 * of the harness. */
static void open_rotated(uint64_t max_bytes, unsigned n_old)
{
    char dir[560];
    snprintf(dir, sizeof dir, "%s/a/b", test_tmpdir());
    int null = open("/dev/null", O_WRONLY);
    dup2(null, 2);
    const struct log_file_options o = {
        .dir = dir, .name = "baton-8000.log", .max_bytes = max_bytes, .n_old = n_old
    };
    CHECK_OK(log_set_file(&o));
    snprintf(path, sizeof path, "%s/baton-8000.log", dir);
}

static void open_log(void) { open_rotated(0, 0); }

static const char *read_log(void)
{
    FILE *f = fopen(path, "r");
    CHECK(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    fclose(f);
    return text;
}

static int count(const char *needle)
{
    int n = 0;
    for (const char *at = read_log(); (at = strstr(at, needle)) != NULL; at++) n++;
    return n;
}

TEST(log_line_has_time_level_name_event_and_fields)
{
    regex_t re;
    open_log();
    log_set_name("prefill-0");
    errno = 42;
    log_info("kvt peer lost", "req=%s n=%d text=%s", "7", 3, "a\nb");
    CHECK_EQ_INT(errno, 42);
    CHECK(regcomp(&re,
                  "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z info "
                  "prefill-0 kvt peer lost "
                  "req=7 n=3 text=a b\n$",
                  REG_EXTENDED) == 0);
    CHECK(regexec(&re, read_log(), 0, NULL, 0) == 0);
    regfree(&re);
    log_set_name("");
    log_info("started", "%s", "");
    CHECK(strstr(read_log(), "Z info - started\n"));
}

TEST(log_long_line_is_cut)
{
    open_log();
    static char big[10000];
    memset(big, 'x', sizeof big - 1);
    log_info("big", "v=%s", big);
    log_info("next", "n=1");
    const char *all = read_log();
    CHECK(strchr(all, '\n') - all < 4096);
    CHECK(strstr(all, " next n=1\n"));
}

TEST(log_level_filters)
{
    open_log();
    CHECK_EQ_INT(log_level(), LOG_INFO);
    log_debug("hidden", "n=%d", 1);
    log_set_level(LOG_DEBUG);
    log_debug("shown", "n=%d", 1);
    log_set_level(LOG_ERROR);
    log_warn("hidden", "n=%d", 2);
    log_error("shown", "n=%d", 2);
    CHECK_EQ_INT(count("hidden"), 0);
    CHECK_EQ_INT(count("shown"), 2);
}

TEST(log_level_from_environment)
{
    setenv("BATON_LOG_LEVEL", "WARN", 1);
    CHECK_EQ_INT(log_level(), LOG_WARN);
}

TEST(log_repeats_are_limited_and_counted)
{
    open_log();
    for (int i = 0; i < 2000; i++) log_warn("repeats", "i=%d", i);
    for (int i = 0; i < 100; i++) log_info("plain", "i=%d", i);
    log_error("other", "n=1");
    int n = count("warn - repeats ");
    CHECK(n >= 20 && n <= 40); /* a new second may have begun */
    CHECK_EQ_INT(count("info - plain "), 100);
    CHECK_EQ_INT(count("error - other "), 1);
    usleep(1100000);
    log_info("later", "n=1");
    const char *at = read_log();
    int n_dropped = 0;
    while ((at = strstr(at, "log lines held back event=\"repeats\" n=")) != NULL)
        n_dropped += atoi(at += 38);
    CHECK_EQ_INT(n_dropped, 2000 - n);
}

TEST(log_many_events_stay_bounded)
{
    open_log();
    for (int i = 0; i < 20000; i++) {
        char event[32];
        snprintf(event, sizeof event, "event-%d", i % 200);
        log_warn(event, "i=%d", i);
    }
    int n = count("i=");
    CHECK(n >= 64 * 20 && n <= 3 * 64 * 20); /* lines of one to three seconds */
}

static long size_of(const char *name)
{
    struct stat st;
    return stat(name, &st) == 0 ? (long)st.st_size : -1;
}

TEST(log_file_is_rotated_when_it_is_full)
{
    char old[3][640];
    open_rotated(1000, 2);
    for (int i = 0; i < 3; i++) snprintf(old[i], sizeof old[i], "%s.%d", path, i + 1);
    for (int i = 0; i < 100; i++) log_info("line", "i=%03d", i);
    CHECK(size_of(path) > 0 && size_of(path) <= 1000);
    for (int i = 0; i < 2; i++) CHECK(size_of(old[i]) > 900 && size_of(old[i]) <= 1000);
    CHECK_EQ_INT(size_of(old[2]), -1);
    CHECK_EQ_INT(count("i=099"), 1);
    /* Another process that continues the file knows how full it is. */
    long before = size_of(path);
    open_rotated(1000, 2);
    log_info("line", "i=100");
    CHECK(size_of(path) > before || size_of(path) < 100);
}

TEST(log_file_is_opened_again_after_sighup)
{
    char moved[640];
    open_log();
    log_reopen_on_hangup();
    snprintf(moved, sizeof moved, "%s.moved", path);
    log_info("first", "n=1");
    CHECK(rename(path, moved) == 0);
    log_info("second", "n=2"); /* still into the file that was moved */
    CHECK_EQ_INT(size_of(path), -1);
    CHECK(raise(SIGHUP) == 0);
    log_info("third", "n=3");
    CHECK_EQ_INT(count("third"), 1);
    CHECK_EQ_INT(count("second"), 0);
}

/* A file that takes nothing, as on a full disk; then one that does. stderr goes to a file too. */
TEST(log_lines_that_a_full_disk_loses_are_counted_and_reported)
{
    char errors[640], full[640];
    open_log();
    snprintf(errors, sizeof errors, "%s.stderr", path);
    snprintf(full, sizeof full, "%s.full", path);
    int fd = open(errors, O_WRONLY | O_CREAT | O_APPEND, 0600);
    CHECK(fd >= 0 && dup2(fd, 2) == 2);
    log_info("first", "n=1");
    CHECK(rename(path, full) == 0 && symlink("/dev/full", path) == 0);
    log_reopen();
    for (int i = 0; i < 12; i++) log_info("gone", "i=%d", i);
    CHECK(unlink(path) == 0);
    log_reopen();
    log_info("second", "n=2");
    CHECK_EQ_INT(count("gone"), 0);
    CHECK_EQ_INT(count("second n=2\n"), 1);
    CHECK_EQ_INT(count("warn - log lines lost n=12 why=\"12 lines were lost: No space left on "
                       "device\"\n"),
                 1);
    CHECK(strstr(text, "log lines lost") < strstr(text, "second n=2"));
    CHECK(strlen(errors) < sizeof path);
    memcpy(path, errors, sizeof path);
    CHECK_EQ_INT(count("gone i="), 12);
    CHECK_EQ_INT(count("error - log file not written file="), 1);
    CHECK_EQ_INT(count("why=\"No space left on device\""), 1);
    CHECK_EQ_INT(count("12 lines were lost: No space left on device"), 1);
}

TEST(log_fatal_is_in_the_file_and_on_stderr)
{
    char errors[640];
    open_log();
    snprintf(errors, sizeof errors, "%s.stderr", path);
    int fd = open(errors, O_WRONLY | O_CREAT | O_APPEND, 0600);
    CHECK(fd >= 0 && dup2(fd, 2) == 2);
    log_fatal("baton serve", "the model is nowhere");
    CHECK_EQ_INT(count("Z error - process ends why=\"the model is nowhere\"\n"), 1);
    log_last_words("out of memory\n", 14);
    CHECK_EQ_INT(count("out of memory\n"), 1);
    CHECK(strlen(errors) < sizeof path);
    memcpy(path, errors, sizeof path);
    CHECK_EQ_STR(read_log(), "baton serve: the model is nowhere\nout of memory\n");
}

TEST(log_dir_that_cannot_be_made)
{
    struct log_file_options o = { .dir = "/dev/null/x", .name = "a.log" };
    CHECK_STATUS(log_set_file(&o), ERR_IO);
    o.dir = "";
    CHECK_STATUS(log_set_file(&o), ERR_IO);
}

/* log_repeats.h */
TEST(repeats_are_counted)
{
    struct log_repeats r = { 0 };
    uint32_t n;
    CHECK(log_repeats_due(&r, "a", 1000, &n) && n == 0);
    for (int i = 0; i < 5; i++) CHECK(!log_repeats_due(&r, "a", 1001 + i, &n));
    CHECK(log_repeats_due(&r, "b", 1002, &n) && n == 0);
    CHECK(log_repeats_due(&r, "a", 1000 + LOG_REPEATS_MS, &n) && n == 5);
    char name[8]; /* texts that were not logged for long make room */
    for (int i = 0; i < LOG_REPEATS_TEXTS - 1; i++) {
        snprintf(name, sizeof name, "t%d", i);
        CHECK(log_repeats_due(&r, name, 70000 + i, &n) && n == 0);
    }
    CHECK(log_repeats_due(&r, "b", 61000 + LOG_REPEATS_MS, &n) && n == 0);
}

TEST(ever_new_texts_are_counted_instead_of_logged)
{
    struct log_repeats r = { 0 };
    int n_due = 0;
    uint32_t n;
    open_log();
    for (int i = 0; i < 5000; i++) {
        char one[16];
        snprintf(one, sizeof one, "text %d", i);
        n_due += log_repeats_due(&r, one, 1000 + i, &n);
    }
    CHECK_EQ_INT(n_due, LOG_REPEATS_TEXTS);
    CHECK(!log_repeats_due(&r, "text 3", 6000, &n)); /* a known one is counted by itself */
    CHECK_EQ_INT(count("log lines held back"), 1);
    CHECK(strstr(read_log(),
                 "log lines held back n=1 like=\"text 64\" since_s=0 why=\"more than 64"));
    CHECK(log_repeats_due(&r, "text 3", 1003 + LOG_REPEATS_MS, &n) && n == 1);
    CHECK_EQ_INT(count("log lines held back"), 1);
    for (int i = 0; i < 100; i++) /* its time is over: the rest is told once */
        log_repeats_due(&r, "text 3", 2000 + LOG_REPEATS_MS + (uint64_t)i, &n);
    CHECK_EQ_INT(count("log lines held back"), 2);
    CHECK(strstr(read_log(), "log lines held back n=4935 like=\"text 65\" since_s=60 why="));
}

/* A text whose time is over keeps its place, and its count, while others are free. */
TEST(a_new_text_takes_no_place_of_another_while_there_is_room)
{
    struct log_repeats r = { 0 };
    uint32_t n;
    open_log();
    CHECK(log_repeats_due(&r, "A", 1000, &n));
    for (int i = 0; i < 500; i++) CHECK(!log_repeats_due(&r, "A", 1001, &n));
    CHECK(log_repeats_due(&r, "B", 1001 + LOG_REPEATS_MS, &n));
    CHECK(log_repeats_due(&r, "A", 1002 + LOG_REPEATS_MS, &n) && n == 500);
}

TEST_MAIN(CASE(repeats_are_counted), CASE(a_new_text_takes_no_place_of_another_while_there_is_room),
          CASE(ever_new_texts_are_counted_instead_of_logged),
          CASE(log_line_has_time_level_name_event_and_fields), CASE(log_long_line_is_cut),
          CASE(log_level_filters), CASE(log_level_from_environment),
          CASE(log_repeats_are_limited_and_counted), CASE(log_many_events_stay_bounded),
          CASE(log_file_is_rotated_when_it_is_full), CASE(log_file_is_opened_again_after_sighup),
          CASE(log_lines_that_a_full_disk_loses_are_counted_and_reported),
          CASE(log_fatal_is_in_the_file_and_on_stderr), CASE(log_dir_that_cannot_be_made))
