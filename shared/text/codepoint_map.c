/* codepoint_map.c - see codepoint_map.h. Thread: put on one, get on any. */
#include "shared/text/codepoint_map.h"

#include "shared/base/mem.h"

void codepoint_map_put(struct codepoint_map *m, int32_t cp, int32_t value)
{
    int32_t **page = &m->pages[cp / CODEPOINT_MAP_PAGE];
    if (!*page) *page = MEM_ARRAY(int32_t, CODEPOINT_MAP_PAGE);
    (*page)[cp % CODEPOINT_MAP_PAGE] = value + 1;
}

int32_t codepoint_map_get(const struct codepoint_map *m, int32_t cp)
{
    const int32_t *page = m->pages[cp / CODEPOINT_MAP_PAGE];
    return page ? page[cp % CODEPOINT_MAP_PAGE] - 1 : -1;
}

void codepoint_map_release(struct codepoint_map *m)
{
    for (size_t i = 0; i < CODEPOINT_MAP_PAGES; i++) {
        mem_free(m->pages[i]);
        m->pages[i] = NULL;
    }
}
