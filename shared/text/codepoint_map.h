/* codepoint_map.h - a map from code points to ids, in pages instead of a hash table.
 *
 * Life cycle: { 0 } is empty, put, then read-only, release.
 * Thread: put on one, get on any. */
#ifndef BATON_TEXT_CODEPOINT_MAP_H
#define BATON_TEXT_CODEPOINT_MAP_H

#include <stddef.h>
#include <stdint.h>

enum { CODEPOINT_MAP_PAGE = 256, CODEPOINT_MAP_PAGES = 0x110000 / CODEPOINT_MAP_PAGE };

struct codepoint_map {
    int32_t *pages[CODEPOINT_MAP_PAGES]; /* value + 1; NULL: none on the page */
};

/* `cp` is in 0 .. 0x10FFFF, `value` not negative. */
void codepoint_map_put(struct codepoint_map *m, int32_t cp, int32_t value);
int32_t codepoint_map_get(const struct codepoint_map *m, int32_t cp); /* -1: none */
void codepoint_map_release(struct codepoint_map *m);

#endif
