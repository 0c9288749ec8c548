/* buf.h - a growable byte buffer and string builder.
 *
 * { 0 } is a valid empty buffer. `data` always ends in a 0 byte that `len` does not count, so C
 * functions can read it. buf_release frees the memory, buf_clear keeps it. A failed growth aborts
 * (mem.h).
 * Thread: its owner's. */
#ifndef BATON_BASE_BUF_H
#define BATON_BASE_BUF_H

#include <stdint.h>

#include "shared/base/str.h"

struct buf {
    char *data;
    size_t len;
    size_t cap;
};

void buf_release(struct buf *b);
void buf_clear(struct buf *b);
/* Makes room for `extra` more bytes and returns where they go; len is unchanged. */
char *buf_reserve(struct buf *b, size_t extra);
void buf_add(struct buf *b, const void *p, size_t n);
void buf_add_c(struct buf *b, const char *s);
void buf_add_str(struct buf *b, struct str s);
void buf_add_char(struct buf *b, char c);
void buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_add_u32le(struct buf *b, uint32_t v);
void buf_add_u64le(struct buf *b, uint64_t v);
/* Drops the first n bytes (memmove). */
void buf_consume(struct buf *b, size_t n);
struct str buf_str(const struct buf *b); /* valid until the next change */
/* Moves the data out to the caller (mem_free); the buffer is empty afterwards. */
char *buf_take(struct buf *b);

#endif
