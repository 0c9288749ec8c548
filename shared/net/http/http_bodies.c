/* http_bodies.c - see http_bodies.h. Thread: loop. */
#include "shared/net/http/http_bodies.h"

#include "shared/base/mem.h"
#include "shared/base/thread.h"

struct http_bodies {
    size_t max_bytes, n_bytes; /* n_bytes: sum of the places given */
    uint32_t n_given;
    struct list waiting; /* of http_place.link */
    bool closed;
};

struct http_bodies *http_bodies_create(size_t max_bytes)
{
    struct http_bodies *b = MEM_NEW(struct http_bodies);
    b->max_bytes = max_bytes;
    list_init(&b->waiting);
    return b;
}

static void maybe_free(struct http_bodies *b)
{
    if (b->closed && b->n_given == 0) mem_free(b);
}

void http_bodies_close(struct http_bodies *b)
{
    ASSERT(list_empty(&b->waiting));
    b->closed = true;
    maybe_free(b);
}

void http_place_init(struct http_place *p, void (*given)(struct http_place *p))
{
    *p = (struct http_place){ .given = given };
    list_init(&p->link);
}

static bool fits(const struct http_bodies *b, size_t n)
{
    return b->n_given == 0 || (n <= b->max_bytes && b->n_bytes <= b->max_bytes - n);
}

static void give(struct http_bodies *b, const struct http_place *p)
{
    b->n_bytes += p->n_bytes;
    b->n_given++;
}

bool http_bodies_reserve(struct http_bodies *b, struct http_place *p, size_t n)
{
    ASSERT(p->n_bytes == 0 && n > 0);
    p->n_bytes = n;
    if (list_empty(&b->waiting) && fits(b, n)) {
        give(b, p);
        return true;
    }
    list_push(&b->waiting, &p->link);
    return false;
}

bool http_bodies_contended(const struct http_bodies *b) { return !list_empty(&b->waiting); }

size_t http_place_take(struct http_place *p)
{
    ASSERT(list_empty(&p->link));
    size_t n = p->n_bytes;
    p->n_bytes = 0;
    return n;
}

/* Gives places to those who wait, in their order. */
static void serve_queue(struct http_bodies *b)
{
    while (!list_empty(&b->waiting)) {
        struct http_place *p = LIST_FIRST(&b->waiting, struct http_place, link);
        if (!fits(b, p->n_bytes)) return;
        list_remove(&p->link);
        give(b, p);
        p->given(p);
    }
}

void http_bodies_return(struct http_bodies *b, size_t n)
{
    if (n == 0) return;
    b->n_bytes -= n;
    b->n_given--;
    if (b->closed) maybe_free(b);
    else serve_queue(b);
}

void http_bodies_release(struct http_bodies *b, struct http_place *p)
{
    if (list_empty(&p->link)) {
        http_bodies_return(b, http_place_take(p));
        return;
    }
    list_remove(&p->link);
    p->n_bytes = 0;
    serve_queue(b); /* a smaller one behind it may fit */
}
