/* test_tuning.c - every tuning name: valid values set their field, invalid ones give one sentence
 * and change nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/tuning.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

static struct kvt_tuning set(const char *name, const char *value)
{
    struct kvt_tuning t = { 0 };
    struct err err = { 0 };
    bool known = false;
    if (kvt_tuning_set(&t, name, value, &known, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s=%s: %s", name, value, err.text);
    CHECK(known);
    return t;
}

TEST(values_arrive_in_their_fields)
{
    CHECK_EQ_STR(set("KVCACHE_RDMA_NICS", "mlx5_0,mlx5_1:2").rdma.nics, "mlx5_0,mlx5_1:2");
    CHECK(set("KVCACHE_RDMA_GID_INDEX", "0").rdma.gid_given);
    CHECK_EQ_INT(set("KVCACHE_RDMA_GID_INDEX", "3").rdma.gid_index, 3);
    CHECK_EQ_INT(set("KVCACHE_IB_TIMEOUT", "18").rdma.timeout, 18);
    CHECK(set("KVCACHE_RELAX_ORDERING", "1").rdma.relaxed_ordering);
    CHECK(set("KVCACHE_RDMA_RELAX_ORDERING", "true").rdma.relaxed_ordering);
    CHECK(!set("KVCACHE_RELAX_ORDERING", "0").rdma.relaxed_ordering);
    CHECK(set("KVCACHE_GDRCOPY_FLUSH_ENABLE", "1").rdma.flush_read);
    CHECK(set("KVCACHE_VERIFY_READ", "1").rdma.verify_read);
    CHECK_EQ_STR(set("KVCACHE_SOCKET_IFNAME", "bond0").socket_ifname, "bond0");
    CHECK_EQ_STR(set("KV_CACHE_SOCKET_IFNAME", "ens1f0np0").socket_ifname, "ens1f0np0");
    CHECK_EQ_INT(set("BATON_RDMA_MTU", "4096").rdma.mtu, 4096);
    CHECK_EQ_INT(set("BATON_RDMA_MTU", "auto").rdma.mtu, 0);
    CHECK_EQ_INT(set("BATON_RDMA_QPS", "4").rdma.qps_per_rail, 4);
    CHECK_EQ_INT(set("BATON_RDMA_RETRIES", "7").rdma.retries, 7);
    struct kvt_tuning t = set("BATON_RDMA_TRAFFIC_CLASS", "106");
    CHECK(t.rdma.traffic_class == 106 && t.rdma.traffic_class_given && !t.rdma.gid_given);
    CHECK_EQ_INT(set("BATON_RDMA_SERVICE_LEVEL", "15").rdma.service_level, 15);
    CHECK(set("BATON_RDMA_CM", "on").rdma.rdma_cm);
    CHECK_EQ_INT(set("BATON_RDMA_KEY", "window").rdma.key, KVT_RDMA_KEY_WINDOW);
    CHECK_EQ_INT(set("BATON_RDMA_KEY", "region").rdma.key, KVT_RDMA_KEY_REGION);
    CHECK_EQ_STR(set("BATON_UCX_TLS", "rc_verbs,tcp").ucx_tls, "rc_verbs,tcp");
    CHECK_EQ_INT(set("BATON_TCP_CONNECTIONS", "16").tcp_connections, 16);
    CHECK_EQ_INT(set("BATON_TCP_ZEROCOPY", "off").zerocopy, KVT_OFF);
    CHECK_EQ_INT(set("BATON_IPC_COPIERS", "4").copiers, 4);
    CHECK_EQ_INT(set("BATON_IPC_CMA", "on").cma, KVT_ON);
    CHECK_EQ_INT(set("BATON_IPC_CMA", "auto").cma, KVT_AUTO);
    CHECK(set("BATON_KV_LOSSY", "1").lossy);
    CHECK_EQ_STR(set("BATON_KV_FAULT", "flip=0.01").fault, "flip=0.01");
}

TEST(every_wrong_value_is_one_sentence_and_changes_nothing)
{
    static const struct {
        const char *name, *value, *sentence;
    } cases[] = {
        { "KVCACHE_RDMA_NICS", "mlx5_0,,mlx5_1",
          "KVCACHE_RDMA_NICS: 'mlx5_0,,mlx5_1' is not a comma list such as mlx5_0,mlx5_1 or "
          "mlx5_0:1" },
        { "KVCACHE_RDMA_NICS", "mlx5_0:0", NULL },
        { "KVCACHE_RDMA_NICS", "mlx5_0:1:2", NULL },
        { "KVCACHE_RDMA_NICS", "mlx5 0", NULL },
        { "KVCACHE_RDMA_NICS", "../x", NULL },
        { "KVCACHE_RDMA_NICS", ",", NULL },
        { "KVCACHE_RDMA_GID_INDEX", "256",
          "KVCACHE_RDMA_GID_INDEX: '256' is not a number from 0 to 255" },
        { "KVCACHE_RDMA_GID_INDEX", "-1", NULL },
        { "KVCACHE_RDMA_GID_INDEX", "three", NULL },
        { "KVCACHE_IB_TIMEOUT", "0", "KVCACHE_IB_TIMEOUT: '0' is not a number from 1 to 31" },
        { "KVCACHE_IB_TIMEOUT", "32", NULL },
        { "KVCACHE_IB_TIMEOUT", "18s", NULL },
        { "KVCACHE_RELAX_ORDERING", "2", "KVCACHE_RELAX_ORDERING: '2' is not 0 or 1" },
        { "KVCACHE_SOCKET_IFNAME", "an_interface_name_too_long", NULL },
        { "KVCACHE_SOCKET_IFNAME", "eth0,eth1", NULL },
        { "KV_CACHE_SOCKET_IFNAME", "eth0 ", NULL },
        { "BATON_RDMA_MTU", "9000",
          "BATON_RDMA_MTU: '9000' is not auto, 256, 512, 1024, 2048 or 4096" },
        { "BATON_RDMA_QPS", "17", NULL },
        { "BATON_RDMA_RETRIES", "8", NULL },
        { "BATON_RDMA_TRAFFIC_CLASS", "256", NULL },
        { "BATON_RDMA_SERVICE_LEVEL", "16", NULL },
        { "BATON_RDMA_CM", "maybe", NULL },
        { "BATON_RDMA_KEY", "none", NULL },
        { "BATON_UCX_TLS", "tcp,,", NULL },
        { "BATON_TCP_CONNECTIONS", "0", NULL },
        { "BATON_TCP_CONNECTIONS", "99999999999999999999", NULL },
        { "BATON_TCP_ZEROCOPY", "perhaps", NULL },
        { "BATON_IPC_COPIERS", "17", NULL },
        { "BATON_IPC_CMA", "2", NULL },
        { "BATON_KV_LOSSY", "lossy", NULL },
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct kvt_tuning t, before;
        struct err err = { 0 };
        bool known = false;
        memset(&t, 0x11, sizeof t);
        before = t;
        if (kvt_tuning_set(&t, cases[i].name, cases[i].value, &known, &err) != ERR_CONFIG)
            test_fail(__FILE__, __LINE__, "%s=%s was taken", cases[i].name, cases[i].value);
        CHECK(known);
        CHECK(memcmp(&t, &before, sizeof t) == 0);
        CHECK_EQ_STR(err.field, cases[i].name);
        CHECK(strstr(err.text, cases[i].name) && strstr(err.text, cases[i].value));
        if (cases[i].sentence) CHECK_EQ_STR(err.text, cases[i].sentence);
    }
}

TEST(an_empty_value_is_like_none_and_an_unknown_name_is_said)
{
    struct kvt_tuning t = { 0 }, none = { 0 };
    struct err err = { 0 };
    bool known = false;
    for (const struct kvt_tuning_name *n = kvt_tuning_names; n->name; n++) {
        CHECK_OK(kvt_tuning_set(&t, n->name, "", &known, &err));
        CHECK(known);
        CHECK_OK(kvt_tuning_set(&t, n->name, " ", &known, &err));
    }
    CHECK_OK(kvt_tuning_set(&t, "KVCACHE_RDMA_NIC", "mlx5_0", &known, &err));
    CHECK(!known);
    CHECK(memcmp(&t, &none, sizeof t) == 0);
}

TEST(names_without_effect_say_so_and_take_anything)
{
    struct kvt_tuning t = { 0 }, none = { 0 };
    struct err err = { 0 };
    bool known = false;
    size_t n_idle = 0;
    for (const struct kvt_tuning_name *n = kvt_tuning_names; n->name; n++) {
        CHECK(n->help[0] && n->values[0]);
        CHECK(n->no_effect == (strstr(n->help, "no effect") != NULL));
        if (!n->no_effect) continue;
        n_idle++;
        CHECK_OK(kvt_tuning_set(&t, n->name, "whatever", &known, &err));
    }
    CHECK_EQ_INT(n_idle, 6);
    CHECK(memcmp(&t, &none, sizeof t) == 0);
}

/* Random words of the characters of values, for every name: a valid value lies in its range; an
 * invalid one changes nothing, and the sentence names the setting and the value. */
