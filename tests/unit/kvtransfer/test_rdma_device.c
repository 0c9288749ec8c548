/* test_rdma_device.c - the choice of RDMA ports and GIDs from tables written by hand, and the list
 * of this host's ports, if it has any. */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_RDMA
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kvtransfer/rdma/device.h"
#include "shared/base/mem.h"

static struct rdma_gid gid(uint32_t index, enum rdma_gid_type type, const char *address)
{
    struct rdma_gid g = { .index = index, .type = type, .netdev = "eth0" };
    struct in_addr v4;
    if (inet_pton(AF_INET, address, &v4) == 1) {
        g.ipv4 = true;
        g.raw[10] = g.raw[11] = 0xff;
        memcpy(g.raw + 12, &v4, 4);
        g.link_local = g.raw[12] == 169 && g.raw[13] == 254;
    } else {
        CHECK_EQ_INT(inet_pton(AF_INET6, address, g.raw), 1);
        g.link_local = g.raw[0] == 0xfe && (g.raw[1] & 0xc0) == 0x80;
    }
    return g;
}

static struct rdma_port port(const char *device, unsigned number, bool active, int numa,
                             uint64_t gbit, bool software)
{
    struct rdma_port p = {
        .number = (uint8_t)number,
        .link = RDMA_LINK_ETHERNET,
        .active = active,
        .numa_node = numa,
        .bytes_per_s = gbit * 125000000,
        .software = software,
    };
    snprintf(p.device, sizeof p.device, "%s", device);
    snprintf(p.state, sizeof p.state, "%s", active ? "ACTIVE" : "DOWN");
    return p;
}

/* Two NUMA nodes with two 400 Gbit/s devices each, a 25 Gbit/s one with two ports of which the
 * second is down, and an emulated one. */
static const char *chosen(const char *nics, int numa, enum status want, char text[512])
{
    struct rdma_port ports[] = {
        port("mlx5_0", 1, true, 0, 400, false), port("mlx5_1", 1, true, 0, 400, false),
        port("mlx5_2", 1, true, 1, 400, false), port("mlx5_10", 1, true, 1, 400, false),
        port("mlx5_3", 1, true, 1, 25, false),  port("mlx5_3", 2, false, 1, 25, false),
        port("rxe0", 1, true, -1, 0, true)
    };
    struct rdma_devices all = { .ports = ports, .n = COUNT_OF(ports) }, out = { 0 };
    struct err err = { 0 };
    char name[RDMA_PORT_TEXT_MAX];
    enum status st = rdma_devices_choose(&all, &(struct kvt_rdma_tuning){ .nics = nics }, numa,
                                         &out, &err);
    if (st != want)
        test_fail(__FILE__, __LINE__, "nics %s: status %d, not %d: %s", nics ? nics : "(none)", st,
                  want, err.text);
    text[0] = 0;
    for (size_t i = 0; i < out.n; i++)
        snprintf(text + strlen(text), 512 - strlen(text), "%s%s", i ? " " : "",
                 rdma_port_text(&out.ports[i], name));
    if (st != OK) snprintf(text, 512, "%s", err.text);
    rdma_devices_release(&out);
    return text;
}

TEST(without_names_the_active_hardware_ports_near_the_memory_are_chosen)
{
    char text[512];
    CHECK_EQ_STR(chosen(NULL, 0, OK, text), "mlx5_0:1 mlx5_1:1");
    CHECK_EQ_STR(chosen(NULL, 1, OK, text), "mlx5_2:1 mlx5_10:1 mlx5_3:1");
    CHECK_EQ_STR(chosen(NULL, -1, OK, text), "mlx5_0:1 mlx5_1:1 mlx5_2:1 mlx5_10:1 mlx5_3:1");
    CHECK_EQ_STR(chosen("", 7, OK, text), "mlx5_0:1 mlx5_1:1 mlx5_2:1 mlx5_10:1 mlx5_3:1");
}

TEST(names_restrict_and_order)
{
    char text[512];
    CHECK_EQ_STR(chosen("mlx5_10,mlx5_0", 0, OK, text), "mlx5_10:1 mlx5_0:1");
    CHECK_EQ_STR(chosen(" rxe0 , mlx5_3:1,rxe0", 0, OK, text), "rxe0:1 mlx5_3:1");
    CHECK_EQ_STR(chosen("mlx5_3", 0, OK, text), "mlx5_3:1"); /* its other port is down */
}

