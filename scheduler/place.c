/* place.c - see place.h. */
#include "scheduler/place.h"

#include <string.h>

#include "shared/base/str.h"

enum {
    SLACK_PREFILL_MIN = 64, /* load difference in tokens that a cached prefix outweighs */
    SLACK_PREFILL_MAX = 512,
    GROUP_SLACK = 4, /* by which it is smaller among the ranks of one group */
    /* What a sequence that runs weighs in tokens, where a group's ranks step together: it is a row
     * of each of their steps until it ends, and a token of a prompt is one of a single step. */
    SEQ_TOKENS = 32,
    /* A prefill node on which as many tokens wait is busy for longer than a lost rank costs those
     * that are left: prompts then go to groups that are not whole, too. */
    BUSY_TOKENS = 2048,
    KINDS_MAX = 8 /* kinds of KV exchange in a topic that are told apart */
};

static bool is_candidate(const struct node_record *n, const struct place_request *r,
                         enum node_role role)
{
    if (n->role != role && n->role != ROLE_MIXED && !r->unsplit) return false;
    if (n->draining || n->is_lost || (r->model && n->model != r->model)) return false;
    return !nodes_have(r->avoid, r->n_avoid, n->node);
}

/* Is the node in no group, or in one that has all of its ranks? Other groups answer as well, but
 * fewer ranks do the work, and it stops for a moment when a lost one comes back. */
static bool is_whole(const struct node_record *n) { return !n->group.name[0] || n->group.is_whole; }

static bool are_of_one_group(const struct node_record *a, const struct node_record *b)
{
    return a->group.name[0] && a->group.size == b->group.size &&
           strcmp(a->group.name, b->group.name) == 0;
}

static uint64_t decode_load(const struct node_record *n)
{
    uint32_t reported = n->n_running + n->n_waiting;
    return n->placed_seqs > reported ? n->placed_seqs : reported;
}

/* A mixed rank of a group decodes its own prompts, and all ranks wait for the one with the most
 * rows. */
static uint64_t prefill_load(const struct node_record *n)
{
    const uint64_t tokens = n->placed_tokens > n->waiting_tokens ? n->placed_tokens
                                                                 : n->waiting_tokens;
    return n->group.name[0] && n->role == ROLE_MIXED ? tokens + SEQ_TOKENS * decode_load(n)
                                                     : tokens;
}

static uint32_t blocks_for(const struct node_record *n, uint32_t tokens)
{
    return n->block_tokens ? (tokens + n->block_tokens - 1) / n->block_tokens : 0;
}

/* Blocks needed to start: those of the prompt, and of the first token if there is one. */
static uint32_t first_blocks(const struct node_record *n, const struct place_request *r)
{
    return blocks_for(n, r->n_tokens < r->n_total ? r->n_tokens + 1 : r->n_tokens);
}

/* Could an empty decode node hold the request to the end of its answer? */
static bool decode_fits(const struct node_record *n, const struct place_request *r)
{
    return blocks_for(n, r->n_total) <= n->n_blocks && r->n_total <= n->max_model_len;
}

/* Also of a mixed node that is to prefill: its engine has the same places and blocks for prompts
 * as for answers, and a prompt would wait there until an answer ends. */
static bool has_capacity(const struct node_record *n, const struct place_request *r)
{
    if (n->node == r->saved) return false;
    if (r->needs_all && blocks_for(n, r->n_total) > n->n_blocks_free) return false;
    return n->placed_seqs < n->max_seqs && n->placed_blocks + first_blocks(n, r) <= n->n_blocks;
}

/* Rendezvous hashing: the node whose hash with the prompt's first block is highest. */
static uint64_t affinity(const struct node_record *n, const struct place_request *r)
{
    return hash_64(&n->node, sizeof n->node, r->first_block.lo ^ r->first_block.hi);
}

static bool says_transports(const struct node_record *n) { return n->kv_by[0] || n->kv_host; }

static bool have_common_transport(const struct node_record *a, const struct node_record *b)
{
    struct str rest = str_of(a->kv_by), one, others, other;
    if (!says_transports(a) || !says_transports(b)) return true;
    if (a->kv_host && a->kv_host == b->kv_host) return true;
    if (a->kv_by[0] && strcmp(a->kv_by, b->kv_by) == 0) return true;
    while (str_split(&rest, ',', &one)) {
        others = str_of(b->kv_by);
        while (str_split(&others, ',', &other))
            if (one.n && str_eq(one, other)) return true;
    }
    return false;
}

