/* meter_book.c - see meter_book.h.
 *
 * `floor` is what a tenant that comes back is lifted to: the least `served` of those that have
 * something, which only grows, since what has less is lifted first; and while none has, the most
 * that any had, so that who comes first does not begin far below one that has just left. */
#include "scheduler/directory/meter_book.h"

#include "shared/base/assert.h"
#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"

enum {
    SLOTS = METER_WINDOW_MS / METER_SLOT_MS + 1 /* the one that has begun is not a whole one */
};

#define SERVED_MAX (UINT64_C(1) << 53)
#define FLOOR_MAX  (UINT64_C(1) << 52)

struct meter_slot {
    uint64_t requests, tokens;
};

struct meter_tenant {
    uint64_t id, served;
    uint64_t requests, tokens;     /* the sums of slots */
    uint64_t n_running, n_waiting; /* of all living entries */
    uint64_t used_ms;
    uint64_t report; /* the last one that names it (meter_book.n_reports) */
    uint64_t slot;   /* the newest: time / METER_SLOT_MS; it lies at slots[slot % SLOTS] */
    struct meter_slot slots[SLOTS];
};

/* What one tenant has running and waiting at one entry: at least one of them. */
struct meter_hold {
    struct meter_tenant *tenant;
    uint32_t n_running, n_waiting;
};

struct meter_entry {
    struct list link; /* living, or lapsed when end_ms is over: in order of end_ms */
    uint64_t id, number, end_ms;
    struct meter_hold *holds; /* [n_holds] */
    uint32_t n_holds;
};

struct meter_book {
    struct map tenants, entries; /* by id */
    struct list living, lapsed;
    uint32_t n_living;
    uint64_t floor;
    uint64_t n_reports;
};

static uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t most_of(uint64_t a, uint64_t b) { return a > b ? a : b; }

static bool has_something(const struct meter_tenant *t) { return t->n_running || t->n_waiting; }

static bool is_empty(const struct meter_use *u)
{
    return !u->requests && !u->tokens && !u->cost && !u->n_running && !u->n_waiting;
}

struct meter_book *meter_book_create(void)
{
    struct meter_book *b = MEM_NEW(struct meter_book);
    list_init(&b->living);
    list_init(&b->lapsed);
    return b;
}

/* ---- tenants ---- */

static struct meter_tenant *tenant_find(const struct meter_book *b, uint64_t id)
{
    return map_get(&b->tenants, map_key_u64(&id));
}

/* Empties the slots that have passed. */
static void tenant_slide(struct meter_tenant *t, uint64_t now_ms)
{
    const uint64_t slot = now_ms / METER_SLOT_MS;
    for (uint64_t n = least_of(slot - t->slot, SLOTS); n > 0; n--) {
        struct meter_slot *s = &t->slots[(slot - n + 1) % SLOTS];
        t->requests -= s->requests;
        t->tokens -= s->tokens;
        *s = (struct meter_slot){ 0 };
    }
    t->slot = slot;
}

static void tenant_use(struct meter_tenant *t, const struct meter_use *u, uint64_t now_ms)
{
    tenant_slide(t, now_ms);
    struct meter_slot *s = &t->slots[t->slot % SLOTS];
    const struct meter_slot before = *s;
    s->requests = least_of(s->requests + u->requests, METER_QUANTITY_MAX);
    s->tokens = least_of(s->tokens + least_of(u->tokens, METER_QUANTITY_MAX), METER_QUANTITY_MAX);
    t->requests += s->requests - before.requests;
    t->tokens += s->tokens - before.tokens;
    t->served = least_of(t->served + least_of(u->cost, METER_QUANTITY_MAX), SERVED_MAX);
    t->used_ms = now_ms;
}

static void tenant_add(struct meter_book *b, uint64_t id, uint64_t now_ms)
{
    struct meter_tenant *t = MEM_NEW(struct meter_tenant);
    t->id = id;
    t->slot = now_ms / METER_SLOT_MS;
    map_put(&b->tenants, map_key_u64(&id), t);
}