TEST(a_wrong_name_is_one_sentence_that_says_what_there_is)
{
    static const struct {
        const char *nics, *why;
    } cases[] = {
        { "mlx5_9", "'mlx5_9' is not an RDMA device of this host" },
        { "mlx5_0,mlx5_3:2", "'mlx5_3:2' is not active" },
        { "mlx5_0:4", "'mlx5_0:4' is a port that the device does not have" },
        { "mlx5_0:x", "'mlx5_0:x' has no port number after the colon" },
        { "mlx5_0:", "'mlx5_0:' has no port number after the colon" },
        { "mlx5_0,,mlx5_1", "'' is an empty name" },
        { ":1", "':1' is an empty name" },
        { "mlx5_0:0", "'mlx5_0:0' has no port number after the colon" },
    };
    char text[512], sentence[600];
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        snprintf(sentence, sizeof sentence,
                 "KVCACHE_RDMA_NICS=%s: %s; RDMA ports here: mlx5_0:1 (ACTIVE), mlx5_1:1 (ACTIVE), "
                 "mlx5_2:1 (ACTIVE), mlx5_10:1 (ACTIVE), "
                 "mlx5_3:1 (ACTIVE), mlx5_3:2 (DOWN), rxe0:1 (ACTIVE)",
                 cases[i].nics, cases[i].why);
        CHECK_EQ_STR(chosen(cases[i].nics, 0, ERR_CONFIG, text), sentence);
    }
}

TEST(no_device_and_no_active_port_are_said)
{
    struct rdma_port down[] = { port("mlx5_0", 1, false, 0, 400, false) };
    struct rdma_devices all = { .ports = down, .n = 1 }, out = { 0 };
    struct err err = { 0 };
    CHECK_STATUS(rdma_devices_choose(&all, &(struct kvt_rdma_tuning){ 0 }, -1, &out, &err),
                 ERR_NODEV);
    CHECK_EQ_STR(err.text, "no RDMA port is active; RDMA ports here: mlx5_0:1 (DOWN)");
    all.n = 0;
    CHECK_STATUS(rdma_devices_choose(&all, &(struct kvt_rdma_tuning){ 0 }, -1, &out, &err),
                 ERR_NODEV);
    CHECK_STATUS(
        rdma_devices_choose(&all, &(struct kvt_rdma_tuning){ .nics = "mlx5_0" }, -1, &out, &err),
        ERR_CONFIG);
    CHECK(strstr(err.text, "mlx5_0") && strstr(err.text, "no RDMA device"));
}

TEST(an_emulation_is_used_when_nothing_else_is_there_and_eight_rails_at_most)
{
    struct rdma_port ports[12];
    struct rdma_devices all = { .ports = ports, .n = 12 }, out = { 0 };
    struct err err = { 0 };
    char name[16];
    for (int i = 0; i < 12; i++) {
        snprintf(name, sizeof name, "rxe%d", i);
        ports[i] = port(name, 1, true, -1, 0, true);
    }
    CHECK_OK(rdma_devices_choose(&all, &(struct kvt_rdma_tuning){ 0 }, 0, &out, &err));
    CHECK_EQ_INT(out.n, RDMA_RAILS_MAX);
    CHECK_EQ_STR(out.ports[7].device, "rxe7");
    CHECK_EQ_INT(out.n_left_out, 4);
    rdma_devices_release(&out);
    CHECK_OK(rdma_devices_choose(
        &all,
        &(struct kvt_rdma_tuning){ .nics = "rxe0,rxe1,rxe2,rxe3,rxe4,rxe5,rxe6,rxe7,rxe8,rxe0" }, 0,
        &out, &err));
    CHECK_EQ_INT(out.n, RDMA_RAILS_MAX);
    CHECK_EQ_INT(out.n_left_out, 1); /* rxe8; rxe0 is already listed */
    rdma_devices_release(&out);
}

