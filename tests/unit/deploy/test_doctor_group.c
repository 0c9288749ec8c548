/* test_doctor_group.c - the doctor's lines about ranks that share experts. */
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "deploy/options/option_table.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { WORDS_MAX = 32 };

/* Options as a shell splits them, with a model of 8 experts unless the line names one. */
static struct doctor *checked(const char *line)
{
    static char copy[512], model[512];
    char *argv[WORDS_MAX];
    int argc = 0, none = 0;
    struct err err = { 0 };
    struct doctor *d = MEM_NEW(struct doctor);
    struct config *c = config_create(OPTIONS, "doctor");
    snprintf(copy, sizeof copy, "%s", line);
    snprintf(model, sizeof model, "--model=%s", test_data("goldens/ernie_moe/model"));
    if (!strstr(line, "--model")) argv[argc++] = model;
    for (char *word = strtok(copy, " "); word && argc < WORDS_MAX; word = strtok(NULL, " "))
        argv[argc++] = word;
    if (config_load_args(c, argc, argv, NULL, &none, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    d->c = c;
    doctor_check_group(d);
    return d;
}

static void done(struct doctor *d)
{
    config_free((struct config *)d->c);
    mem_free(d);
}

static void expect(struct doctor *d, const char *what, enum doctor_result result, const char *text)
{
    for (size_t i = 0; i < d->n; i++)
        if (strcmp(d->lines[i].what, what) == 0 && d->lines[i].result == result &&
            strstr(d->lines[i].text, text)) {
            CHECK(result == DOCTOR_OK || d->lines[i].fix[0]);
            return;
        }
    for (size_t i = 0; i < d->n; i++)
        fprintf(stderr, "%s (%d): %s\n", d->lines[i].what, (int)d->lines[i].result,
                d->lines[i].text);
    test_fail(__FILE__, __LINE__, "no line %s with \"%s\"", what, text);
}

TEST(a_node_alone_has_no_lines)
{
    struct doctor *d = checked("--data-parallel-size 4");
    CHECK_EQ_INT(d->n, 0);
    done(d);
}

TEST(ranks_of_one_host_are_described)
{
    struct doctor *d = checked("-dp 2 -ep");
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 0);
    expect(d, "ranks", DOCTOR_OK, "0 to 1 of 2 are started here");
    expect(d, "rank 0", DOCTOR_OK, "any free port");
    expect(d, "experts", DOCTOR_OK, "for 2 ranks");
    expect(d, "windows", DOCTOR_OK, "MiB with the others");
    done(d);
    d = checked("--num-servers 3 -dp 3 -ep");
    expect(d, "ranks", DOCTOR_OK, "0 to 2 of 3");
    done(d);
}

TEST(numbers_that_contradict_fail)
{
    struct doctor *d = checked("-dp 2 -ep -dpl 4");
    expect(d, "ranks", DOCTOR_FAIL, "4 ranks on this host");
    done(d);
    d = checked("--num-servers 3 -dp 2 -ep");
    expect(d, "ranks", DOCTOR_FAIL, "--data-parallel-size 2 with 3 nodes");
    done(d);
}

TEST(more_ranks_than_experts_or_cpus_warn)
{
    struct doctor *d = checked("-dp 200 -ep");
    expect(d, "experts", DOCTOR_WARN, "some have none");
    expect(d, "ranks", DOCTOR_WARN, "they take turns");
    done(d);
    d = checked("-dp 2 -ep --num-redundant-experts 100");
    expect(d, "copies", DOCTOR_WARN, "100 copies of 8 experts for 2 ranks");
    done(d);
    d = checked("-dp 2 -ep --model tests/none");
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 0); /* another check's */
    done(d);
}

/* `serve` starts them, and they work. */
TEST(ranks_of_a_dense_model_compute_alone)
{
    char line[512];
    snprintf(line, sizeof line, "-dp 2 -ep --model=%s", test_data("goldens/llama/model"));
    struct doctor *d = checked(line);
    expect(d, "experts", DOCTOR_OK, "none to share: each of the 2 nodes computes alone");
    expect(d, "ranks", DOCTOR_OK, "0 to 1 of 2 are started here");
    done(d);
}

