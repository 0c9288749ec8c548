/* metrics_merge.c - see metrics_merge.h. Thread: any. */
#include "deploy/router/metrics_merge.h"

#include <string.h>

#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"

struct family {
    struct list link; /* of merge.families, in the order of their first lines */
    struct buf head, series;
    size_t page; /* whose head it has */
};

struct merge {
    struct map by_name;
    struct list families;
};

static struct family *family_of(struct merge *m, struct str name, size_t page)
{
    struct family *f = map_get(&m->by_name, name);
    if (f) return f;
    f = MEM_NEW(struct family);
    f->page = page;
    list_push(&m->families, &f->link);
    map_put(&m->by_name, name, f);
    return f;
}

/* The name in "# HELP name ..." and "# TYPE name ..."; n 0: it is another comment. */
static struct str name_in_head(struct str line)
{
    struct str word, name = { 0 };
    if (!str_starts(line, "# HELP ") && !str_starts(line, "# TYPE ")) return name;
    line = str_sub(line, strlen("# HELP "), SIZE_MAX);
    return str_split(&line, ' ', &word) ? word : name;
}

static void add_series(struct buf *out, struct str line, const char *worker)
{
    size_t end = 0;
    while (end < line.n && line.p[end] != '{' && line.p[end] != ' ') end++;
    const struct str rest = str_sub(line, end, SIZE_MAX);
    const bool has_labels = rest.n > 1 && rest.p[0] == '{';
    buf_add_str(out, str_sub(line, 0, end));
    buf_printf(out, "{worker=\"%s\"", worker);
    if (!has_labels) buf_add_char(out, '}');
    else if (rest.p[1] != '}') buf_add_char(out, ',');
    buf_add_str(out, has_labels ? str_sub(rest, 1, SIZE_MAX) : rest);
    buf_add_char(out, '\n');
}

/* Series stand behind the head of their family. */
static void add_page(struct merge *m, const struct metrics_page *p, size_t page)
{
    struct str text = p->text, line;
    struct family *f = NULL;
    while (str_split(&text, '\n', &line)) {
        if (line.n == 0) continue;
        if (line.p[0] != '#') {
            if (f) add_series(&f->series, line, p->worker);
            continue;
        }
        const struct str name = name_in_head(line);
        if (!name.n) continue;
        f = family_of(m, name, page);
        if (f->page != page) continue;
        buf_add_str(&f->head, line);
        buf_add_char(&f->head, '\n');
    }
}

void metrics_merge(const struct metrics_page *pages, size_t n, struct buf *out)
{
    struct merge m = { 0 };
    list_init(&m.families);
    for (size_t i = 0; i < n; i++) add_page(&m, &pages[i], i);
    LIST_FOREACH (f, &m.families, struct family, link) {
        buf_add_str(out, buf_str(&f->head));
        buf_add_str(out, buf_str(&f->series));
        buf_release(&f->head);
        buf_release(&f->series);
        mem_free(f);
    }
    map_release(&m.by_name);
}
