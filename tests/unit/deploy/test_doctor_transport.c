/* test_doctor_transport.c - the doctor's lines about KV transports: protocols asked for, tuning
 * variables, locked memory, RDMA ports. */
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "deploy/options/option_table.h"
#include "kvtransfer/rdma/device.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* Options as on a command line; ended by NULL. */
static struct doctor *doctor_with(char **argv)
{
    struct err err = { 0 };
    struct doctor *d = MEM_NEW(struct doctor);
    struct config *c = config_create(OPTIONS, "doctor");
    int argc = 0, none = 0;
    while (argv[argc]) argc++;
    if (config_load_args(c, argc, argv, NULL, &none, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    d->c = c;
    return d;
}

static void doctor_done(struct doctor *d)
{
    config_free((struct config *)d->c);
    mem_free(d);
}

static const struct doctor_line *line_of(const struct doctor *d, const char *what)
{
    for (size_t i = 0; i < d->n; i++)
        if (strcmp(d->lines[i].what, what) == 0) return &d->lines[i];
    test_fail(__FILE__, __LINE__, "there is no line about %s", what);
}

TEST(protocols_are_asked_for_alone_with_others_by_default_or_not)
{
    struct doctor *d = doctor_with((char *[]){ "--cache-transfer-protocol", "rdma", NULL });
    CHECK_EQ_INT(doctor_asked_for(d->c, "rdma"), DOCTOR_ASKED_ALONE);
    CHECK_EQ_INT(doctor_asked_for(d->c, "ucx"), DOCTOR_NOT_ALLOWED);
    doctor_done(d);
    d = doctor_with((char *[]){ "--cache-transfer-protocol", "rdma, ipc", NULL });
    CHECK_EQ_INT(doctor_asked_for(d->c, "rdma"), DOCTOR_ASKED);
    CHECK_EQ_INT(doctor_asked_for(d->c, "ipc"), DOCTOR_ASKED);
    doctor_done(d);
    d = doctor_with((char *[]){ NULL });
    CHECK_EQ_INT(doctor_asked_for(d->c, "tcp"), DOCTOR_ALLOWED);
    CHECK_EQ_INT(doctor_missing(DOCTOR_ALLOWED), DOCTOR_OK);
    CHECK_EQ_INT(doctor_missing(DOCTOR_ASKED), DOCTOR_WARN);
    CHECK_EQ_INT(doctor_missing(DOCTOR_ASKED_ALONE), DOCTOR_FAIL);
    doctor_done(d);
}

TEST(a_protocol_named_twice_is_still_alone)
{
    struct doctor *d = doctor_with((char *[]){ "--cache-transfer-protocol", "rdma,rdma", NULL });
    CHECK_EQ_INT(doctor_asked_for(d->c, "rdma"), DOCTOR_ASKED_ALONE);
    doctor_done(d);
}

TEST(rdma_and_ucx_alone_fail_when_the_host_has_neither)
{
    struct doctor *d = doctor_with((char *[]){ "--cache-transfer-protocol", "rdma,ucx", NULL });
    doctor_add(d, "RDMA", DOCTOR_WARN, "this host has no RDMA device");
    doctor_check_transports(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 0); /* ucx is left */
    doctor_add(d, "UCX", DOCTOR_WARN, "no device");
    doctor_check_transports(d);
    CHECK_EQ_INT(line_of(d, "KV")->result, DOCTOR_FAIL);
    doctor_done(d);
    d = doctor_with((char *[]){ "--cache-transfer-protocol", "rdma,ucx,tcp", NULL });
    doctor_add(d, "RDMA", DOCTOR_WARN, "this host has no RDMA device");
    doctor_add(d, "UCX", DOCTOR_WARN, "no device");
    doctor_check_transports(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 0);
    doctor_done(d);
}

TEST(options_that_a_node_refuses_fail)
{
    struct doctor *d = doctor_with((char *[]){ "--cache-transfer-protocol", "ipc,bogus", NULL });
    doctor_check_options(d);
    CHECK_EQ_STR(line_of(d, "options")->text,
                 "--cache-transfer-protocol: 'bogus' is not one of ipc, rdma, ucx, tcp");
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 1);
    doctor_done(d);
    d = doctor_with(
        (char *[]){ "--rdma-comm-ports", "7000", "--local-data-parallel-id", "1", NULL });
    doctor_check_options(d);
    CHECK(strstr(line_of(d, "options")->text, "--rdma-comm-ports has 1 ports, but this is rank 1"));
    doctor_done(d);
    d = doctor_with((char *[]){ "--cache-transfer-protocol", "rdma, ipc", NULL });
    doctor_check_options(d);
    CHECK_EQ_INT(d->n, 0);
    doctor_done(d);
}

TEST(a_protocol_that_is_not_built_in_fails_only_where_it_is_the_only_one)
{
    struct doctor *d = doctor_with((char *[]){ "--cache-transfer-protocol", "ucx", NULL });
    doctor_add_not_built(d, "UCX", "ucx");
    CHECK_EQ_INT(d->lines[0].result, DOCTOR_FAIL);
    CHECK(d->lines[0].fix[0]);
    doctor_done(d);
    d = doctor_with((char *[]){ "--cache-transfer-protocol", "ipc,tcp", NULL });
    doctor_add_not_built(d, "UCX", "ucx");
    CHECK_EQ_INT(d->lines[0].result, DOCTOR_OK);
    CHECK(strstr(d->lines[0].text, "not asked for"));
    doctor_done(d);
}

TEST(tuning_variables_are_read_judged_and_named_when_idle)
{
    struct doctor *d = doctor_with((char *[]){ NULL });
    setenv("KVCACHE_RDMA_NICS", "mlx5_0", 1);
    setenv("KVCACHE_IB_TIMEOUT", "99", 1);
    setenv("KVCACHE_DEBUG", "1", 1);
    setenv("KVCACHE_SOCKET_IFNAME", "nosuchif0", 1);
    setenv("BATON_RDMA_CM", "1", 1);
    doctor_check_tuning(d);
    CHECK_EQ_STR(d->tuning.rdma.nics, "mlx5_0");
    bool cm = access("/dev/infiniband/rdma_cm", R_OK | W_OK) == 0;
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), cm ? 2 : 3);
    const struct doctor_line *last = &d->lines[d->n - 2]; /* before the interface */
    CHECK(strstr(last->text, "BATON_RDMA_CM=1: /dev/infiniband/rdma_cm") &&
          last->result == (cm ? DOCTOR_OK : DOCTOR_FAIL));
    CHECK_EQ_STR(line_of(d, "interface")->text,
                 "KVCACHE_SOCKET_IFNAME: this host has no network interface nosuchif0");
    CHECK_EQ_STR(d->lines[0].text, "KVCACHE_IB_TIMEOUT: '99' is not a number from 1 to 31");
    CHECK(strstr(d->lines[1].text, "KVCACHE_DEBUG") && d->lines[1].result == DOCTOR_OK);
    doctor_done(d);
}

