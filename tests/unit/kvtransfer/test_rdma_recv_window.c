/* test_rdma_recv_window.c - puts land in any order; what is counted is what has landed without a
 * gap. */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_RDMA
#include <stdlib.h>

#include "kvtransfer/rdma/recv_window.h"

TEST(landing_counts_without_gaps)
{
    struct rdma_landing l = { 0 };
    CHECK_OK(rdma_landing_mark(&l, 2));
    CHECK_OK(rdma_landing_mark(&l, 1));
    CHECK_EQ_INT(l.upto, 0);
    CHECK(!rdma_landing_has(&l, 0) && rdma_landing_has(&l, 1) && rdma_landing_has(&l, 2) &&
          !rdma_landing_has(&l, 3));
    CHECK_OK(rdma_landing_mark(&l, 0));
    CHECK_EQ_INT(l.upto, 3);
    CHECK(rdma_landing_has(&l, 0) && !rdma_landing_has(&l, 3) && rdma_landing_is_valid(&l));
}

TEST(landing_refuses_what_was_or_cannot_be)
{
    struct rdma_landing l = { 0 };
    CHECK_OK(rdma_landing_mark(&l, 0));
    CHECK_STATUS(rdma_landing_mark(&l, 0), ERR_FORMAT); /* below the window */
    CHECK_OK(rdma_landing_mark(&l, 5));
    CHECK_STATUS(rdma_landing_mark(&l, 5), ERR_FORMAT);               /* twice */
    CHECK_STATUS(rdma_landing_mark(&l, RDMA_WINDOW + 1), ERR_FORMAT); /* beyond */
    CHECK_OK(rdma_landing_mark(&l, RDMA_WINDOW));                     /* the last that may be */
    CHECK_STATUS(rdma_landing_mark(&l, UINT32_MAX), ERR_FORMAT);
    CHECK_EQ_INT(l.upto, 1);
    CHECK(!rdma_landing_has(&l, RDMA_WINDOW + 1) && !rdma_landing_has(&l, UINT64_MAX));
}

/* Numbers pass 2^32: immediates wrap, the count does not. Against a plain array of flags, marked in
 * random order inside the window. */
TEST(landing_wraps_and_agrees_with_a_plain_list)
{
    enum { N = 5000 };
    const uint64_t base = (UINT64_C(1) << 32) - N / 2;
    static bool flags[N + 2 * RDMA_WINDOW]; /* the count may pass N by a window, and is looked at
                                             * one further */
    struct rdma_landing l = { .upto = base };
    uint64_t upto = base;
    srand(3);
    while (upto < base + N) {
        uint64_t number = upto + (uint64_t)rand() % RDMA_WINDOW;
        bool again = flags[number - base];
        CHECK_EQ_INT(rdma_landing_mark(&l, (uint32_t)number), again ? ERR_FORMAT : OK);
        flags[number - base] = true;
        while (flags[upto - base]) upto++;
        CHECK_EQ_INT(l.upto, upto);
        CHECK(rdma_landing_is_valid(&l));
        for (uint64_t i = 0; i < RDMA_WINDOW; i++)
            CHECK_EQ_INT(rdma_landing_has(&l, upto + i), flags[upto + i - base]);
        if (upto > base) CHECK_STATUS(rdma_landing_mark(&l, (uint32_t)(upto - 1)), ERR_FORMAT);
    }
}

TEST_MAIN(CASE(landing_counts_without_gaps), CASE(landing_refuses_what_was_or_cannot_be),
          CASE(landing_wraps_and_agrees_with_a_plain_list))

#else

TEST(not_built)
{
    SKIP("built without libibverbs and librdmacm: the rdma row's logic is NOT tested");
}

TEST_MAIN(CASE(not_built))

#endif
