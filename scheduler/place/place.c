/* place.c - see place.h. */
#include "scheduler/place/place_node.h"

enum {
    SLACK_PREFILL_MIN = 64,  /* loads that differ by so many tokens are alike: entry nodes whose */
    SLACK_PREFILL_MAX = 512, /* views are equally old do not all take the same node */
    CLOSER = 4,              /* by which it is smaller of mixed nodes and in a group */
    /* A prefill node on which as many tokens wait is busy for longer than a lost rank costs those
     * that are left: prompts then go to groups that are not whole, too. */
    BUSY_TOKENS = 2048,
    KINDS_MAX = 8 /* kinds of KV exchange in a topic that are told apart */
};

struct candidates {
    const struct node_record *node[PLACE_SAMPLE];
    size_t n;
    size_t seen; /* how many qualify, sampled or not */
    /* One node of each kind of KV exchange among those that qualify; n_kinds above KINDS_MAX: too
     * many. */
    const struct node_record *kind[KINDS_MAX];
    size_t n_kinds;
    bool has_broken; /* one that qualifies is in a group that is not whole */
};

static void note_kind(struct candidates *c, const struct node_record *n)
{
    for (size_t i = 0; i < c->n_kinds && i < KINDS_MAX; i++)
        if (place_is_same_kind(c->kind[i], n)) return;
    if (c->n_kinds < KINDS_MAX) c->kind[c->n_kinds] = n;
    c->n_kinds++;
}

/* Can some of the decode nodes take the KV of this prefill node? *all: every one can. When all of
 * them are at hand each is asked, else one of each kind. */
static bool some_take(const struct candidates *decode, const struct place_request *r,
                      const struct node_record *prefill, bool *all)
{
    bool complete = decode->seen <= PLACE_SAMPLE, some = false;
    size_t n = complete ? decode->n : decode->n_kinds;
    *all = r->n_apart == 0 || complete;
    if (!complete && n > KINDS_MAX) {
        some = true;
        *all = false;
        n = KINDS_MAX;
    }
    for (size_t i = 0; i < n; i++) {
        /* A pair that is apart says nothing of the other nodes of its kind. */
        bool takes = complete ? place_can_exchange(r, prefill, decode->node[i])
                              : place_exchange(prefill, decode->kind[i]) == EXCHANGE_OK;
        some |= takes;
        *all &= takes;
    }
    return some;
}

/* What qualifies for a stage. */
struct stage {
    enum node_role role;
    bool need_capacity;                /* decode */
    const struct node_record *prefill; /* decode: that takes the KV of this one; NULL: any */
    const struct candidates *decode;   /* prefill: whose KV some of these take */
    bool prefers_whole;                /* groups that are not whole only if there is nothing else */
    bool computes_prompt;              /* filled nodes do not qualify */
};

static bool qualifies(const struct node_record *n, const struct place_request *r,
                      const struct stage *s)
{
    bool all;
    if (!place_is_candidate(n, r, s->role)) return false;
    if (s->computes_prompt && nodes_have(r->filled, r->n_filled, n->node)) return false;
    if (s->role == ROLE_PREFILL)
        return some_take(s->decode, r, n, &all) &&
               (n->role != ROLE_MIXED || place_has_capacity(n, r));
    return place_decode_fits(n, r) && (!s->need_capacity || place_has_capacity(n, r)) &&
           (!s->prefill || s->prefill == n || place_can_exchange(r, s->prefill, n));
}

static bool some_whole_qualifies(const struct node_record *nodes, size_t n,
                                 const struct place_request *r, const struct stage *s)
{
    for (size_t i = 0; i < n; i++)
        if (place_is_whole(&nodes[i]) && qualifies(&nodes[i], r, s)) return true;
    return false;
}

/* Takes a reservoir sample of the nodes that qualify. */
static void gather(const struct node_record *nodes, size_t n, const struct place_request *r,
                   const struct stage *s, struct candidates *c)
{
    uint64_t state = r->random | 1;
    const bool only_whole = s->prefers_whole && some_whole_qualifies(nodes, n, r, s);
    *c = (struct candidates){ 0 };
    for (size_t i = 0; i < n; i++) {
        const struct node_record *node = &nodes[i];
        if ((only_whole && !place_is_whole(node)) || !qualifies(node, r, s)) continue;
        c->has_broken |= !place_is_whole(node);
        note_kind(c, node);
        size_t at = c->seen++;
        if (at >= PLACE_SAMPLE) {
            /* Knuth's MMIX generator */
            state = state * 6364136223846793005u + 1442695040888963407u;
            at = (size_t)(state >> 33) % c->seen;
        }
        if (at < PLACE_SAMPLE) c->node[at] = node;
        if (c->n < PLACE_SAMPLE) c->n++;
    }
}

typedef uint64_t load_fn(const struct node_record *n);

/* The least load of the candidates, or of those in the group of `mate`. */
static uint64_t least_load(const struct candidates *c, load_fn *load,
                           const struct node_record *mate)
{
    uint64_t least = UINT64_MAX;
    for (size_t i = 0; i < c->n; i++)
        if ((!mate || place_are_of_one_group(c->node[i], mate)) && load(c->node[i]) < least)
            least = load(c->node[i]);
    return least;
}

/* Is the node's load close to the least? Of mixed nodes it has to be closer, since what runs there
 * stays; likewise among ranks of one group, since all of them wait for the fullest. The least
 * loaded candidate always is. */
static bool is_close(const struct candidates *c, const struct node_record *n, load_fn *load,
                     uint64_t slack)
{
    const uint64_t closer = slack / CLOSER;
    if (load(n) > least_load(c, load, NULL) + (n->role == ROLE_MIXED ? closer : slack))
        return false;
    return !n->group.name[0] || load(n) <= least_load(c, load, n) + closer;
}