TEST(locked_memory_is_held_against_the_kv_cache_when_rdma_was_asked_for)
{
    const struct rlimit small = { 1 << 20, 1 << 20 };
    if (setrlimit(RLIMIT_MEMLOCK, &small) != 0) SKIP("RLIMIT_MEMLOCK cannot be set");
    struct doctor *d = doctor_with(
        (char *[]){ "--cache-transfer-protocol", "rdma", "--kv-cache-memory", "0.01", NULL });
    doctor_check_memory(d);
    const struct doctor_line *line = line_of(d, "locked memory");
    /* root may exceed the limit */
    if (strstr(line->text, "CAP_IPC_LOCK")) CHECK_EQ_INT(line->result, DOCTOR_OK);
    else
        CHECK(line->result == DOCTOR_FAIL && strstr(line->text, "10.2 MiB") &&
              strstr(line->fix, "ulimit -l"));
    doctor_done(d);
    d = doctor_with((char *[]){ "--cache-transfer-protocol", "ipc", NULL });
    doctor_check_memory(d);
    CHECK_EQ_INT(line_of(d, "locked memory")->result, DOCTOR_OK);
    doctor_done(d);
}

TEST(the_limit_holds_who_may_not_exceed_it)
{
    const struct rlimit small = { 1 << 20, 1 << 20 };
    if (setrlimit(RLIMIT_MEMLOCK, &small) != 0 ||
        (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)))
        SKIP("privileges cannot be given up");
    struct doctor *d = doctor_with(
        (char *[]){ "--cache-transfer-protocol", "rdma,ipc", "--kv-cache-memory", "0.01", NULL });
    doctor_check_memory(d);
    const struct doctor_line *line = line_of(d, "locked memory");
    CHECK_EQ_INT(line->result, DOCTOR_WARN);
    CHECK_EQ_STR(line->text, "1.0 MiB, but registering locks more: the KV cache of any model takes "
                             "at most 10.2 MiB");
    doctor_done(d);
    d = doctor_with(
        (char *[]){ "--cache-transfer-protocol", "rdma,ipc", "--device", "cuda", NULL });
    doctor_check_memory(d);
    CHECK_EQ_INT(line_of(d, "locked memory")->result, DOCTOR_WARN);
    CHECK_EQ_STR(line_of(d, "locked memory")->text,
                 "1.0 MiB, but registering locks more: staging memory takes 8.0 MiB");
    doctor_done(d);
}

