/* fuzz_grpc_message.c - arbitrary bytes for the parts of gRPC that need no connection.
 *
 * The first byte chooses the size of the pieces. The other bytes are messages, read once whole and
 * once in pieces, which must agree; and they are the value of header fields, and a text that is
 * escaped. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/net/grpc/grpc_head.h"
#include "shared/net/grpc/grpc_message.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MESSAGE_MAX = 3000, TEXT_MAX = 200 };

struct reading {
    uint64_t digest;
    int n_messages;
    enum grpc_read end;
};

static struct reading read_all(struct str bytes, size_t piece)
{
    struct grpc_reader r = { .max_bytes = MESSAGE_MAX };
    struct reading got = { .end = GRPC_READ_MORE };
    while (bytes.n > 0 && got.end <= GRPC_READ_WHOLE) {
        struct str part = str_sub(bytes, 0, piece);
        const size_t n = part.n;
        got.end = grpc_reader_feed(&r, &part);
        bytes = str_sub(bytes, n - part.n, SIZE_MAX);
        if (got.end == GRPC_READ_MORE && part.n) abort(); /* it takes all, unless one is whole */
        if (got.end != GRPC_READ_WHOLE) continue;
        if (r.buf.len != r.n_length || r.buf.len > MESSAGE_MAX) abort();
        got.digest = hash_64(r.buf.data, r.buf.len, got.digest * 31 + r.buf.len);
        got.n_messages++;
        grpc_reader_next(&r);
    }
    grpc_reader_release(&r);
    return got;
}

static void check_head(struct str value)
{
    static const char *const names[] = { "grpc-timeout", "content-type", "grpc-encoding" };
    if (memchr(value.p, 0, value.n)) return; /* HTTP/2 lets none through */
    for (size_t i = 0; i < 3; i++) {
        struct grpc_fields f = { .n = 0 };
        struct grpc_refusal why = { 0 };
        uint64_t timeout_ms;
        (void)grpc_fields_add(&f, STR(":method"), STR("POST"), 4, 400);
        const bool fits = grpc_fields_add(&f, str_of(names[i]), value, 4, 400);
        if (i != 1) (void)grpc_fields_add(&f, STR("content-type"), STR("application/grpc"), 4, 400);
        if (f.list_bytes > 400 || f.n > 4) abort();
        if (fits && !str_eq(grpc_fields_get(&f, names[i]), value)) abort();
        if (!grpc_head_check(&f, &timeout_ms, &why) && (!why.text || why.st == GRPC_OK)) abort();
        grpc_fields_release(&f);
    }
}

static void check_escape(struct str text)
{
    struct buf out = { 0 };
    grpc_escape(&out, text, TEXT_MAX);
    if (out.len > 3 * TEXT_MAX) abort();
    for (size_t i = 0; i < out.len; i++)
        if (out.data[i] < ' ' || out.data[i] > '~') abort();
    if (out.len && (out.data[0] == ' ' || out.data[out.len - 1] == ' ')) abort();
    buf_release(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1) return 0;
    const struct str bytes = { (const char *)data + 1, size - 1 };
    const struct reading whole = read_all(bytes, SIZE_MAX),
                         parts = read_all(bytes, (size_t)data[0] % 23 + 1);
    if (whole.end != parts.end || whole.n_messages != parts.n_messages ||
        whole.digest != parts.digest)
        abort();
    check_head(bytes);
    check_escape(bytes);
    return 0;
}