static const struct node_record *pick(const struct candidates *c, const struct place_request *r,
                                      load_fn *load, uint64_t slack)
{
    const struct node_record *close[PLACE_SAMPLE];
    size_t n_close = 0;
    for (size_t i = 0; i < c->n; i++)
        if (is_close(c, c->node[i], load, slack)) close[n_close++] = c->node[i];
    return n_close ? close[(r->random >> 17) % n_close] : NULL;
}

static uint64_t prefill_slack(const struct place_request *r)
{
    uint64_t slack = r->n_tokens / 4;
    if (slack < SLACK_PREFILL_MIN) return SLACK_PREFILL_MIN;
    return slack > SLACK_PREFILL_MAX ? SLACK_PREFILL_MAX : slack;
}

/* Groups that are not whole are passed over while one of the others is not busy. *out NULL: there
 * is none. ERR_BUSY: all are filled. */
static enum status pick_prefill(const struct node_record *nodes, size_t n,
                                const struct place_request *r, const struct candidates *decode,
                                const struct node_record **out)
{
    struct candidates c;
    struct stage s = { .role = ROLE_PREFILL, .decode = decode, .prefers_whole = true };
    gather(nodes, n, r, &s, &c);
    if (c.seen && r->n_filled) {
        s.computes_prompt = true;
        gather(nodes, n, r, &s, &c);
        if (c.seen == 0) return ERR_BUSY;
    }
    if (c.seen && !c.has_broken && least_load(&c, place_prefill_load, NULL) >= BUSY_TOKENS) {
        s.prefers_whole = false;
        gather(nodes, n, r, &s, &c);
    }
    *out = c.seen ? pick(&c, r, place_prefill_load, prefill_slack(r)) : NULL;
    return OK;
}

/* Of nodes with room, `with_room`, for a request that is not split. */
static void choose_one(const struct node_record *nodes, size_t n, const struct place_request *r,
                       struct candidates *with_room, struct place_result *out)
{
    const struct stage s = {
        .role = ROLE_DECODE, .need_capacity = true, .prefers_whole = true, .computes_prompt = true
    };
    if (with_room->has_broken) gather(nodes, n, r, &s, with_room);
    *out = (struct place_result){ .decode = pick(with_room, r, place_prefill_load,
                                                 prefill_slack(r)) };
    out->blocks = place_first_blocks(out->decode, r);
}

/* Takes out the filled ones of the nodes with room, which would compute the prompt. False: none is
 * left. */
static bool has_unfilled(const struct node_record *nodes, size_t n, const struct place_request *r,
                         struct candidates *with_room)
{
    const struct stage s = { .role = ROLE_DECODE, .need_capacity = true, .computes_prompt = true };
    if (r->n_filled) gather(nodes, n, r, &s, with_room);
    return with_room->seen > 0;
}

/* Of nodes with room, `decode`, that for the KV of out->prefill. */
static void choose_decode(const struct node_record *nodes, size_t n, const struct place_request *r,
                          struct candidates *decode, struct place_result *out)
{
    struct stage s = { .role = ROLE_DECODE,
                       .need_capacity = true,
                       .prefill = out->prefill,
                       .prefers_whole = true,
                       .computes_prompt = !out->prefill };
    bool all = true;
    if ((out->prefill && some_take(decode, r, out->prefill, &all) && !all) || decode->has_broken)
        gather(nodes, n, r, &s, decode);
    if (decode->seen == 0) { /* only of a sample: none takes it after all */
        out->prefill = s.prefill = NULL;
        gather(nodes, n, r, &s, decode);
    }
    out->decode = pick(decode, r, place_decode_load, 0);
    if (out->prefill == out->decode) out->prefill = NULL;
}

enum status place_choose(const struct node_record *nodes, size_t n, const struct place_request *r,
                         struct place_result *out)
{
    struct candidates decode;
    struct stage to_decode = { .role = ROLE_DECODE };
    gather(nodes, n, r, &to_decode, &decode);
    if (decode.seen == 0) return ERR_UNAVAILABLE;
    to_decode.need_capacity = true;
    gather(nodes, n, r, &to_decode, &decode);
    if (decode.seen == 0) return ERR_BUSY;
    if (r->unsplit) {
        if (!has_unfilled(nodes, n, r, &decode)) return ERR_BUSY;
        choose_one(nodes, n, r, &decode, out);
        return OK;
    }
    *out = (struct place_result){ 0 };
    TRY(pick_prefill(nodes, n, r, &decode, &out->prefill));
    if (!out->prefill && !has_unfilled(nodes, n, r, &decode)) return ERR_BUSY;
    if (out->prefill && out->prefill->role == ROLE_MIXED && place_decode_fits(out->prefill, r) &&
        place_has_capacity(out->prefill, r)) {
        out->decode = out->prefill; /* a mixed node decodes its own prompts */
        out->prefill = NULL;
    } else {
        choose_decode(nodes, n, r, &decode, out);
    }
    out->blocks = place_first_blocks(out->decode, r);
    return OK;
}

uint64_t place_roomiest(const struct node_record *nodes, size_t n, const struct place_request *r)
{
    const struct node_record *best = NULL;
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        const struct node_record *d = &nodes[i];
        if (!place_is_candidate(d, r, ROLE_DECODE) || !place_decode_fits(d, r)) continue;
        const uint32_t free = d->placed_blocks < d->n_blocks ? d->n_blocks - d->placed_blocks : 0;
        if (best && free <= most) continue;
        best = d;
        most = free;
    }
    return best ? best->node : 0;
}
