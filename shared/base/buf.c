/* buf.c - the growable byte buffer. Capacity doubles, so appending n bytes costs O(n) in all.
 * Thread: its owner's. */
#include "shared/base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"

enum { BUF_CAP_MIN = 64 };

void buf_release(struct buf *b)
{
    mem_free(b->data);
    *b = (struct buf){ 0 };
}

void buf_clear(struct buf *b)
{
    b->len = 0;
    if (b->data) b->data[0] = 0;
}

char *buf_reserve(struct buf *b, size_t extra)
{
    ASSERT(extra < SIZE_MAX / 2 - b->len);
    size_t need = b->len + extra + 1;
    if (need > b->cap) {
        size_t cap = b->cap < BUF_CAP_MIN ? BUF_CAP_MIN : b->cap;
        while (cap < need) cap *= 2;
        b->data = mem_realloc(b->data, cap, 1);
        b->cap = cap;
    }
    /* Terminate now, and keep room for the 0 byte when the caller fills all of `extra`. */
    b->data[b->len] = 0;
    b->data[b->len + extra] = 0;
    return b->data + b->len;
}

void buf_add(struct buf *b, const void *p, size_t n)
{
    char *at = buf_reserve(b, n);
    if (n) memcpy(at, p, n);
    b->len += n;
}

void buf_add_c(struct buf *b, const char *s) { buf_add(b, s, strlen(s)); }

void buf_add_str(struct buf *b, struct str s) { buf_add(b, s.p, s.n); }

void buf_add_char(struct buf *b, char c) { buf_add(b, &c, 1); }

void buf_printf(struct buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    char *at = buf_reserve(b, BUF_CAP_MIN);
    int n = vsnprintf(at, b->cap - b->len, fmt, ap);
    ASSERT(n >= 0);
    if ((size_t)n >= b->cap - b->len) {
        at = buf_reserve(b, (size_t)n);
        vsnprintf(at, (size_t)n + 1, fmt, again);
    }
    b->len += (size_t)n;
    va_end(again);
    va_end(ap);
}

static void add_le(struct buf *b, uint64_t v, size_t n)
{
    char bytes[8];
    for (size_t i = 0; i < n; i++) bytes[i] = (char)(v >> (8 * i));
    buf_add(b, bytes, n);
}

void buf_add_u32le(struct buf *b, uint32_t v) { add_le(b, v, 4); }
void buf_add_u64le(struct buf *b, uint64_t v) { add_le(b, v, 8); }

void buf_consume(struct buf *b, size_t n)
{
    ASSERT(n <= b->len);
    if (n == 0) return;
    memmove(b->data, b->data + n, b->len - n);
    b->len -= n;
    b->data[b->len] = 0;
}

struct str buf_str(const struct buf *b)
{
    return b->data ? (struct str){ b->data, b->len } : STR("");
}

char *buf_take(struct buf *b)
{
    char *data = b->data ? b->data : mem_strdup("");
    *b = (struct buf){ 0 };
    return data;
}
