/* test_rdma_recv_window.c - puts complete in any order; the count covers those complete without a
 * gap. */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_RDMA
#include <stdlib.h>

#include "kvtransfer/rdma/recv_window.h"

TEST(recv_window_counts_without_gaps)
{
    struct rdma_recv_window w = { 0 };
    CHECK_OK(rdma_recv_window_set(&w, 2));
    CHECK_OK(rdma_recv_window_set(&w, 1));
    CHECK_EQ_INT(w.completed, 0);
    CHECK(!rdma_recv_window_has(&w, 0) && rdma_recv_window_has(&w, 1) &&
          rdma_recv_window_has(&w, 2) && !rdma_recv_window_has(&w, 3));
    CHECK_OK(rdma_recv_window_set(&w, 0));
    CHECK_EQ_INT(w.completed, 3);
    CHECK(rdma_recv_window_has(&w, 0) && !rdma_recv_window_has(&w, 3) &&
          rdma_recv_window_is_valid(&w));
}

TEST(recv_window_refuses_what_was_or_cannot_be)
{
    struct rdma_recv_window w = { 0 };
    CHECK_OK(rdma_recv_window_set(&w, 0));
    CHECK_STATUS(rdma_recv_window_set(&w, 0), ERR_FORMAT); /* below the window */
    CHECK_OK(rdma_recv_window_set(&w, 5));
    CHECK_STATUS(rdma_recv_window_set(&w, 5), ERR_FORMAT);               /* twice */
    CHECK_STATUS(rdma_recv_window_set(&w, RDMA_WINDOW + 1), ERR_FORMAT); /* beyond */
    CHECK_OK(rdma_recv_window_set(&w, RDMA_WINDOW));                     /* the last allowed */
    CHECK_STATUS(rdma_recv_window_set(&w, UINT32_MAX), ERR_FORMAT);
    CHECK_EQ_INT(w.completed, 1);
    CHECK(!rdma_recv_window_has(&w, RDMA_WINDOW + 1) && !rdma_recv_window_has(&w, UINT64_MAX));
}

/* Numbers pass 2^32: immediates wrap, the count does not. Compared with a plain array of flags, set
 * in random order inside the window. */
TEST(recv_window_wraps_and_agrees_with_a_plain_list)
{
    enum { N = 5000 };
    const uint64_t base = (UINT64_C(1) << 32) - N / 2;
    /* The count may pass N by a window, and the loop below reads one more. */
    static bool flags[N + 2 * RDMA_WINDOW];
    struct rdma_recv_window w = { .completed = base };
    uint64_t completed = base;
    srand(3);
    while (completed < base + N) {
        uint64_t number = completed + (uint64_t)rand() % RDMA_WINDOW;
        bool again = flags[number - base];
        CHECK_EQ_INT(rdma_recv_window_set(&w, (uint32_t)number), again ? ERR_FORMAT : OK);
        flags[number - base] = true;
        while (flags[completed - base]) completed++;
        CHECK_EQ_INT(w.completed, completed);
        CHECK(rdma_recv_window_is_valid(&w));
        for (uint64_t i = 0; i < RDMA_WINDOW; i++)
            CHECK_EQ_INT(rdma_recv_window_has(&w, completed + i), flags[completed + i - base]);
        if (completed > base)
            CHECK_STATUS(rdma_recv_window_set(&w, (uint32_t)(completed - 1)), ERR_FORMAT);
    }
}

TEST_MAIN(CASE(recv_window_counts_without_gaps), CASE(recv_window_refuses_what_was_or_cannot_be),
          CASE(recv_window_wraps_and_agrees_with_a_plain_list))

#else

TEST(not_built) { SKIP("built without libibverbs and librdmacm: rdma's logic is NOT tested"); }

TEST_MAIN(CASE(not_built))

#endif