TEST(a_tensor_parallel_size_that_does_not_divide_the_heads_fails)
{
    struct doctor *d = checked("-tp 7");
    expect(d, "heads", DOCTOR_FAIL, "--tensor-parallel-size 7 does not divide");
    done(d);
}

TEST(the_address_of_rank_0_is_one_of_its_host_and_free)
{
    char line[128];
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    struct doctor *d = checked("-dp 4 -ep -dpl 2 -dpa 192.0.2.1");
    expect(d, "rank 0", DOCTOR_FAIL, "cannot listen at 192.0.2.1:29550");
    done(d);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ_INT(bind(fd, (struct sockaddr *)&a, n), 0);
    CHECK_EQ_INT(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    /* bound and not listening: nobody else can bind, and nobody is reached */
    snprintf(line, sizeof line, "-dp 4 -ep -dpl 2 -dpa 127.0.0.1 -dpp %u", ntohs(a.sin_port));
    d = checked(line);
    expect(d, "rank 0", DOCTOR_FAIL, "cannot listen");
    done(d);
    snprintf(line, sizeof line, "-dp 4 -ep -dpr 2 -dpa 127.0.0.1 -dpp %u", ntohs(a.sin_port));
    d = checked(line);
    expect(d, "rank 0", DOCTOR_WARN, "is not reached");
    done(d);
    /* The parent of the processes of rank 3. */
    snprintf(line, sizeof line, "-dp 4 -tp 2 -ep --data-parallel-rank 3 -dpa 127.0.0.1 -dpp %u",
             ntohs(a.sin_port));
    struct doctor *third = checked(line);
    expect(third, "rank 0", DOCTOR_WARN, "is not reached");
    done(third);
    snprintf(line, sizeof line, "-dp 4 -ep -dpr 2 -dpa 127.0.0.1 -dpp %u", ntohs(a.sin_port));
    CHECK_EQ_INT(listen(fd, 1), 0);
    d = checked(line);
    expect(d, "rank 0", DOCTOR_OK, "is reached at 127.0.0.1");
    done(d);
    close(fd);
}

/* Without one serve refuses them, too. */
TEST(ranks_of_several_hosts_need_a_secret)
{
    unsetenv("BATON_CLUSTER_SECRET");
    struct doctor *d = checked("-dp 4 -ep -dpl 2 -dpa 127.0.0.1");
    doctor_check_cluster(d);
    expect(d, "secret", DOCTOR_OK, "enough for one host");
    done(d);
    d = checked("-dp 4 -ep -dpr 2 -dpa 192.0.2.1");
    doctor_check_cluster(d);
    expect(d, "secret", DOCTOR_FAIL, "nodes of other hosts cannot reach this one");
    done(d);
}

TEST(windows_that_may_not_be_made_fail)
{
    struct rlimit small = { 1 << 20, 1 << 20 };
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &small), 0);
    struct doctor *d = checked("-dp 2 -ep --max-num-batched-tokens 16384");
    expect(d, "windows", DOCTOR_FAIL, "may have 1.0 MiB");
    done(d);
    d = checked("-dp 2 -ep --max-num-batched-tokens 16");
    expect(d, "windows", DOCTOR_OK, "MiB with the others");
    done(d);
}

TEST_MAIN(CASE(a_node_alone_has_no_lines), CASE(ranks_of_one_host_are_described),
          CASE(numbers_that_contradict_fail), CASE(more_ranks_than_experts_or_cpus_warn),
          CASE(ranks_of_a_dense_model_compute_alone),
          CASE(a_tensor_parallel_size_that_does_not_divide_the_heads_fails),
          CASE(the_address_of_rank_0_is_one_of_its_host_and_free),
          CASE(ranks_of_several_hosts_need_a_secret), CASE(windows_that_may_not_be_made_fail))