/* Gives up the place of the tenant that has used nothing for longest, and for a minute. */
static bool tenant_evict(struct meter_book *b, uint64_t now_ms)
{
    struct meter_tenant *oldest = NULL;
    size_t pos = 0;
    struct str key;
    void *one;
    while (map_next(&b->tenants, &pos, &key, &one)) {
        struct meter_tenant *t = one;
        tenant_slide(t, now_ms);
        if (t->report == b->n_reports || has_something(t) || t->requests || t->tokens) continue;
        if (!oldest || t->used_ms < oldest->used_ms) oldest = t;
    }
    if (!oldest || now_ms - oldest->used_ms < METER_WINDOW_MS) return false;
    map_del(&b->tenants, map_key_u64(&oldest->id));
    mem_free(oldest);
    return true;
}

/* Makes places for the report's tenants that have none. */
static enum status tenants_add(struct meter_book *b, const struct meter_report *r, uint64_t now_ms,
                               struct err *err)
{
    size_t n_new = 0;
    b->n_reports++;
    for (uint32_t i = 0; i < r->n_uses; i++) {
        struct meter_tenant *t = tenant_find(b, r->uses[i].tenant);
        if (t) t->report = b->n_reports;
        else if (!is_empty(&r->uses[i])) n_new++;
    }
    while (b->tenants.len + n_new > METER_TENANTS_MAX)
        if (!tenant_evict(b, now_ms))
            return err_set(err, ERR_FULL, METER_TENANTS_FULL, METER_TENANTS_MAX);
    for (uint32_t i = 0; i < r->n_uses; i++)
        if (!is_empty(&r->uses[i]) && !tenant_find(b, r->uses[i].tenant))
            tenant_add(b, r->uses[i].tenant, now_ms);
    return OK;
}

/* ---- entries ---- */

static void entry_drop_holds(struct meter_entry *e)
{
    for (uint32_t i = 0; i < e->n_holds; i++) {
        e->holds[i].tenant->n_running -= e->holds[i].n_running;
        e->holds[i].tenant->n_waiting -= e->holds[i].n_waiting;
    }
    mem_free(e->holds);
    e->holds = NULL;
    e->n_holds = 0;
}

static void entry_free(struct meter_book *b, struct meter_entry *e)
{
    entry_drop_holds(e);
    list_remove(&e->link);
    map_del(&b->entries, map_key_u64(&e->id));
    mem_free(e);
}

/* The lists are in order of the end, so this looks at one entry more than it takes out. */
static void sweep(struct meter_book *b, uint64_t now_ms)
{
    LIST_FOREACH (e, &b->living, struct meter_entry, link) {
        if (e->end_ms > now_ms) break;
        entry_drop_holds(e);
        list_remove(&e->link);
        list_push(&b->lapsed, &e->link);
        b->n_living--;
    }
    LIST_FOREACH (e, &b->lapsed, struct meter_entry, link) {
        if (e->end_ms + METER_FORGET_MS > now_ms) break;
        entry_free(b, e);
    }
}

/* Returns the entry, living for a lease from now; NULL: there are too many. */
static struct meter_entry *entry_hear(struct meter_book *b, uint64_t id, uint64_t now_ms)
{
    struct meter_entry *e = map_get(&b->entries, map_key_u64(&id));
    if (!e) {
        if (b->n_living >= METER_ENTRIES_MAX) return NULL;
        if (b->entries.len >= METER_ENTRIES_MAX)
            entry_free(b, LIST_FIRST(&b->lapsed, struct meter_entry, link));
        e = MEM_NEW(struct meter_entry);
        e->id = id;
        list_init(&e->link);
        map_put(&b->entries, map_key_u64(&id), e);
    }
    if (e->end_ms <= now_ms) b->n_living++; /* it is new, or had lapsed */
    e->end_ms = now_ms + METER_LEASE_MS;
    list_remove(&e->link);
    list_push(&b->living, &e->link);
    return e;
}

static void entry_hold(struct meter_book *b, struct meter_entry *e, const struct meter_report *r)
{
    entry_drop_holds(e);
    e->holds = mem_calloc(r->n_uses, sizeof *e->holds);
    for (uint32_t i = 0; i < r->n_uses; i++) {
        const struct meter_use *u = &r->uses[i];
        if (!u->n_running && !u->n_waiting) continue;
        struct meter_tenant *t = tenant_find(b, u->tenant);
        t->n_running += u->n_running;
        t->n_waiting += u->n_waiting;
        e->holds[e->n_holds++] = (struct meter_hold){ t, u->n_running, u->n_waiting };
    }
}