static unsigned gid_index(struct rdma_gid *gids, size_t n, enum rdma_link link, const char *local)
{
    struct rdma_port p = port("mlx5_0", 1, true, 0, 400, false);
    struct sockaddr_in v4 = { .sin_family = AF_INET };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6 };
    const struct sockaddr *hint = NULL;
    const struct rdma_gid *out;
    struct err err = { 0 };
    p.link = link;
    p.gids = gids;
    p.n_gids = n;
    if (local && inet_pton(AF_INET, local, &v4.sin_addr) == 1) hint = (struct sockaddr *)&v4;
    else if (local && inet_pton(AF_INET6, local, &v6.sin6_addr) == 1) hint = (struct sockaddr *)&v6;
    CHECK_OK(rdma_gid_choose(&p, hint, &(struct kvt_rdma_tuning){ 0 }, &out, &err));
    return out->index;
}

TEST(a_routable_ipv4_gid_of_roce_v2_is_preferred)
{
    /* What an mlx5 port shows: link-local v1 and v2, IPv4 v1 and v2, a global IPv6 pair, a second
     * IPv4 address. */
    struct rdma_gid gids[] = {
        gid(0, RDMA_GID_ROCE_V1, "fe80::1"),  gid(1, RDMA_GID_ROCE_V2, "fe80::1"),
        gid(2, RDMA_GID_ROCE_V1, "10.0.0.7"), gid(3, RDMA_GID_ROCE_V2, "10.0.0.7"),
        gid(4, RDMA_GID_ROCE_V1, "fd00::7"),  gid(5, RDMA_GID_ROCE_V2, "fd00::7"),
        gid(7, RDMA_GID_ROCE_V2, "10.9.0.7"), gid(8, RDMA_GID_ROCE_V2, "169.254.1.1")
    };
    CHECK_EQ_INT(gid_index(gids, COUNT_OF(gids), RDMA_LINK_ETHERNET, NULL), 3);
    /* the control connection's own address */
    CHECK_EQ_INT(gid_index(gids, COUNT_OF(gids), RDMA_LINK_ETHERNET, "10.9.0.7"), 7);
    CHECK_EQ_INT(gid_index(gids, COUNT_OF(gids), RDMA_LINK_ETHERNET, "fd00::7"), 5);
    CHECK_EQ_INT(gid_index(gids, COUNT_OF(gids), RDMA_LINK_ETHERNET, "::ffff:10.9.0.7"), 7);
    CHECK_EQ_INT(gid_index(gids, COUNT_OF(gids), RDMA_LINK_ETHERNET, "192.0.2.1"), 3);
    /* v2 before v1, even link-local */
    CHECK_EQ_INT(gid_index(gids, 3, RDMA_LINK_ETHERNET, "10.0.0.7"), 1);
    CHECK_EQ_INT(gid_index(gids, 1, RDMA_LINK_ETHERNET, NULL), 0);
    CHECK_EQ_INT(gid_index(&gids[5], 3, RDMA_LINK_ETHERNET, NULL), 7);
    struct rdma_gid ib[] = { gid(0, RDMA_GID_IB, "fe80::ec0d:9a03:0:1"),
                             gid(1, RDMA_GID_IB, "fec0::1") };
    CHECK_EQ_INT(gid_index(ib, 2, RDMA_LINK_INFINIBAND, "10.0.0.7"), 0);
}

TEST(a_given_gid_index_is_obeyed_and_checked)
{
    struct rdma_gid gids[] = { gid(0, RDMA_GID_ROCE_V1, "fe80::1"),
                               gid(1, RDMA_GID_ROCE_V2, "10.0.0.7") };
    struct rdma_port p = port("mlx5_0", 1, true, 0, 400, false);
    const struct rdma_gid *out = NULL;
    struct err err = { 0 };
    p.gids = gids;
    p.n_gids = 2;
    CHECK_OK(rdma_gid_choose(
        &p, NULL, &(struct kvt_rdma_tuning){ .gid_given = true, .gid_index = 0 }, &out, &err));
    CHECK_EQ_INT(out->index, 0);
    CHECK_STATUS(rdma_gid_choose(&p, NULL,
                                 &(struct kvt_rdma_tuning){ .gid_given = true, .gid_index = 3 },
                                 &out, &err),
                 ERR_CONFIG);
    CHECK_EQ_STR(err.text, "KVCACHE_RDMA_GID_INDEX=3: mlx5_0:1 has no such GID; it has 0 (RoCE v1 "
                           "fe80::1), 1 (RoCE v2 10.0.0.7)");
    p.n_gids = 0;
    CHECK_STATUS(rdma_gid_choose(&p, NULL, &(struct kvt_rdma_tuning){ 0 }, &out, &err), ERR_NODEV);
}

