/* grpc_message.c - see grpc_message.h. Thread: the caller's. */
#include "shared/net/grpc/grpc_message.h"

#include <string.h>

#include "shared/base/assert.h"

void grpc_reader_release(struct grpc_reader *r) { buf_release(&r->buf); }

static size_t less(size_t a, size_t b) { return a < b ? a : b; }

static enum grpc_read read_head(struct grpc_reader *r, struct str *in)
{
    const uint8_t *h = r->head;
    const size_t n = less(in->n, GRPC_HEAD_BYTES - r->n_head);
    (void)str_take(in, r->head + r->n_head, n);
    r->n_head += (uint32_t)n;
    if (r->n_head < GRPC_HEAD_BYTES) return GRPC_READ_MORE;
    if (h[0] != 0) return GRPC_READ_ENCODED;
    r->n_length = (uint32_t)h[1] << 24 | (uint32_t)h[2] << 16 | (uint32_t)h[3] << 8 | h[4];
    return r->n_length > r->max_bytes ? GRPC_READ_LONG : GRPC_READ_WHOLE;
}

enum grpc_read grpc_reader_feed(struct grpc_reader *r, struct str *in)
{
    if (r->n_head < GRPC_HEAD_BYTES) {
        const enum grpc_read head = read_head(r, in);
        if (head != GRPC_READ_WHOLE) return head;
    }
    const size_t n = less(in->n, r->n_length - r->buf.len);
    buf_add(&r->buf, in->p, n);
    *in = str_sub(*in, n, SIZE_MAX);
    return r->buf.len == r->n_length ? GRPC_READ_WHOLE : GRPC_READ_MORE;
}

void grpc_reader_next(struct grpc_reader *r)
{
    buf_release(&r->buf);
    r->n_head = r->n_length = 0;
}

void grpc_message_add(struct buf *out, struct str message)
{
    ASSERT(message.n <= UINT32_MAX);
    const uint32_t n = (uint32_t)message.n;
    const uint8_t head[GRPC_HEAD_BYTES] = { 0, (uint8_t)(n >> 24), (uint8_t)(n >> 16),
                                            (uint8_t)(n >> 8), (uint8_t)n };
    buf_add(out, head, sizeof head);
    buf_add_str(out, message);
}