TEST(random_values_never_leave_the_ranges)
{
    static const char letters[] = "0123456789:,._-+ abcdefnomlx\t/%\"'\\\x7f\xc3";
    enum { VALUE_MAX = 12 };
    uint32_t r[4 + VALUE_MAX];
    char value[VALUE_MAX + 1];
    size_t n_taken = 0, n_names = 0;
    while (kvt_tuning_names[n_names].name) n_names++;
    for (uint64_t round = 0; round < 200000; round++) {
        for (uint64_t i = 0; i < COUNT_OF(r); i += 4) rng_philox(4, round, i, &r[i]);
        const struct kvt_tuning_name *n = &kvt_tuning_names[r[0] % n_names];
        size_t len = r[1] % (r[2] % 4 ? 4 : VALUE_MAX + 1);
        for (size_t i = 0; i < len; i++) value[i] = letters[r[4 + i] % (sizeof letters - 1)];
        value[len] = 0;
        struct kvt_tuning t = { 0 }, none = { 0 };
        struct err err = { 0 };
        bool known = false;
        enum status st = kvt_tuning_set(&t, n->name, value, &known, &err);
        CHECK(known);
        if (st != OK) {
            CHECK_EQ_INT(st, ERR_CONFIG);
            CHECK(memcmp(&t, &none, sizeof t) == 0 && strstr(err.text, n->name));
            continue;
        }
        n_taken++;
        CHECK(t.rdma.timeout <= 31 && t.rdma.retries <= 7 && t.rdma.service_level <= 15 &&
              t.rdma.qps_per_rail <= 16);
        CHECK(t.copiers <= 16 && t.tcp_connections <= 16 && t.rdma.mtu <= 4096 &&
              t.rdma.key <= KVT_RDMA_KEY_REGION);
        CHECK(t.cma <= KVT_OFF && t.zerocopy <= KVT_OFF && t.rdma.port == 0 && t.ucx_port == 0);
        CHECK(!t.socket_ifname ||
              (strlen(t.socket_ifname) < 16 && !strpbrk(t.socket_ifname, "/: ")));
        CHECK(!t.rdma.nics || !strpbrk(t.rdma.nics, "/\"'"));
    }
    CHECK(n_taken > 1000);
}

TEST_MAIN(CASE(values_arrive_in_their_fields),
          CASE(every_wrong_value_is_one_sentence_and_changes_nothing),
          CASE(an_empty_value_is_like_none_and_an_unknown_name_is_said),
          CASE(names_without_effect_say_so_and_take_anything),
          CASE(random_values_never_leave_the_ranges))