TEST(rdma_ports_in_use_are_found)
{
    struct sockaddr_in a = { .sin_family = AF_INET };
    socklen_t n = sizeof a;
    char text[24];
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&a, n) == 0 && listen(fd, 1) == 0 &&
          getsockname(fd, (struct sockaddr *)&a, &n) == 0);
    snprintf(text, sizeof text, "0,%u", ntohs(a.sin_port));
    struct doctor *d = doctor_with((char *[]){ "--port", "0", "--rdma-comm-ports", text, NULL });
    doctor_check_ports(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 1);
    CHECK(strstr(line_of(d, "port")->text, "--rdma-comm-ports"));
    close(fd);
    doctor_done(d);
}

TEST(huge_pages_are_one_line)
{
    struct doctor *d = doctor_with((char *[]){ NULL });
    doctor_check_huge_pages(d);
    CHECK_EQ_INT(d->n, 1);
    CHECK(strstr(d->lines[0].text, "transparent:"));
    doctor_done(d);
}

TEST(lists_in_the_kernels_format_are_read)
{
    CHECK(doctor_list_has("0-15,32-47", 0) && doctor_list_has("0-15,32-47", 15) &&
          doctor_list_has("0-15,32-47", 40));
    CHECK(!doctor_list_has("0-15,32-47", 16) && !doctor_list_has("0-15,32-47", 48) &&
          !doctor_list_has("", 0) && !doctor_list_has("x", 0));
    CHECK(doctor_list_has("3", 3) && !doctor_list_has("3,", 4) && doctor_list_has("1,3,5", 5));
    if (access("/sys/devices/system/node/node0", F_OK) != 0)
        SKIP("this kernel does not show NUMA nodes");
    bool cpus = false, memory = false;
    for (int node = 0; node < 64; node++) {
        cpus |= doctor_runs_on_node(node);
        memory |= doctor_memory_on_node(node);
    }
    CHECK(cpus && memory);
    CHECK(doctor_only_node() < 0 || doctor_runs_on_node(doctor_only_node()));
    CHECK(!doctor_runs_on_node(1000));
}

#ifdef BATON_HAVE_RDMA
static struct rdma_gid ROCE[] = {
    { .index = 0, .type = RDMA_GID_ROCE_V1, .raw = { 0xfe, 0x80, [15] = 1 }, .link_local = true },
    {
        .index = 3,
        .type = RDMA_GID_ROCE_V2,
        .raw = { [10] = 0xff, 0xff, 10, 0, 0, 7 },
        .ipv4 = true,
    }
};

