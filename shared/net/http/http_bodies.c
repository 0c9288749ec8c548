/* http_bodies.c - see http_bodies.h. Thread: loop. */
#include "shared/net/http/http_bodies.h"

#include "shared/base/mem.h"
#include "shared/base/thread.h"

struct http_bodies {
    size_t max_small, max_steps;
    size_t n_small, n_steps, n_reserve; /* sums of the shares */
    uint32_t n_shares;                  /* that are not 0 */
    uint64_t last_age;
    struct list turns[HTTP_BODY_CLASSES]; /* of http_turn.link: the next in turn first */
    bool closed;
};

struct http_bodies *http_bodies_create(size_t max_bytes, size_t max_body)
{
    struct http_bodies *b = MEM_NEW(struct http_bodies);
    b->max_small = max_bytes / 2;
    b->max_steps = max_bytes > max_body ? max_bytes - max_body : 0;
    for (int i = 0; i < HTTP_BODY_CLASSES; i++) list_init(&b->turns[i]);
    return b;
}

static void maybe_free(struct http_bodies *b)
{
    if (b->closed && b->n_shares == 0) mem_free(b);
}

void http_bodies_close(struct http_bodies *b)
{
    for (int i = 0; i < HTTP_BODY_CLASSES; i++) ASSERT(list_empty(&b->turns[i]));
    b->closed = true;
    maybe_free(b);
}

void http_turn_init(struct http_turn *t)
{
    *t = (struct http_turn){ 0 };
    for (int i = 0; i < HTTP_BODY_CLASSES; i++) {
        list_init(&t->link[i]);
        list_init(&t->waiting[i]);
    }
}

void http_place_init(struct http_place *p, struct http_turn *turn,
                     void (*given)(struct http_place *p))
{
    *p = (struct http_place){ .turn = turn, .age = UINT64_MAX, .given = given };
    list_init(&p->link);
}

/* ---- shares ---- */

static void set_share(struct http_bodies *b, struct http_place *p, struct http_share to)
{
    struct http_share *s = &p->share;
    b->n_small += to.n_small - s->n_small; /* unsigned: the sums come out right */
    b->n_steps += to.n_steps - s->n_steps;
    b->n_reserve += to.n_reserve - s->n_reserve;
    p->turn->n_small += to.n_small - s->n_small;
    b->n_shares += http_share_bytes(&to) > 0;
    b->n_shares -= http_share_bytes(s) > 0;
    *s = to;
}

/* Counts a small body whole. */
static bool hold_small(struct http_bodies *b, struct http_place *p)
{
    size_t more = p->n_max - p->share.n_small, own = p->turn->n_small;
    if (b->n_small > 0 && b->n_small + more > b->max_small) return false;
    if (own > 0 && own + more > b->max_small / 2) return false;
    set_share(b, p, (struct http_share){ .n_small = p->n_max });
    return true;
}

/* Gives the place its next step, or the reserve. */
static bool grow(struct http_bodies *b, struct http_place *p)
{
    size_t n = (p->n_bytes / HTTP_BODY_STEP + 1) * HTTP_BODY_STEP;
    if (n > p->n_max) n = p->n_max;
    if (b->n_steps + n - p->share.n_steps <= b->max_steps)
        set_share(b, p, (struct http_share){ .n_steps = n });
    else if (b->n_reserve == 0 || p->share.n_reserve > 0)
        set_share(b, p, (struct http_share){ .n_reserve = p->n_max });
    else return false;
    if (p->age == UINT64_MAX) p->age = b->last_age++;
    return true;
}

static bool give(struct http_bodies *b, struct http_place *p)
{
    return p->class == HTTP_BODY_SMALL ? hold_small(b, p) : grow(b, p);
}

/* ---- turns ---- */

/* The oldest body of an address is its next, so that bodies which were begun get to their end. */
static void wait_in_turn(struct http_bodies *b, struct http_place *p)
{
    struct http_turn *t = p->turn;
    struct list *waiting = &t->waiting[p->class], *at = waiting->prev;
    if (list_empty(waiting)) list_push(&b->turns[p->class], &t->link[p->class]);
    if (p->age != UINT64_MAX) {
        at = waiting;
        while (at->next != waiting && LIST_ENTRY(at->next, struct http_place, link)->age < p->age)
            at = at->next;
    }
    list_insert_after(at, &p->link);
}

