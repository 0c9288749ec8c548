/* fuzz_kvt_rdma_setup.c - hostile set-up frames of the rdma transport; the first byte chooses the
 * frame, 0 is a CM request. An accepted frame must encode to the same bytes, and its receive window
 * must accept the next put. */
#include <stdint.h>
#include <string.h>

#ifdef BATON_HAVE_RDMA
#include "kvtransfer/rdma/setup.h"
#include "shared/base/assert.h"

static void same(struct buf *again, struct str in)
{
    ASSERT(again->len == in.n);
    ASSERT(memcmp(again->data, in.p, in.n) == 0);
    buf_release(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    struct str in = { (const char *)data + 1, size - 1 };
    struct buf again = { 0 };
    struct rdma_hello hello;
    struct rdma_rail_info half;
    struct rdma_rail_status verdict;
    struct rdma_invite invite;
    struct rdma_cm_request call;
    enum rdma_frame frame = (enum rdma_frame)(data[0] % RDMA_FRAME_END);
    if (frame == RDMA_FRAME_HELLO && rdma_hello_decode(in, &hello) == OK) {
        rdma_hello_encode(&hello, &again);
        same(&again, in);
    } else if ((frame == RDMA_FRAME_OFFER || frame == RDMA_FRAME_ACCEPT) &&
               rdma_rail_info_decode(in, &half) == OK) {
        rdma_rail_info_encode(&half, &again);
        same(&again, in);
    } else if ((frame == RDMA_FRAME_REFUSE || frame == RDMA_FRAME_BROKEN ||
                frame == RDMA_FRAME_FENCED) &&
               rdma_rail_status_decode(frame, in, &verdict) == OK) {
        if (frame == RDMA_FRAME_FENCED) {
            struct rdma_recv_window l = verdict.recv_window;
            ASSERT(!rdma_recv_window_has(&l, l.completed));
            ASSERT(rdma_recv_window_set(&l, (uint32_t)l.completed) == OK &&
                   rdma_recv_window_is_valid(&l));
        }
        if (memchr(verdict.reason, 0, sizeof verdict.reason) == NULL) ASSERT(false);
        rdma_rail_status_encode(frame, &verdict, &again);
        same(&again, in);
    } else if (frame == RDMA_FRAME_INVITE && rdma_invite_decode(in, &invite) == OK) {
        rdma_invite_encode(&invite, &again);
        same(&again, in);
    } else if (frame == 0 && rdma_cm_request_decode(in, &call) == OK) {
        uint8_t bytes[RDMA_CM_REQUEST_BYTES];
        rdma_cm_request_encode(&call, bytes);
        ASSERT(in.n >= sizeof bytes && memcmp(bytes, in.p, sizeof bytes) == 0);
    }
    return 0;
}

#else /* built without libibverbs: there is nothing to decode */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)data, (void)size;
    return 0;
}

#endif
