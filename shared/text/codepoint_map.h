/* codepoint_map.h - ids of single characters, found without hashing.
 *
 * Life cycle: { 0 } is empty, put, then read-only; release. Thread: get on any. */
#ifndef BATON_TEXT_CODEPOINT_MAP_H
#define BATON_TEXT_CODEPOINT_MAP_H

#include <stddef.h>
#include <stdint.h>

enum { CHARMAP_PAGE = 256, CHARMAP_PAGES = 0x110000 / CHARMAP_PAGE };

struct charmap {
    int32_t *pages[CHARMAP_PAGES]; /* value + 1; NULL: none on the page */
};

/* cp is in 0 .. 0x10FFFF, value not negative. */
void    charmap_put(struct charmap *m, int32_t cp, int32_t value);
int32_t charmap_get(const struct charmap *m, int32_t cp); /* -1: none */
void    charmap_release(struct charmap *m);

#endif