/* The rule is that of kv_dtype_keeps (shared/kv/kv_layout.h): every type fits into f32. A node that
 * says nothing is tried. */
enum place_exchange place_exchange(const struct node_record *prefill,
                                   const struct node_record *decode)
{
    bool types_fit = !prefill->kv_type[0] || !decode->kv_type[0] || prefill->kv_lossy ||
                     decode->kv_lossy || strcmp(decode->kv_type, "f32") == 0 ||
                     strcmp(prefill->kv_type, decode->kv_type) == 0;
    if (!types_fit) return EXCHANGE_TYPES_DIFFER;
    return have_common_transport(prefill, decode) ? EXCHANGE_OK : EXCHANGE_NO_TRANSPORT;
}

/* A request holds blocks on its decode node while it waits for those of its prefill node. Of two
 * mixed nodes the prefill node has the lower number, so that two requests cannot wait for each
 * other; prefill nodes hold no blocks for others, and decode nodes prefill for none. */
static bool is_in_order(const struct node_record *prefill, const struct node_record *decode)
{
    bool both_mixed = prefill->role == ROLE_MIXED && decode->role == ROLE_MIXED;
    return !both_mixed || prefill->node <= decode->node;
}

static bool can_exchange(const struct place_request *r, const struct node_record *prefill,
                         const struct node_record *decode)
{
    for (size_t i = 0; i < r->n_apart; i++)
        if (r->apart[i].prefill == prefill->node && r->apart[i].decode == decode->node)
            return false;
    return is_in_order(prefill, decode) && place_exchange(prefill, decode) == EXCHANGE_OK;
}

struct candidates {
    const struct node_record *node[PLACE_SAMPLE + 1];
    size_t n;
    size_t seen; /* how many qualify, sampled or not */
    /* One node of each kind of KV exchange among those that qualify; n_kinds above KINDS_MAX: too
     * many. */
    const struct node_record *kind[KINDS_MAX];
    size_t n_kinds;
    bool has_broken; /* one that qualifies is in a group that is not whole */
};

/* Whether all that a record says of KV exchange is the same. The host counts for nodes that reach
 * no other. */
static bool is_same_kind(const struct node_record *a, const struct node_record *b)
{
    return strcmp(a->kv_type, b->kv_type) == 0 && a->kv_lossy == b->kv_lossy &&
           strcmp(a->kv_by, b->kv_by) == 0 && (a->kv_by[0] || a->kv_host == b->kv_host);
}

static void note_kind(struct candidates *c, const struct node_record *n)
{
    for (size_t i = 0; i < c->n_kinds && i < KINDS_MAX; i++)
        if (is_same_kind(c->kind[i], n)) return;
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
        bool takes = complete ? can_exchange(r, prefill, decode->node[i])
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
    if (!is_candidate(n, r, s->role)) return false;
    if (s->computes_prompt && nodes_have(r->filled, r->n_filled, n->node)) return false;
    if (s->role == ROLE_PREFILL)
        return some_take(s->decode, r, n, &all) && (n->role != ROLE_MIXED || has_capacity(n, r));
    return decode_fits(n, r) && (!s->need_capacity || has_capacity(n, r)) &&
           (!s->prefill || s->prefill == n || can_exchange(r, s->prefill, n));
}

static bool some_whole_qualifies(const struct node_record *nodes, size_t n,
                                 const struct place_request *r, const struct stage *s)
{
    for (size_t i = 0; i < n; i++)
        if (is_whole(&nodes[i]) && qualifies(&nodes[i], r, s)) return true;
    return false;
}

