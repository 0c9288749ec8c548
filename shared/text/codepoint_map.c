/* codepoint_map.c - see codepoint_map.h. Thread: as there. */
#include "shared/text/codepoint_map.h"

#include "shared/base/mem.h"

void charmap_put(struct charmap *m, int32_t cp, int32_t value)
{
    int32_t **page = &m->pages[cp / CHARMAP_PAGE];
    if (!*page) *page = MEM_ARRAY(int32_t, CHARMAP_PAGE);
    (*page)[cp % CHARMAP_PAGE] = value + 1;
}

int32_t charmap_get(const struct charmap *m, int32_t cp)
{
    const int32_t *page = m->pages[cp / CHARMAP_PAGE];
    return page ? page[cp % CHARMAP_PAGE] - 1 : -1;
}

void charmap_release(struct charmap *m)
{
    for (size_t i = 0; i < CHARMAP_PAGES; i++) {
        mem_free(m->pages[i]);
        m->pages[i] = NULL;
    }
}