static struct rdma_port roce_port(void)
{
    return (struct rdma_port){
        .device = "mlx5_0",
        .number = 1,
        .link = RDMA_LINK_ETHERNET,
        .active = true,
        .state = "ACTIVE",
        .bytes_per_s = 50000000000,
        .mtu = 4096,
        .mtu_max = 4096,
        .numa_node = -1,
        .pci = "0000:18:00.0",
        .gids = ROCE,
        .n_gids = 2,
        .has_mw = true,
    };
}

TEST(a_good_port_is_described)
{
    struct doctor *d = doctor_with((char *[]){ NULL });
    struct rdma_port p = roce_port();
    doctor_check_port(d, &p);
    CHECK_EQ_STR(
        line_of(d, "RDMA port")->text,
        "mlx5_0:1: ACTIVE, Ethernet 400 Gbit/s, 0000:18:00.0, NUMA node -1, memory windows");
    CHECK_EQ_STR(line_of(d, "RDMA MTU")->text, "mlx5_0:1: active MTU 4096, the port can do 4096");
    CHECK_EQ_STR(line_of(d, "RDMA GID")->text, "mlx5_0:1: 3 (RoCE v2 10.0.0.7) of 2");
    CHECK_EQ_INT(doctor_count(d, DOCTOR_OK), d->n);
    doctor_done(d);
}

TEST(what_is_wrong_with_a_port_is_said_with_its_remedy)
{
    struct doctor *d = doctor_with((char *[]){ NULL });
    struct rdma_port p = roce_port();
    p.mtu = 1024;
    p.software = true;
    p.n_gids = 1;
    doctor_check_port(d, &p);
    CHECK(line_of(d, "RDMA port")->result == DOCTOR_WARN &&
          strstr(line_of(d, "RDMA port")->text, "emulated in software"));
    CHECK(line_of(d, "RDMA MTU")->result == DOCTOR_WARN &&
          strstr(line_of(d, "RDMA MTU")->fix, "mtu 4180"));
    CHECK(line_of(d, "RDMA GID")->result == DOCTOR_WARN &&
          strstr(line_of(d, "RDMA GID")->fix, "RoCE v1"));
    d->n = 0;
    d->tuning.rdma.mtu = 4096;
    d->tuning.rdma.gid_given = true;
    d->tuning.rdma.gid_index = 3;
    doctor_check_port(d, &p);
    CHECK_EQ_INT(line_of(d, "RDMA MTU")->result, DOCTOR_FAIL);
    CHECK_EQ_INT(line_of(d, "RDMA GID")->result, DOCTOR_FAIL);
    doctor_done(d);
}

TEST(a_missing_device_is_as_bad_as_it_was_asked_for)
{
    static const struct {
        char *list;
        enum doctor_result want;
    } cases[] = { { "rdma", DOCTOR_FAIL }, { "rdma,ipc", DOCTOR_WARN }, { "ipc,tcp", DOCTOR_OK } };
    struct rdma_devices all;
    struct err err = { 0 };
    enum status st = rdma_devices_list(&all, &err);
    bool some = st == OK && all.n > 0;
    if (st == OK) rdma_devices_release(&all);
    if (some) SKIP("this host has RDMA devices, so none is missing");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct doctor *d = doctor_with(
            (char *[]){ "--cache-transfer-protocol", cases[i].list, NULL });
        doctor_check_rdma(d);
        CHECK_EQ_INT(line_of(d, "RDMA")->result, cases[i].want);
        CHECK(cases[i].want == DOCTOR_OK || line_of(d, "RDMA")->fix[0]);
        doctor_done(d);
    }
    struct doctor *d = doctor_with((char *[]){ NULL });
    d->tuning.rdma.nics = "mlx5_0";
    doctor_check_rdma(d);
    CHECK_EQ_INT(line_of(d, "RDMA")->result, DOCTOR_FAIL);
    CHECK(strstr(line_of(d, "RDMA")->text, "KVCACHE_RDMA_NICS=mlx5_0"));
    doctor_done(d);
}

