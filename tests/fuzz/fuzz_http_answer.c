/* fuzz_http_answer.c - arbitrary bytes as another node's answer.
 *
 * The first byte chooses the size of the pieces. The other bytes are parsed once whole and once in
 * pieces, with the same result; what may be passed on to a client never holds a control character
 * that would start a header of its own. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/net/http/http_answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct reading {
    struct buf body;
    enum status st;
    int status, n_heads;
    bool complete;
    uint64_t head, length;
};

static enum status on_head(void *arg)
{
    struct reading *r = arg;
    if (r->n_heads++) abort();
    return OK;
}

static enum status on_body(void *arg, struct str piece)
{
    struct reading *r = arg;
    if (!r->n_heads) abort();
    buf_add_str(&r->body, piece);
    return OK;
}

static void check_clean(struct str s)
{
    for (size_t i = 0; i < s.n; i++)
        if (((unsigned char)s.p[i] < ' ' && s.p[i] != '\t') || s.p[i] == 0x7f) abort();
}

static void check_head(const struct http_answer *a)
{
    struct str rest = buf_str(&a->headers);
    check_clean(buf_str(&a->type));
    while (rest.n) {
        size_t end = str_find(rest, STR("\r\n")), colon = str_find_char(rest, ':');
        if (end == SIZE_MAX || colon == SIZE_MAX || colon == 0 || colon > end) abort();
        check_clean(str_sub(rest, 0, end));
        rest = str_sub(rest, end + 2, SIZE_MAX);
    }
}

static struct reading read_all(const uint8_t *data, size_t size, size_t piece)
{
    struct reading r = { 0 };
    struct http_answer a = { .on_head = on_head, .on_body = on_body, .arg = &r };
    http_answer_init(&a);
    for (size_t at = 0; at < size && r.st == OK && !a.complete; at += piece)
        r.st = http_answer_feed(&a, (const char *)data + at, size - at < piece ? size - at : piece);
    check_head(&a);
    r.complete = a.complete;
    if (r.n_heads) {
        r.status = a.status;
        r.length = a.length;
        r.head = hash_64(a.headers.data, a.headers.len, hash_64(a.type.data, a.type.len, 0));
        if (a.status < 200 || a.status == 101) abort();
    }
    if (a.length != UINT64_MAX && r.body.len > a.length) abort();
    http_answer_release(&a);
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > HTTP_ANSWER_HEAD_MAX / 2) return 0; /* beyond, pieces end at its limit */
    struct reading whole = read_all(data + 1, size - 1, size),
                   pieces = read_all(data + 1, size - 1, 1u + data[0] % 64);
    if (whole.st != pieces.st || whole.complete != pieces.complete ||
        whole.n_heads != pieces.n_heads || whole.status != pieces.status ||
        whole.length != pieces.length || whole.head != pieces.head ||
        whole.body.len != pieces.body.len ||
        (whole.body.len && memcmp(whole.body.data, pieces.body.data, whole.body.len) != 0))
        abort();
    buf_release(&whole.body);
    buf_release(&pieces.body);
    return 0;
}