static void stop_waiting(struct http_place *p)
{
    struct http_turn *t = p->turn;
    list_remove(&p->link);
    if (list_empty(&t->waiting[p->class])) list_remove(&t->link[p->class]);
}

/* Gives the next body of this address what it waits for, and puts the address behind the others. */
static bool serve_turn(struct http_bodies *b, struct http_turn *t, enum http_body_class class)
{
    struct http_place *p = LIST_FIRST(&t->waiting[class], struct http_place, link);
    if (!give(b, p)) return false;
    list_remove(&t->link[class]);
    list_push(&b->turns[class], &t->link[class]);
    stop_waiting(p);
    p->given(p);
    return true;
}

static void serve_class(struct http_bodies *b, enum http_body_class class)
{
    struct list *turns = &b->turns[class], *at = turns->next;
    /* An address that has its half of the small ones is passed over; more than two rarely have. */
    for (int n_passed = 0; at != turns && n_passed < 3;) {
        struct http_turn *t = class == HTTP_BODY_SMALL
                                  ? LIST_ENTRY(at, struct http_turn, link[HTTP_BODY_SMALL])
                                  : LIST_ENTRY(at, struct http_turn, link[HTTP_BODY_LARGE]);
        bool given = serve_turn(b, t, class);
        if (!given && class == HTTP_BODY_LARGE) return;
        n_passed = given ? 0 : n_passed + 1;
        at = given ? turns->next : at->next;
    }
}

static void serve_turns(struct http_bodies *b)
{
    for (int i = 0; i < HTTP_BODY_CLASSES; i++) serve_class(b, (enum http_body_class)i);
}

bool http_bodies_hold(struct http_bodies *b, struct http_place *p, size_t n, size_t n_max)
{
    ASSERT(!http_place_waits(p) && n > 0);
    const struct http_share *s = &p->share;
    p->class = n_max <= HTTP_SMALL_BODY && s->n_steps + s->n_reserve == 0 ? HTTP_BODY_SMALL
                                                                          : HTTP_BODY_LARGE;
    p->n_bytes = n;
    p->n_max = n_max;
    if (p->class == HTTP_BODY_SMALL && s->n_small > 0) {
        set_share(b, p, (struct http_share){ .n_small = n_max }); /* a chunked one had more */
        return true;
    }
    if (n <= s->n_steps + s->n_reserve) return true;
    bool is_next = list_empty(p->class == HTTP_BODY_SMALL ? &p->turn->waiting[p->class]
                                                          : &b->turns[p->class]);
    if (is_next && give(b, p)) return true;
    wait_in_turn(b, p);
    return false;
}

/* ---- questions ---- */

bool http_bodies_wanted(const struct http_bodies *b, const struct http_place *p)
{
    if (p->share.n_small > 0) return !list_empty(&b->turns[HTTP_BODY_SMALL]);
    return http_share_bytes(&p->share) > 0 && !list_empty(&b->turns[HTTP_BODY_LARGE]);
}

bool http_bodies_scarce(const struct http_bodies *b)
{
    return !list_empty(&b->turns[HTTP_BODY_SMALL]) || !list_empty(&b->turns[HTTP_BODY_LARGE]) ||
           b->n_small > b->max_small / 4;
}

size_t http_bodies_bytes(const struct http_bodies *b)
{
    return b->n_small + b->n_steps + b->n_reserve;
}

/* ---- the end of a body ---- */

struct http_share http_place_take(struct http_place *p)
{
    ASSERT(!http_place_waits(p));
    struct http_share share = p->share;
    p->turn->n_small -= share.n_small;
    p->share = (struct http_share){ 0 };
    p->age = UINT64_MAX;
    return share;
}

void http_bodies_return(struct http_bodies *b, struct http_share share)
{
    if (http_share_bytes(&share) == 0) return;
    b->n_small -= share.n_small;
    b->n_steps -= share.n_steps;
    b->n_reserve -= share.n_reserve;
    b->n_shares--;
    if (b->closed) maybe_free(b);
    else serve_turns(b);
}

void http_bodies_release(struct http_bodies *b, struct http_place *p)
{
    bool waited = http_place_waits(p);
    if (waited) stop_waiting(p);
    http_bodies_return(b, http_place_take(p));
    if (waited) serve_turns(b); /* a smaller one behind it may fit */
}
