/* test_ranks.c - which ranks a process starts, as options and variables say it, and the plan of
 * their processes: rank, ports, threads. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/launch/launch_plan.h"
#include "deploy/node/node_options.h"
#include "deploy/options/option_table.h"
#include "tests/harness/test.h"

enum { WORDS_MAX = 32 };

/* Options as a shell splits them, after those of the environment. */
static struct config *load(const char *command, const char *line)
{
    char copy[512], *argv[WORDS_MAX];
    int argc = 0, none = 0;
    struct err err = { 0 };
    snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word && argc < WORDS_MAX; word = strtok(NULL, " "))
        argv[argc++] = word;
    struct config *c = config_create(OPTIONS, command);
    CHECK_OK(config_load_env(c, &err));
    if (config_load_args(c, argc, argv, NULL, &none, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", line, err.text);
    return c;
}

static struct ranks ranks_of(const char *command, size_t n_nodes, const char *line)
{
    struct ranks r;
    struct err err = { 0 };
    struct config *c = load(command, line);
    if (ranks_read(c, n_nodes, &r, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", line, err.text);
    config_free(c);
    return r;
}

static void refuses(const char *command, size_t n_nodes, const char *line, const char *want)
{
    struct ranks r;
    struct err err = { 0 };
    struct config *c = load(command, line);
    CHECK(ranks_read(c, n_nodes, &r, &err) != OK);
    if (!strstr(err.text, want)) test_fail(__FILE__, __LINE__, "%s says: %s", line, err.text);
    config_free(c);
}

#define CHECK_RANGE(r, kind_, first_, n_local_, size_)                                             \
    do {                                                                                           \
        CHECK_EQ_INT((r).kind, kind_);                                                             \
        CHECK_EQ_INT((r).first, first_);                                                           \
        CHECK_EQ_INT((r).n_local, n_local_);                                                       \
        CHECK_EQ_INT((r).size, size_);                                                             \
    } while (0)

TEST(without_shared_experts_or_with_one_rank_a_node_is_alone)
{
    CHECK_EQ_INT(ranks_of("serve", 0, "").kind, RANKS_NONE);
    CHECK_EQ_INT(ranks_of("serve", 0, "-dp 4").kind, RANKS_NONE);
    CHECK_EQ_INT(ranks_of("serve", 0, "-ep").kind, RANKS_NONE);
    CHECK_EQ_INT(ranks_of("launch", 4, "--num-servers 4").kind, RANKS_NONE);
}

TEST(a_parent_starts_all_ranks_or_those_of_its_host)
{
    struct ranks r = ranks_of("serve", 0, "-dp 4 -ep --device cuda");
    CHECK_RANGE(r, RANKS_PARENT, 0, 4, 4);
    r = ranks_of("serve", 0, "-dp 4 -ep");
    CHECK_RANGE(r, RANKS_PARENT, 0, 4, 4);
    CHECK_EQ_STR(r.host, "127.0.0.1");
    CHECK_EQ_INT(r.port, 0); /* any free one */
    r = ranks_of("serve", 0, "-dp 8 -ep -dpl 4 -dpa 10.0.0.1");
    CHECK_RANGE(r, RANKS_PARENT, 0, 4, 8);
    CHECK(ranks_elsewhere(&r));
    CHECK_EQ_STR(r.host, "10.0.0.1");
    CHECK_EQ_INT(r.port, 29550);
    r = ranks_of("serve", 0, "-dp 8 -ep -dpr 4 -dpa 10.0.0.1 -dpp 13345 --headless");
    CHECK_RANGE(r, RANKS_PARENT, 4, 4, 8);
    CHECK(r.headless);
    CHECK_EQ_INT(ranks_view_port(&r), 13346);
    r = ranks_of("launch", 4, "--num-servers 4 -dp 4 -ep");
    CHECK_RANGE(r, RANKS_PARENT, 0, 4, 4);
    r = ranks_of("launch", 2, "--num-servers 2 -dp 4 -ep -dpr 2 -dpa 10.0.0.1");
    CHECK_RANGE(r, RANKS_PARENT, 2, 2, 4);
}

TEST(a_process_that_is_told_its_rank_is_that_one)
{
    struct ranks r = ranks_of("serve", 0, "-dp 4 -ep --data-parallel-rank 3");
    CHECK_EQ_INT(r.kind, RANKS_ONE);
    CHECK_EQ_INT(r.rank, 3);
    CHECK_EQ_INT(r.port, 29550);
    r = ranks_of("serve", 0, "-dp 4 -ep --local-data-parallel-id 1 -dpr 2 -dpa 10.0.0.1");
    CHECK_EQ_INT(r.rank, 3);
    setenv("VLLM_DP_SIZE", "64", 1);
    setenv("VLLM_DP_SIZE_LOCAL", "16", 1);
    setenv("VLLM_DP_RANK", "33", 1);
    setenv("VLLM_DP_RANK_LOCAL", "1", 1);
    setenv("VLLM_DP_MASTER_IP", "192.0.0.5", 1);
    setenv("VLLM_DP_MASTER_PORT", "13395", 1);
    r = ranks_of("serve", 0, "--enable-expert-parallel");
    CHECK_EQ_INT(r.kind, RANKS_ONE);
    CHECK_EQ_INT(r.rank, 33);
    CHECK_EQ_INT(r.size, 64);
    CHECK_EQ_STR(r.host, "192.0.0.5");
    CHECK_EQ_INT(r.port, 13395);
    struct config *c = load("serve", "--enable-expert-parallel");
    CHECK_EQ_INT(ranks_local_id(c), 1); /* its entry of port lists */
    CHECK_EQ_INT(ranks_on_host(c), 16); /* its share of CPUs and memory */
    config_free(c);
}

TEST(hosts_of_a_list_divide_the_ranks)
{
    struct ranks r = ranks_of("serve", 0, "-dp 8 -ep --ips 127.0.0.1,192.0.2.7");
    CHECK_RANGE(r, RANKS_PARENT, 0, 4, 8);
    CHECK_EQ_STR(r.host, "127.0.0.1");
    r = ranks_of("serve", 0, "-dp 8 -ep --ips 192.0.2.7,127.0.0.1");
    CHECK_RANGE(r, RANKS_PARENT, 4, 4, 8);
    CHECK_EQ_STR(r.host, "192.0.2.7");
    r = ranks_of("serve", 0, "-dp 6 -ep --nnodes 3 --node-rank 2 -dpa 192.0.2.7");
    CHECK_RANGE(r, RANKS_PARENT, 4, 2, 6);
    setenv("POD_IPS", "192.0.2.7,127.0.0.1", 1);
    setenv("POD_0_IP", "192.0.2.7", 1);
    setenv("MP_NNODE", "2", 1);
    r = ranks_of("serve", 0, "-dp 4 -ep");
    CHECK_RANGE(r, RANKS_PARENT, 2, 2, 4);
    CHECK_EQ_STR(r.host, "192.0.2.7");
    setenv("MP_NNODE", "3", 1);
    refuses("serve", 0, "-dp 4 -ep", "MP_NNODE 3, but POD_IPS lists 2 addresses");
}

TEST(what_contradicts_is_named)
{
    refuses("serve", 0, "-dp 300 -ep", "more than the 256 ranks");
    refuses("serve", 0, "-dp 2 -ep -dpl 4", "4 ranks on this host");
    refuses("serve", 0, "-dp 4 -ep -dpr 4 -dpa h", "has ranks 0 to 3");
    refuses("serve", 0, "-dp 4 -ep -dpl 2 -dpr 3 -dpa h", "has ranks 0 to 3");
    refuses("serve", 0, "-dp 4 -ep -dpl 2", "give --data-parallel-address");
    refuses("serve", 0, "-dp 4 -ep -dpn 4", "is not a rank of --data-parallel-size 4");
    refuses("serve", 0, "-ep -dpn 1", "is not a rank of --data-parallel-size 1");
    refuses("serve", 0, "-dp 8 -ep -dpl 2 --local-data-parallel-id 2", "count from 0 to 1");
    refuses("serve", 0, "-dp 4 -ep -dpn 1 --headless", "leave --headless");
    refuses("serve", 0, "--headless", "--data-parallel-size above 1");
    refuses("serve", 0, "--nnodes 2", "find each other by --scheduler-host");
    refuses("serve", 0, "-dp 4 -ep --nnodes 2 --node-rank 2", "count from 0 to 1");
    refuses("serve", 0, "-dp 4 -ep -dpl 2 -dpa 0.0.0.0", "is not an IP address of a host");
    /* Nobody would start ranks 4 to 7. */
    refuses("serve", 0, "-dp 8 -ep -dpl 2 --ips 127.0.0.1,192.0.2.7", "2 hosts with 2 ranks each");
    refuses("serve", 0, "-dp 8 -ep -dpl 2 --nnodes 2 --node-rank 1 -dpa h", "each have 4");
    refuses("launch", 2, "--num-servers 2 -dp 8 -ep --ips 127.0.0.1,192.0.2.7", "have 4, and");
    refuses("serve", 0, "-dp 4 -ep --ips 127.0.0.1,127.0.0.1", "--ips lists 127.0.0.1 twice");
    refuses("serve", 0, "-dp 4 -ep --ips 127.0.0.1,host", "'host' is not an IP address");
    refuses("serve", 0, "-dp 9 -ep --device cuda", "up to 8 ranks of one host");
    refuses("serve", 0, "-dp 4 -tp 4 -ep --device cuda", "give --data-parallel-size 2 or less");
    refuses("serve", 0, "-tp 16 --device cuda", "--tensor-parallel-size 16 with --device cuda");
    refuses("serve", 0, "-dp 4 -dpl 2 -ep --device cuda -dpa 10.0.0.1",
            "up to 8 ranks of one host");
    struct ranks r = ranks_of("serve", 0, "-dp 8 -ep -dpl 2 -dpr 6 --ips 127.0.0.1,192.0.2.7");
    CHECK_RANGE(r, RANKS_PARENT, 6, 2, 8); /* the other host may have 6 */
    refuses("launch", 3, "--num-servers 3 -dp 2 -ep", "give --data-parallel-size 3");
    refuses("launch", 2, "--num-servers 2 -dp 4 -ep -dpl 3 -dpa h",
            "give --data-parallel-size-local 2");
}

/* ---- the plan ---- */

static const char *value_of(const struct launch_node *n, const char *name)
{
    char flag[64];
    snprintf(flag, sizeof flag, "--%s=", name);
    const char *found = NULL;
    for (size_t i = 0; n->argv[i]; i++) {
        if (strncmp(n->argv[i], flag, strlen(flag)) != 0) continue;
        CHECK(!found); /* given once */
        found = n->argv[i] + strlen(flag);
    }
    return found;
}

static int64_t number_of(const struct launch_node *n, const char *name)
{
    const char *text = value_of(n, name);
    if (!text) test_fail(__FILE__, __LINE__, "--%s is not given", name);
    return strtoll(text, NULL, 10);
}

static void plan_of(const char *command, const char *line, struct config **c,
                    struct launch_plan *plan)
{
    struct err err = { 0 };
    *c = load(command, line);
    const bool behind = strcmp(command, "serve") == 0;
    struct launch_args a = { .program = "baton", .behind = behind, .role = ROLE_DECODE };
    a.directory = "127.0.0.1:7";
    a.holds_view = true;
    CHECK_OK(ranks_read(*c, behind ? 0 : launch_plan_n_nodes(*c), &a.ranks, &err));
    if (launch_plan_make(*c, &a, plan, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", line, err.text);
}

TEST(each_rank_of_a_parent_has_its_number_ports_and_share_of_the_host)
{
    struct config *c;
    struct launch_plan p;
    setenv("BATON_METRICS_PORT", "9999", 1); /* the parent's */
    plan_of("serve",
            "--model m --port 8180 -dp 6 -ep -dpl 3 -dpr 3 -dpa 127.0.0.1 -dpp 7001 "
            "--max-num-seqs 9 --cache-queue-port 8183 --rdma-comm-ports 71,72,73,74 "
            "--engine-worker-queue-port 1,2,3",
            &c, &p);
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    const int threads = CPU_COUNT(&set) / 3 > 0 ? CPU_COUNT(&set) / 3 : 1;
    CHECK_EQ_INT(p.n, 3);
    for (size_t i = 0; i < p.n; i++) {
        const struct launch_node *n = &p.nodes[i];
        CHECK_EQ_STR(n->argv[1], "serve");
        CHECK_EQ_INT(n->role, ROLE_DECODE);
        CHECK_EQ_INT(number_of(n, "data-parallel-rank"), 3 + i);
        CHECK_EQ_INT(number_of(n, "local-data-parallel-id"), i);
        CHECK_EQ_INT(number_of(n, "data-parallel-size"), 6);
        CHECK_EQ_INT(number_of(n, "data-parallel-size-local"), 3);
        CHECK_EQ_INT(number_of(n, "data-parallel-rpc-port"), 7001);
        CHECK_EQ_STR(value_of(n, "data-parallel-address"), "127.0.0.1");
        CHECK_EQ_INT(number_of(n, "port"), n->port);
        CHECK(n->port != 8180 && n->port != 7001);
        CHECK_EQ_INT(number_of(n, "metrics-port"), 0);
        CHECK_EQ_INT(number_of(n, "grpc-port"), 0); /* the parent's */
        CHECK_EQ_INT(number_of(n, "compute-threads"), threads);
        CHECK_EQ_INT(number_of(n, "max-num-seqs"), 9);
        CHECK_EQ_STR(value_of(n, "cache-queue-port"), "8183,0,0");
        CHECK_EQ_STR(value_of(n, "rdma-comm-ports"), "71,72,73");
        CHECK(!value_of(n, "engine-worker-queue-port")); /* the parent's */
        CHECK_EQ_STR(value_of(n, "router"), "127.0.0.1:7");
        CHECK(!value_of(n, "headless"));
        for (size_t k = 0; k < i; k++) CHECK(p.nodes[k].port != n->port);
    }
    launch_plan_release(&p);
    config_free(c);
}

TEST(ranks_read_the_arguments_that_their_parent_gives_them)
{
    struct config *c;
    struct launch_plan p;
    struct err err = { 0 };
    plan_of("serve", "--model m -dp 4 -ep -dpl 2 -dpr 2 -dpa 127.0.0.1 --ips 192.0.2.7,127.0.0.1",
            &c, &p);
    for (size_t i = 0; i < p.n; i++) {
        struct ranks r;
        int argc = 2, none = 0;
        while (p.nodes[i].argv[argc]) argc++;
        struct config *child = config_create(OPTIONS, "serve");
        CHECK_OK(config_load_args(child, argc - 2, p.nodes[i].argv + 2, NULL, &none, &err));
        CHECK_OK(ranks_read(child, 0, &r, &err));
        CHECK_EQ_INT(r.kind, RANKS_ONE);
        CHECK_EQ_INT(r.rank, 2 + i);
        CHECK_EQ_INT(r.size, 4);
        CHECK_EQ_INT(r.port, 29550);
        CHECK_EQ_INT(ranks_local_id(child), i);
        CHECK_EQ_INT(ranks_on_host(child), 2);
        config_free(child);
    }
    launch_plan_release(&p);
    config_free(c);
}

/* What a process of the plan reads of its own arguments. */
static struct ranks read_back(const struct launch_node *n, size_t *rdma_port)
{
    struct ranks r;
    struct err err = { 0 };
    int argc = 2, none = 0;
    while (n->argv[argc]) argc++;
    struct config *child = config_create(OPTIONS, "serve");
    CHECK_OK(config_load_args(child, argc - 2, (char **)n->argv + 2, NULL, &none, &err));
    CHECK_OK(ranks_read(child, 0, &r, &err));
    *rdma_port = ranks_local_process(child);
    config_free(child);
    return r;
}

TEST(a_node_of_several_ranks_is_as_many_processes)
{
    struct config *c;
    struct launch_plan p;
    size_t rdma_port;
    plan_of("serve", "--model m -dp 2 -tp 3 -ep --pd-comm-port 2334,2335", &c, &p);
    CHECK_EQ_INT(p.n, 6);
    for (size_t i = 0; i < p.n; i++) {
        const struct launch_node *n = &p.nodes[i];
        const struct ranks r = read_back(n, &rdma_port);
        CHECK_EQ_INT(r.kind, RANKS_ONE);
        CHECK_EQ_INT(r.rank, i / 3);
        CHECK_EQ_INT(r.size, 2);
        CHECK_EQ_INT(r.tp.rank, i % 3);
        CHECK_EQ_INT(r.tp.size, 3);
        CHECK_EQ_INT(r.tp.port, 2334 + i / 3);
        CHECK_EQ_INT(r.port, 2334);
        CHECK_EQ_INT(rdma_port, i);
        CHECK_EQ_INT(n->first, i / 3 * 3);
        CHECK((n->port == 0) == (i % 3 != 0)); /* the first has the port */
    }
    launch_plan_release(&p);
    config_free(c);
    plan_of("launch", "--model m --prefill 1 --decode 1 -tp 2 --ports 8101,8102", &c, &p);
    CHECK_EQ_INT(p.n, 4);
    for (size_t i = 0; i < p.n; i++) {
        const struct ranks r = read_back(&p.nodes[i], &rdma_port);
        CHECK_EQ_INT(r.kind, RANKS_ONE);
        CHECK(!r.experts);
        CHECK_EQ_INT(r.tp.rank, i % 2);
        CHECK_EQ_INT(p.nodes[i].role, i < 2 ? ROLE_PREFILL : ROLE_DECODE);
        CHECK_EQ_INT(p.nodes[i].port, i % 2 ? 0 : 8101 + i / 2);
    }
    CHECK(p.nodes[0].meet_port != p.nodes[2].meet_port);
    launch_plan_release(&p);
    config_free(c);
}

TEST(a_process_that_is_told_its_node_starts_the_ranks_of_that)
{
    struct config *c;
    struct launch_plan p;
    size_t rdma_port;
    struct ranks r = ranks_of("serve", 0, "-tp 2 -dp 4 -ep --data-parallel-rank 3 -dpa 127.0.0.1");
    CHECK_EQ_INT(r.kind, RANKS_PARENT);
    CHECK_EQ_INT(r.rank, 3);
    CHECK_EQ_INT(ranks_n_processes(&r), 2);
    plan_of("serve", "--model m -tp 2 -dp 4 -ep --data-parallel-rank 3 -dpa 127.0.0.1", &c, &p);
    CHECK_EQ_INT(p.n, 2);
    r = read_back(&p.nodes[1], &rdma_port);
    CHECK_EQ_INT(r.kind, RANKS_ONE);
    CHECK_EQ_INT(r.rank, 3);
    CHECK_EQ_INT(r.tp.rank, 1);
    CHECK_EQ_INT(rdma_port, 7);
    launch_plan_release(&p);
    config_free(c);
    CHECK_EQ_INT(ranks_of("serve", 0, "-tp 8 --device cuda").tp.size, 8);
    refuses("serve", 0, "-tp 16 -dp 32 -ep",
            "times --tensor-parallel-size 16 is more than the 256");
}

TEST(ranks_of_a_model_on_several_hosts_are_a_node_on_each)
{
    setenv("MP_NUM", "16", 1);
    setenv("MP_NNODE", "2", 1);
    const struct ranks r = ranks_of("serve", 0, "");
    unsetenv("MP_NUM");
    unsetenv("MP_NNODE");
    CHECK_EQ_INT(r.kind, RANKS_PARENT);
    CHECK_EQ_INT(r.tp.size, 8);
}

TEST(ranks_of_one_host_meet_at_rank_0s_cluster_port_or_at_a_free_one)
{
    struct config *c;
    struct launch_plan p;
    plan_of("serve", "--model m -dp 2 -ep --pd-comm-port 2334", &c, &p);
    CHECK_EQ_INT(p.ranks.port, 2334);
    CHECK_EQ_STR(value_of(&p.nodes[1], "pd-comm-port"), "2334,0");
    CHECK_EQ_INT(number_of(&p.nodes[1], "data-parallel-rpc-port"), 2334);
    launch_plan_release(&p);
    config_free(c);
    plan_of("launch", "--model m --num-servers 2 -dp 2 -ep --ports 8101,8102", &c, &p);
    CHECK(p.ranks.port > 0);
    for (size_t i = 0; i < p.n; i++) {
        CHECK_EQ_INT(p.nodes[i].port, 8101 + i);
        CHECK_EQ_INT(p.nodes[i].role, ROLE_MIXED);
        CHECK_EQ_INT(number_of(&p.nodes[i], "data-parallel-rank"), i);
        CHECK_EQ_INT(number_of(&p.nodes[i], "data-parallel-rpc-port"), p.ranks.port);
    }
    launch_plan_release(&p);
    config_free(c);
}

/* Ranks are of one group by the text of its address. */
TEST(an_address_has_one_spelling)
{
    struct ranks r = ranks_of("serve", 0, "-dp 4 -dpl 2 -ep -dpa 0:0:0:0:0:0:0:1");
    CHECK_EQ_STR(r.host, "::1");
    r = ranks_of("serve", 0, "-dp 4 -dpl 2 -ep -dpa [2001:DB8::0001]");
    CHECK_EQ_STR(r.host, "2001:db8::1");
    r = ranks_of("serve", 0,
                 "-tp 2 --tensor-parallel-rank 1 --tensor-parallel-port 9 "
                 "--tensor-parallel-address 0::1");
    CHECK_EQ_STR(r.tp.host, "::1");
}

/* An IPv4 address of this host that others could reach; false: it has none. */
static bool own_address(char out[INET_ADDRSTRLEN])
{
    struct ifaddrs *list, *a;
    bool found = false;
    if (getifaddrs(&list) != 0) return false;
    for (a = list; a && !found; a = a->ifa_next) {
        if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET) continue;
        const struct sockaddr_in *in = (const struct sockaddr_in *)a->ifa_addr;
        found = inet_ntop(AF_INET, &in->sin_addr, out, INET_ADDRSTRLEN) && !host_is_loopback(out);
    }
    freeifaddrs(list);
    return found;
}

static void check_addresses(const char *line, const char *advertised, const char *listens)
{
    struct node_options o;
    struct err err = { 0 };
    struct config *c = load("serve", line);
    if (node_options_check_read(c, &o, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", line, err.text);
    CHECK_EQ_STR(o.advertise_host, advertised);
    CHECK_EQ_STR(o.cluster_host, listens);
    node_options_release(&o);
    config_free(c);
}

static void refuses_options(const char *line, const char *want)
{
    struct node_options o;
    struct err err = { 0 };
    struct config *c = load("serve", line);
    CHECK(node_options_check_read(c, &o, &err) != OK);
    if (!strstr(err.text, want)) test_fail(__FILE__, __LINE__, "%s says: %s", line, err.text);
    node_options_release(&o);
    config_free(c);
}

/* A rank behind a parent has its directory on its own host, and ranks of others come to it all the
 * same. */
TEST(a_rank_is_reached_at_the_address_that_faces_rank_0)
{
    static const char RANK[] = "-dp 4 -ep --data-parallel-rank 1";
    char own[INET_ADDRSTRLEN], line[256];
    setenv("BATON_CLUSTER_SECRET", "sixteen letters.", 1);
    snprintf(line, sizeof line, "%s --router 127.0.0.1:7", RANK);
    check_addresses(line, "127.0.0.1", "0.0.0.0");
    snprintf(line, sizeof line, "%s -dpa ::1 --advertise-host 127.0.0.1", RANK);
    check_addresses(line, "127.0.0.1", "::");
    unsetenv("BATON_CLUSTER_SECRET");
    refuses_options("-dp 4 -ep --data-parallel-rank 1 -dpa 192.0.2.7", "without a cluster secret");
    check_addresses("-dp 4 -ep --data-parallel-rank 1 -dpa 127.0.0.1", "127.0.0.1", "127.0.0.1");
    setenv("BATON_CLUSTER_SECRET", "sixteen letters.", 1);
    if (!own_address(own)) SKIP("this host has no address that others could reach");
    snprintf(line, sizeof line, "%s -dpa %s --router 127.0.0.1:7", RANK, own);
    check_addresses(line, own, "0.0.0.0");
    snprintf(line, sizeof line, "%s -dpa %s", RANK, own);
    check_addresses(line, own, "0.0.0.0");
    snprintf(line, sizeof line, "%s -dpa 127.0.0.1 --router %s:7", RANK, own);
    check_addresses(line, own, "0.0.0.0");
    unsetenv("BATON_CLUSTER_SECRET");
}

/* Of a list those that come later are bound by processes that start later. */
TEST(a_port_that_an_option_names_is_not_chosen_as_a_free_one)
{
    struct config *c;
    struct launch_plan p;
    plan_of("launch", "--model m --num-servers 3 --ports=-1,8000,8002 --metrics-ports=-1,8001", &c,
            &p);
    CHECK(p.nodes[0].port > 8002);
    CHECK_EQ_INT(p.nodes[1].port, 8000);
    CHECK_EQ_INT(p.nodes[2].port, 8002);
    launch_plan_release(&p);
    config_free(c);
}

TEST(nodes_of_a_launch_without_a_group_are_told_nothing_of_ranks)
{
    struct config *c;
    struct launch_plan p;
    plan_of("launch",
            "--model m --prefill 1 --decode 2 --metrics-ports 9101,-1,9103 --grpc-ports 9201,9202",
            &c, &p);
    CHECK_EQ_INT(p.n, 3);
    CHECK_EQ_INT(p.nodes[0].role, ROLE_PREFILL);
    CHECK_EQ_INT(p.nodes[2].role, ROLE_DECODE);
    CHECK_EQ_STR(value_of(&p.nodes[0], "splitwise-role"), "prefill");
    CHECK(!value_of(&p.nodes[0], "data-parallel-rank"));
    CHECK_EQ_INT(number_of(&p.nodes[0], "metrics-port"), 9101);
    CHECK_EQ_INT(number_of(&p.nodes[1], "grpc-port"), 9202);
    CHECK_EQ_INT(number_of(&p.nodes[2], "grpc-port"), 0);
    /* a port of the environment is for one node, the first */
    CHECK_EQ_INT(number_of(&p.nodes[1], "metrics-port"), 0);
    CHECK_EQ_INT(number_of(&p.nodes[1], "health-port"), 0);
    CHECK(!value_of(&p.nodes[0], "health-port"));
    launch_plan_release(&p);
    config_free(c);
}

TEST_MAIN(CASE(without_shared_experts_or_with_one_rank_a_node_is_alone),
          CASE(a_parent_starts_all_ranks_or_those_of_its_host),
          CASE(a_process_that_is_told_its_rank_is_that_one), CASE(hosts_of_a_list_divide_the_ranks),
          CASE(what_contradicts_is_named),
          CASE(each_rank_of_a_parent_has_its_number_ports_and_share_of_the_host),
          CASE(ranks_read_the_arguments_that_their_parent_gives_them),
          CASE(a_node_of_several_ranks_is_as_many_processes),
          CASE(a_process_that_is_told_its_node_starts_the_ranks_of_that),
          CASE(ranks_of_a_model_on_several_hosts_are_a_node_on_each),
          CASE(ranks_of_one_host_meet_at_rank_0s_cluster_port_or_at_a_free_one),
          CASE(an_address_has_one_spelling),
          CASE(a_rank_is_reached_at_the_address_that_faces_rank_0),
          CASE(a_port_that_an_option_names_is_not_chosen_as_a_free_one),
          CASE(nodes_of_a_launch_without_a_group_are_told_nothing_of_ranks))