/* Takes a reservoir sample of the nodes that qualify, plus the one that the hash prefers. */
static void gather(const struct node_record *nodes, size_t n, const struct place_request *r,
                   const struct stage *s, struct candidates *c)
{
    const struct node_record *named = NULL;
    uint64_t state = r->random | 1;
    const bool only_whole = s->prefers_whole && some_whole_qualifies(nodes, n, r, s);
    *c = (struct candidates){ 0 };
    for (size_t i = 0; i < n; i++) {
        const struct node_record *node = &nodes[i];
        if ((only_whole && !is_whole(node)) || !qualifies(node, r, s)) continue;
        c->has_broken |= !is_whole(node);
        note_kind(c, node);
        if (!named || affinity(node, r) > affinity(named, r)) named = node;
        size_t at = c->seen++;
        if (at >= PLACE_SAMPLE) {
            /* Knuth's MMIX generator */
            state = state * 6364136223846793005u + 1442695040888963407u;
            at = (size_t)(state >> 33) % c->seen;
        }
        if (at < PLACE_SAMPLE) c->node[at] = node;
        if (c->n < PLACE_SAMPLE) c->n++;
    }
    bool has_named = false;
    for (size_t i = 0; i < c->n; i++) has_named |= c->node[i] == named;
    if (named && !has_named) c->node[c->n++] = named;
}

typedef uint64_t load_fn(const struct node_record *n);

/* The least load of the candidates, or of those in the group of `mate`. */
static uint64_t least_load(const struct candidates *c, load_fn *load,
                           const struct node_record *mate)
{
    uint64_t least = UINT64_MAX;
    for (size_t i = 0; i < c->n; i++)
        if ((!mate || are_of_one_group(c->node[i], mate)) && load(c->node[i]) < least)
            least = load(c->node[i]);
    return least;
}

/* Is the node's load close to the least? Among ranks of one group it has to be closer: a prefix
 * that is cached saves one rank's time, and all ranks wait for the fullest. The least loaded
 * candidate always is. */
static bool is_close(const struct candidates *c, const struct node_record *n, load_fn *load,
                     uint64_t slack)
{
    if (load(n) > least_load(c, load, NULL) + slack) return false;
    return !n->group.name[0] || load(n) <= least_load(c, load, n) + slack / GROUP_SLACK;
}

static const struct node_record *pick(const struct candidates *c, const struct place_request *r,
                                      load_fn *load, uint64_t slack)
{
    const struct node_record *close[PLACE_SAMPLE + 1], *named = NULL;
    size_t n_close = 0;
    for (size_t i = 0; i < c->n; i++) {
        if (!is_close(c, c->node[i], load, slack)) continue;
        close[n_close++] = c->node[i];
        if (!named || affinity(c->node[i], r) > affinity(named, r)) named = c->node[i];
    }
    if (n_close == 0) return NULL;
    if (r->first_block.lo | r->first_block.hi) return named;
    return close[(r->random >> 17) % n_close];
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
    if (c.seen && !c.has_broken && least_load(&c, prefill_load, NULL) >= BUSY_TOKENS) {
        s.prefers_whole = false;
        gather(nodes, n, r, &s, &c);
    }
    *out = c.seen ? pick(&c, r, prefill_load, prefill_slack(r)) : NULL;
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
    *out = (struct place_result){ .decode = pick(with_room, r, prefill_load, prefill_slack(r)) };
    out->blocks = first_blocks(out->decode, r);
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
    struct place_request any_decode = *r;
    /* For the decode stage, balanced load matters more than the prefix cache. */
    any_decode.first_block = (struct hash128){ 0 };
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
    out->decode = pick(decode, &any_decode, decode_load, 0);
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
    if (out->prefill && out->prefill->role == ROLE_MIXED && decode_fits(out->prefill, r) &&
        has_capacity(out->prefill, r)) {
        out->decode = out->prefill; /* a mixed node decodes its own prompts */
        out->prefill = NULL;
    } else {
        choose_decode(nodes, n, r, &decode, out);
    }
    out->blocks = first_blocks(out->decode, r);
    return OK;
}

uint64_t place_roomiest(const struct node_record *nodes, size_t n, const struct place_request *r)
{
    const struct node_record *best = NULL;
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        const struct node_record *d = &nodes[i];
        if (!is_candidate(d, r, ROLE_DECODE) || !decode_fits(d, r)) continue;
        const uint32_t free = d->placed_blocks < d->n_blocks ? d->n_blocks - d->placed_blocks : 0;
        if (best && free <= most) continue;
        best = d;
        most = free;
    }
    return best ? best->node : 0;
}