TEST(priorities_are_read_from_a_folder)
{
    const char *dir = test_tmpdir();
    char path[512], out[24];
    CHECK(!doctor_priorities_on(dir, out));
    for (int i = 0; i < 8; i++) {
        snprintf(path, sizeof path, "%s/%d", dir, i);
        FILE *f = fopen(path, "w");
        CHECK(f != NULL);
        fprintf(f, "%d\n", i == 3 || i == 5);
        fclose(f);
    }
    CHECK(doctor_priorities_on(dir, out));
    CHECK_EQ_STR(out, "3,5");
}
#else
TEST(a_good_port_is_described) { SKIP("built without libibverbs and librdmacm"); }
TEST(what_is_wrong_with_a_port_is_said_with_its_remedy)
{
    SKIP("built without libibverbs and librdmacm");
}
TEST(a_missing_device_is_as_bad_as_it_was_asked_for)
{
    SKIP("built without libibverbs and librdmacm");
}
TEST(priorities_are_read_from_a_folder) { SKIP("built without libibverbs and librdmacm"); }
#endif

#ifdef BATON_HAVE_UCX
TEST(ucx_transports_are_judged_and_listed)
{
    struct doctor *d = doctor_with((char *[]){ "--cache-transfer-protocol", "ucx", NULL });
    d->tuning.ucx_tls = "tcp";
    doctor_check_ucx(d);
    CHECK_EQ_INT(line_of(d, "UCX")->result, DOCTOR_OK);
    CHECK(strstr(line_of(d, "UCX")->text, "of the transports tcp: tcp/"));
    d->n = 0;
    d->tuning.ucx_tls = "posix";
    doctor_check_ucx(d);
    CHECK_EQ_INT(line_of(d, "UCX")->result, DOCTOR_FAIL);
    CHECK(strstr(line_of(d, "UCX")->text, "'posix'") &&
          strstr(line_of(d, "UCX")->fix, "BATON_UCX_TLS"));
    d->n = 0;
    /* With such a NIC the line is ok, otherwise a failure: only ucx was asked for. */
    d->tuning.ucx_tls = "dc_mlx5";
    doctor_check_ucx(d);
    CHECK(line_of(d, "UCX")->result == DOCTOR_OK ||
          (line_of(d, "UCX")->result == DOCTOR_FAIL && line_of(d, "UCX")->fix[0]));
    doctor_done(d);
    d = doctor_with((char *[]){ NULL });
    doctor_check_ucx(d);
    CHECK_EQ_INT(line_of(d, "UCX")->result, DOCTOR_OK);
    doctor_done(d);
}
#else
TEST(ucx_transports_are_judged_and_listed) { SKIP("built without UCX"); }
#endif

TEST_MAIN(CASE(protocols_are_asked_for_alone_with_others_by_default_or_not),
          CASE(a_protocol_that_is_not_built_in_fails_only_where_it_is_the_only_one),
          CASE(a_protocol_named_twice_is_still_alone),
          CASE(rdma_and_ucx_alone_fail_when_the_host_has_neither),
          CASE(options_that_a_node_refuses_fail),
          CASE(tuning_variables_are_read_judged_and_named_when_idle),
          CASE(locked_memory_is_held_against_the_kv_cache_when_rdma_was_asked_for),
          CASE(the_limit_holds_who_may_not_exceed_it), CASE(rdma_ports_in_use_are_found),
          CASE(huge_pages_are_one_line), CASE(lists_in_the_kernels_format_are_read),
          CASE(a_good_port_is_described), CASE(what_is_wrong_with_a_port_is_said_with_its_remedy),
          CASE(a_missing_device_is_as_bad_as_it_was_asked_for),
          CASE(priorities_are_read_from_a_folder), CASE(ucx_transports_are_judged_and_listed))
