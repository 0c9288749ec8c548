/* test_rdma_schedule.c - how ports are paired, which rail gets a put, and when a broken rail is
 * tried again. */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_RDMA
#include <arpa/inet.h>
#include <string.h>

#include "kvtransfer/rdma/schedule.h"

static struct rdma_port_addr roce(const char *ipv4)
{
    struct rdma_port_addr p = {
        .link = RDMA_LINK_ETHERNET,
        .gid_type = RDMA_GID_ROCE_V2,
        .mtu = 1024,
    };
    p.gid[10] = p.gid[11] = 0xff;
    CHECK_EQ_INT(inet_pton(AF_INET, ipv4, p.gid + 12), 1);
    return p;
}

static struct rdma_port_addr infiniband(uint8_t subnet, uint8_t id)
{
    return (struct rdma_port_addr){
        .gid = { 0xfe, 0x80, [7] = subnet, [15] = id },
        .lid = id,
        .link = RDMA_LINK_INFINIBAND,
        .mtu = 4096,
    };
}

TEST(pairs_ports_of_one_subnet)
{
    /* the other side lists its ports in reverse */
    struct rdma_port_addr mine[] = { roce("10.1.0.1"), roce("10.2.0.1"), roce("10.3.0.1") },
                          theirs[] = { roce("10.3.0.2"), roce("10.2.0.2"), roce("10.1.0.2") };
    struct rdma_pair p[RDMA_RAILS_MAX];
    CHECK_EQ_INT(rdma_schedule_pair(mine, 3, theirs, 3, p), 3);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ_INT(p[i].mine, i);
        CHECK_EQ_INT(p[i].theirs, 2 - i);
    }
}

TEST(pairs_equals_by_index)
{
    struct rdma_port_addr mine[] = { infiniband(1, 1), infiniband(1, 1) },
                          theirs[] = { infiniband(1, 1), infiniband(1, 1) };
    struct rdma_pair p[RDMA_RAILS_MAX];
    CHECK_EQ_INT(rdma_schedule_pair(mine, 2, theirs, 2, p), 2);
    CHECK(p[0].theirs == 0 && p[1].theirs == 1);
}

/* The side with more ports uses all of them; ports of the other have several partners. */
TEST(pairs_unequal_numbers)
{
    struct rdma_port_addr many[] = { roce("10.1.0.1"), roce("10.2.0.1"), roce("10.1.0.9"),
                                     roce("10.2.0.9") },
                          few[] = { roce("10.2.0.2"), roce("10.1.0.2") };
    struct rdma_pair p[RDMA_RAILS_MAX];
    CHECK_EQ_INT(rdma_schedule_pair(many, 4, few, 2, p), 4);
    for (uint32_t i = 0; i < 4; i++) CHECK(p[i].mine == i && p[i].theirs == (i + 1) % 2);
    CHECK_EQ_INT(rdma_schedule_pair(few, 2, many, 4, p), 4);
    uint32_t of[4] = { 0 };
    for (uint32_t i = 0; i < 4; i++) of[p[i].theirs]++;
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ_INT(of[i], 1);
    struct rdma_port_addr eight[RDMA_RAILS_MAX];
    for (int i = 0; i < RDMA_RAILS_MAX; i++) eight[i] = roce("10.1.0.1");
    CHECK_EQ_INT(rdma_schedule_pair(eight, RDMA_RAILS_MAX, few, 1, p), RDMA_RAILS_MAX);
}

TEST(pairs_only_one_kind_of_link)
{
    struct rdma_port_addr mine[] = { infiniband(1, 1), roce("10.1.0.1") },
                          theirs[] = { roce("10.1.0.2") };
    struct rdma_pair p[RDMA_RAILS_MAX];
    CHECK_EQ_INT(rdma_schedule_pair(mine, 2, theirs, 1, p), 1);
    CHECK(p[0].mine == 1 && p[0].theirs == 0);
    CHECK_EQ_INT(rdma_schedule_pair(mine, 1, theirs, 1, p), 0);
}

TEST(pick_weighs_by_speed)
{
    struct rdma_qp_load qps[] = { { 0, 100, true }, { 0, 300, true } };
    uint64_t of[2] = { 0 };
    for (int i = 0; i < 400; i++) {
        uint32_t k = rdma_schedule_pick(qps, 2, 1000);
        qps[k].in_flight += 1000;
        of[k]++;
    }
    CHECK_EQ_INT(of[0], 100);
    CHECK_EQ_INT(of[1], 300);
}

TEST(pick_takes_what_is_usable)
{
    struct rdma_qp_load qps[] = { { 0, 0, false }, { 5000, 0, true }, { 4000, 0, true } };
    CHECK_EQ_INT(rdma_schedule_pick(qps, 3, 10), 2);
    qps[2].usable = false;
    CHECK_EQ_INT(rdma_schedule_pick(qps, 3, 10), 1);
    qps[1].usable = false;
    CHECK_EQ_INT(rdma_schedule_pick(qps, 3, 10), 3);
    CHECK_EQ_INT(rdma_schedule_pick(qps, 0, 10), 0);
    struct rdma_qp_load equal[] = { { 7, 10, true }, { 7, 10, true } };
    CHECK_EQ_INT(rdma_schedule_pick(equal, 2, 1), 0);
}

TEST(rests_grow_to_a_bound)
{
    CHECK_EQ_INT(rdma_schedule_backoff_ms(0, true), RDMA_RETRY_FIRST_MS);
    CHECK_EQ_INT(rdma_schedule_backoff_ms(1, true), 2 * RDMA_RETRY_FIRST_MS);
    CHECK_EQ_INT(rdma_schedule_backoff_ms(50, true), RDMA_RETRY_MAX_MS);
    CHECK_EQ_INT(rdma_schedule_backoff_ms(UINT32_MAX, true), RDMA_RETRY_MAX_MS);
    CHECK_EQ_INT(rdma_schedule_backoff_ms(50, false), RDMA_RETRY_ALONE_MS);
}

TEST(timeout_of_an_exponent)
{
    CHECK_EQ_INT(rdma_schedule_timeout_ms(14), 68);   /* 67.1 */
    CHECK_EQ_INT(rdma_schedule_timeout_ms(18), 1074); /* FastDeploy's default */
    CHECK_EQ_INT(rdma_schedule_timeout_ms(1), 1);
    CHECK_EQ_INT(rdma_schedule_timeout_ms(31), 8796094);
}

TEST_MAIN(CASE(pairs_ports_of_one_subnet), CASE(pairs_equals_by_index), CASE(pairs_unequal_numbers),
          CASE(pairs_only_one_kind_of_link), CASE(pick_weighs_by_speed),
          CASE(pick_takes_what_is_usable), CASE(rests_grow_to_a_bound),
          CASE(timeout_of_an_exponent))

#else

TEST(not_built) { SKIP("built without libibverbs and librdmacm: rdma's logic is NOT tested"); }

TEST_MAIN(CASE(not_built))

#endif
