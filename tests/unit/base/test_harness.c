/* test_harness.c - the harness itself: what it prints for cases that pass, fail, skip, hang and
 * crash. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/harness/test.h"

static const char *note_path; /* folder in which inner cases leave files */

TEST(inner_passes) {}
TEST(inner_fails) { CHECK_EQ_INT(1 + 1, 3); }
TEST(inner_skips) { SKIP("no such hardware"); }
TEST(inner_crashes) { raise(SIGSEGV); }
TEST(inner_hangs)
{
    for (;;) pause();
}
TEST(inner_leaves_a_directory_and_a_child)
{
    char path[700];
    const char *dir = test_tmpdir();
    snprintf(path, sizeof path, "%s/sub", dir);
    CHECK(mkdir(path, 0700) == 0);
    snprintf(path, sizeof path, "%s/sub/file", dir);
    FILE *f = fopen(path, "w");
    fclose(f);
    pid_t child = fork();
    if (child == 0)
        for (;;) pause();
    f = fopen(note_path, "w");
    fprintf(f, "%d %s", (int)child, dir);
    fclose(f);
}

static const struct test_case inner[] = {
    CASE(inner_passes),  CASE(inner_fails),      CASE(inner_skips),
    CASE(inner_crashes), CASE_T(inner_hangs, 1), CASE(inner_leaves_a_directory_and_a_child)
};

/* Runs the inner cases as a program; returns the exit status, its output goes to `out`. */
static int run_inner(char *out, size_t cap, int argc, char **argv)
{
    int fds[2], status = 0;
    CHECK(pipe(fds) == 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fds[1], 1);
        close(fds[0]);
        close(fds[1]);
        int rc = test_main(inner, sizeof inner / sizeof *inner, argc, argv);
        fflush(NULL);
        _exit(rc);
    }
    close(fds[1]);
    size_t n = 0;
    for (ssize_t r; n < cap - 1 && (r = read(fds[0], out + n, cap - 1 - n)) > 0;) n += (size_t)r;
    out[n] = 0;
    close(fds[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Expects the output of the five inner cases, in any order. */
static void check_outcomes(const char *out)
{
    CHECK(strstr(out, "ok inner_passes ("));
    CHECK(strstr(out, "1 + 1 is 2, 3 is 3\nFAIL inner_fails (exit status 1)\n"));
    CHECK(strstr(out, "no such hardware\nSKIP inner_skips\n"));
    CHECK(strstr(out, "FAIL inner_crashes ("));
    CHECK(strstr(out, "FAIL inner_hangs (not done after 1 s)\n"));
    CHECK_EQ_STR(strstr(out, "1 passed"), "1 passed, 3 failed, 1 skipped\n");
}

TEST(harness_reports_every_outcome)
{
    char out[8192], note[600], *argv[] = { "x",           "inner_passes",  "inner_fails",
                                           "inner_skips", "inner_crashes", "inner_hangs" };
    snprintf(note, sizeof note, "%s/note", test_tmpdir());
    note_path = note;
    CHECK_EQ_INT(run_inner(out, sizeof out, 6, argv), 1);
    CHECK(strncmp(out, "ok inner_passes (", 17) == 0);
    CHECK(strstr(out, "\n1 passed, 3 failed, 1 skipped\n"));
    check_outcomes(out);
}

/* The same cases in parallel: outputs of different cases do not mix. */
TEST(harness_reports_every_outcome_side_by_side)
{
    char out[8192],
        *argv[] = { "x",           "--jobs",        "3",          "inner_passes", "inner_fails",
                    "inner_skips", "inner_crashes", "inner_hangs" };
    CHECK_EQ_INT(run_inner(out, sizeof out, 8, argv), 1);
    check_outcomes(out);
}

TEST(harness_cleans_up_behind_a_case)
{
    char out[2048], note[600], dir[600], *argv[] = { "x", "inner_leaves_a_directory_and_a_child" };
    int child = 0;
    snprintf(note, sizeof note, "%s/note", test_tmpdir());
    note_path = note;
    CHECK_EQ_INT(run_inner(out, sizeof out, 2, argv), 0);
    CHECK(strncmp(out, "ok inner_leaves_a_directory_and_a_child (", 41) == 0);
    CHECK(strstr(out, "\n1 passed, 0 failed, 0 skipped\n"));
    FILE *f = fopen(note, "r");
    CHECK(f && fscanf(f, "%d %599s", &child, dir) == 2);
    fclose(f);
    CHECK(access(dir, F_OK) != 0);
    /* The orphan is killed at once but reaped by its new parent: a zombie may still exist. */
    char stat[64], state = 'X';
    for (int i = 0; i < 100; i++) {
        snprintf(stat, sizeof stat, "/proc/%d/stat", child);
        f = fopen(stat, "r");
        if (!f) return;
        if (fscanf(f, "%*d %*s %c", &state) != 1) state = 'X';
        fclose(f);
        if (state == 'Z' || state == 'X') return;
        struct timespec nap = { 0, 10000000 };
        nanosleep(&nap, NULL);
    }
    test_fail(__FILE__, __LINE__, "process %d is still there, state %c", child, state);
}

TEST(harness_lists_and_refuses_unknown_names)
{
    char out[2048], *list[] = { "x", "--list" }, *unknown[] = { "x", "nobody" };
    CHECK_EQ_INT(run_inner(out, sizeof out, 2, list), 0);
    CHECK(strncmp(out, "inner_passes\ninner_fails\n", 25) == 0);
    CHECK_EQ_INT(run_inner(out, sizeof out, 2, unknown), 2);
}

TEST(harness_data_path)
{
    setenv("BATON_TEST_DATA", "/some/where", 1);
    CHECK_EQ_STR(test_data("a.json"), "/some/where/a.json");
    unsetenv("BATON_TEST_DATA");
    CHECK(test_data("a.json")[0] == '/');
    CHECK(strstr(test_data("a.json"), "/tests/data/a.json"));
}

TEST_MAIN(CASE(harness_reports_every_outcome), CASE(harness_reports_every_outcome_side_by_side),
          CASE(harness_cleans_up_behind_a_case), CASE(harness_lists_and_refuses_unknown_names),
          CASE(harness_data_path))