/* ---- reports ---- */

/* Returns the least `served` of those that have something; UINT64_MAX: none has. */
static uint64_t least_served(const struct meter_book *b, uint64_t *most)
{
    uint64_t least = UINT64_MAX;
    size_t pos = 0;
    struct str key;
    void *one;
    *most = 0;
    while (map_next(&b->tenants, &pos, &key, &one)) {
        const struct meter_tenant *t = one;
        if (has_something(t)) least = least_of(least, t->served);
        *most = most_of(*most, t->served);
    }
    return least;
}

static void lower_all(struct meter_book *b)
{
    size_t pos = 0;
    struct str key;
    void *one;
    while (map_next(&b->tenants, &pos, &key, &one)) {
        struct meter_tenant *t = one;
        t->served -= least_of(t->served, b->floor);
    }
    b->floor = 0;
}

/* Returns the least `served` of those that have something; 0: none has. */
static uint64_t raise_floor(struct meter_book *b)
{
    uint64_t most, least = least_served(b, &most);
    b->floor = most_of(b->floor, least == UINT64_MAX ? most : least);
    if (b->floor > FLOOR_MAX) {
        lower_all(b);
        least = least_served(b, &most);
    }
    return least == UINT64_MAX ? 0 : least;
}

static void count(struct meter_book *b, const struct meter_report *r, uint64_t now_ms)
{
    for (uint32_t i = 0; i < r->n_uses; i++) {
        if (is_empty(&r->uses[i])) continue;
        struct meter_tenant *t = tenant_find(b, r->uses[i].tenant);
        if (!has_something(t)) t->served = most_of(t->served, b->floor);
        tenant_use(t, &r->uses[i], now_ms);
    }
}

static struct meter_sum sum_of(const struct meter_book *b, uint64_t tenant, uint64_t now_ms)
{
    struct meter_tenant *t = tenant_find(b, tenant);
    if (!t) return (struct meter_sum){ .tenant = tenant };
    tenant_slide(t, now_ms);
    return (struct meter_sum){
        .tenant = tenant,
        .requests = (uint32_t)least_of(t->requests, UINT32_MAX),
        .tokens = t->tokens,
        .served = t->served,
        .n_running = (uint32_t)least_of(t->n_running, UINT32_MAX),
        .n_waiting = (uint32_t)least_of(t->n_waiting, UINT32_MAX),
    };
}

enum status meter_book_report(struct meter_book *b, const struct meter_report *r, uint64_t now_ms,
                              struct meter_sum *sums, struct meter_sums *out, struct err *err)
{
    ASSERT(r->entry != 0 && r->number != 0 && r->n_uses <= METER_TENANTS_MAX);
    sweep(b, now_ms);
    TRY(tenants_add(b, r, now_ms, err));
    struct meter_entry *e = entry_hear(b, r->entry, now_ms);
    if (!e) return err_set(err, ERR_FULL, METER_ENTRIES_FULL, METER_ENTRIES_MAX);
    if (r->number > e->number) count(b, r, now_ms);
    if (r->number >= e->number)
        entry_hold(b, e, r); /* a lease may have ended since it came first */
    e->number = most_of(e->number, r->number);
    const uint64_t least = raise_floor(b);
    for (uint32_t i = 0; i < r->n_uses; i++) sums[i] = sum_of(b, r->uses[i].tenant, now_ms);
    *out = (struct meter_sums){
        .sums = sums, .n_sums = r->n_uses, .n_entries = b->n_living, .least = least
    };
    return OK;
}

bool meter_book_is_over(struct meter_book *b, uint64_t now_ms)
{
    sweep(b, now_ms);
    return b->entries.len == 0;
}

void meter_book_free(struct meter_book *b)
{
    size_t pos = 0;
    struct str key;
    void *one;
    if (!b) return;
    LIST_FOREACH (e, &b->living, struct meter_entry, link) entry_free(b, e);
    LIST_FOREACH (e, &b->lapsed, struct meter_entry, link) entry_free(b, e);
    while (map_next(&b->tenants, &pos, &key, &one)) mem_free(one);
    map_release(&b->tenants);
    map_release(&b->entries);
    mem_free(b);
}