TEST(link_speeds_of_known_nics)
{
    const uint64_t gbit = 125000000;
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_ETHERNET, 1, 4), 10 * gbit);      /* 10GbE */
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_ETHERNET, 1, 32), 25 * gbit);     /* 25GbE */
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_ETHERNET, 2, 32), 100 * gbit);    /* 100GbE */
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_ETHERNET, 2, 64), 200 * gbit);    /* 200GbE */
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_ETHERNET, 2, 128), 400 * gbit);   /* ConnectX-7 */
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_INFINIBAND, 2, 256), 800 * gbit); /* XDR 4x */
    /* QDR 4x after 8b/10b */
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_INFINIBAND, 2, 4), 32 * gbit);
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_INFINIBAND, 16, 64), 100 * gbit); /* HDR100: two lanes */
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_ETHERNET, 3, 4), 0);
    CHECK_EQ_INT(rdma_link_speed(RDMA_LINK_ETHERNET, 2, 0), 0);
    for (unsigned code = 1; code <= 5; code++)
        CHECK_EQ_INT(rdma_mtu_code(rdma_mtu_bytes(code)), code);
    CHECK_EQ_INT(rdma_mtu_bytes(5), 4096);
    CHECK_EQ_INT(rdma_mtu_bytes(6) + rdma_mtu_bytes(0) + rdma_mtu_code(1500), 0);
}

TEST(the_node_of_touched_memory_is_found)
{
    enum { BYTES = 1 << 20 };
    char *p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    CHECK_EQ_INT(rdma_numa_node_of(p, BYTES), -1); /* does not exist yet */
    memset(p, 1, BYTES);
    int node = rdma_numa_node_of(p, BYTES);
    munmap(p, BYTES);
    if (node < 0)
        SKIP("the kernel does not say on which NUMA node memory lies (no move_pages), or it lies "
             "on several");
    CHECK(node < 1024);
}

TEST(this_hosts_devices_are_read)
{
    struct rdma_devices all;
    struct err err = { 0 };
    CHECK_OK(rdma_devices_list(&all, &err));
    if (all.n == 0) SKIP("this host has no RDMA device");
    for (size_t i = 0; i < all.n; i++) {
        const struct rdma_port *p = &all.ports[i];
        const struct rdma_gid *g;
        CHECK(p->device[0] && p->number >= 1 && p->max_sge > 0 && p->max_qp_wr > 0);
        if (!p->active) continue;
        CHECK(p->mtu >= 256 && p->mtu <= 4096 && p->mtu <= p->mtu_max);
        CHECK_OK(rdma_gid_choose(p, NULL, &(struct kvt_rdma_tuning){ 0 }, &g, &err));
        CHECK(p->link != RDMA_LINK_ETHERNET || g->type != RDMA_GID_IB);
    }
    rdma_devices_release(&all);
}

TEST_MAIN(CASE(without_names_the_active_hardware_ports_near_the_memory_are_chosen),
          CASE(names_restrict_and_order),
          CASE(a_wrong_name_is_one_sentence_that_says_what_there_is),
          CASE(no_device_and_no_active_port_are_said),
          CASE(an_emulation_is_used_when_nothing_else_is_there_and_eight_rails_at_most),
          CASE(a_routable_ipv4_gid_of_roce_v2_is_preferred),
          CASE(a_given_gid_index_is_obeyed_and_checked), CASE(link_speeds_of_known_nics),
          CASE(the_node_of_touched_memory_is_found), CASE(this_hosts_devices_are_read))

#else
TEST(rdma) { SKIP("built without libibverbs and librdmacm"); }
TEST_MAIN(CASE(rdma))
#endif
