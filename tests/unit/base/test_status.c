/* test_status.c - the status table, struct err and ASSERT. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shared/base/assert.h"
#include "shared/base/err.h"
#include "tests/harness/test.h"

TEST(status_entries_agree_with_the_table)
{
    CHECK_EQ_STR(status_name(OK), "OK");
    CHECK_EQ_STR(status_name(ERR_BUSY), "ERR_BUSY");
    CHECK_EQ_INT(status_http(ERR_FULL), 429);
    CHECK_EQ_INT(status_class_of(ERR_PEER_LOST), CLASS_PEER);
    CHECK_EQ_INT(status_class_of(ERR_CONFIG), CLASS_FATAL);
    CHECK_EQ_STR(status_text(ERR_TIMEOUT), "deadline passed");
}

TEST(status_unknown_number_is_internal)
{
    CHECK_EQ_STR(status_name((enum status) - 999), "ERR_INTERNAL");
    CHECK_EQ_INT(status_http((enum status)7), 500);
}

TEST(err_returns_its_code_and_accepts_null)
{
    struct err e;
    CHECK_EQ_INT(err_set(&e, ERR_INVALID, "%s is %d", "x", 3), ERR_INVALID);
    CHECK_EQ_STR(e.text, "x is 3");
    CHECK_EQ_STR(e.field, "");
    CHECK_EQ_INT(err_field(&e, ERR_FORMAT, "top_p", "bad"), ERR_FORMAT);
    CHECK_EQ_STR(e.field, "top_p");
    CHECK_EQ_INT(err_set(NULL, ERR_IO, "lost"), ERR_IO);
}

TEST(err_arguments_may_point_into_it)
{
    struct err e;
    err_field(&e, ERR_IO, "f", "inner");
    err_field(&e, ERR_IO, e.field, "outer: %s", e.text);
    CHECK_EQ_STR(e.text, "outer: inner");
    CHECK_EQ_STR(e.field, "f");
    CHECK_EQ_INT(err_prefix(&e, "%s: ", "file"), ERR_IO);
    CHECK_EQ_STR(e.text, "file: outer: inner");
}

TEST(err_is_cut_on_a_character_boundary)
{
    struct err e;
    char long_text[1200];
    for (size_t i = 0; i + 2 < sizeof long_text; i += 2) memcpy(long_text + i, "\xC3\xA9", 2);
    long_text[sizeof long_text - 2] = 0;
    err_set(&e, ERR_IO, "x%s", long_text); /* odd start: the last byte would be half a character */
    CHECK(strlen(e.text) == 511 || strlen(e.text) == 510);
    CHECK_EQ_INT((unsigned char)e.text[strlen(e.text) - 1], 0xA9);
    err_set(&e, ERR_IO, "%s", long_text);
    CHECK_EQ_INT(strlen(e.text), 510);
    err_prefix(&e, "abc");
    CHECK_EQ_INT((unsigned char)e.text[strlen(e.text) - 1], 0xA9);
    CHECK(strncmp(e.text, "abc\xC3", 4) == 0);
}

TEST(assert_prints_the_expression_and_aborts)
{
    int fds[2];
    CHECK(pipe(fds) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fds[1], 2);
        signal(SIGABRT, SIG_DFL);
        int one = 1;
        ASSERT(one == 2);
        _exit(0);
    }
    close(fds[1]);
    char text[8192];
    size_t n = 0;
    for (ssize_t r; n < sizeof text - 1 && (r = read(fds[0], text + n, sizeof text - 1 - n)) > 0;)
        n += (size_t)r;
    text[n] = 0;
    int status = 0;
    waitpid(pid, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(strstr(text, "one == 2"));
    CHECK(strstr(text, "test_status.c:"));
}

TEST_MAIN(CASE(status_entries_agree_with_the_table), CASE(status_unknown_number_is_internal),
          CASE(err_returns_its_code_and_accepts_null), CASE(err_arguments_may_point_into_it),
          CASE(err_is_cut_on_a_character_boundary), CASE(assert_prints_the_expression_and_aborts))
