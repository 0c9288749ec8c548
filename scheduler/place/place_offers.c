/* place_offers.c - what the directory may choose from beside an entry node's choice (place.h): who
 * could stand in for one of its nodes, and what each costs.
 *
 * Whoever computes costs nanoseconds of its time: those of the tokens that wait there, and of the
 * prompt's that it does not have. A decode node that computes stops the sequences that run there,
 * so each nanosecond counts once more for each of them. Of those that take KV and decode, one that
 * has more of the prompt is sent less, and one with fewer sequences steps sooner; the former is
 * small against computing. */
#include "scheduler/place/place_node.h"

enum {
    NS_UNKNOWN = 10000, /* of a prompt token, where no node publishes its speed */
    /* A sequence that runs outweighs the KV of so many tokens, ... */
    SEQ_KV_TOKENS = 256,
    /* ... and among the ranks of a group, which all wait for the fullest, a token that is kept is
     * worth the less. */
    GROUP_LESS = 4,
    /* What is kept is seen a sixth too short in the mean (prefix_ladder.h), so a token of a prompt
     * counts as so many fifths of one that waits. */
    SEEN_FIFTHS = 6,
    /* With more sequences a decode node is hardly ever the one that computes a prompt's rest. */
    ALONE_SEQS_MAX = 15
};

struct offering {
    const struct place_request *r;
    const struct place_result *chosen;
    uint32_t ns; /* per prompt token, of nodes that do not publish their speed */
    struct place_offers *out;
};

static uint32_t cost(uint64_t v)
{
    return (uint32_t)(v < 1 ? 1 : v < PREFIX_COST_MAX ? v : PREFIX_COST_MAX);
}

static uint32_t load(uint64_t v) { return (uint32_t)(v < PREFIX_LOAD_MAX ? v : PREFIX_LOAD_MAX); }

/* The mean of those that do. */
static uint32_t usual_ns(const struct node_record *nodes, size_t n)
{
    uint64_t per_s = 0, n_known = 0;
    for (size_t i = 0; i < n; i++) {
        per_s += nodes[i].prefill_tokens_per_s;
        n_known += nodes[i].prefill_tokens_per_s > 0;
    }
    return n_known ? cost(1000000000 * n_known / per_s) : NS_UNKNOWN;
}

static void offer_compute(struct offering *o, const struct node_record *n, bool alone)
{
    const bool decodes = n->role == ROLE_DECODE, grouped = n->group.name[0];
    uint64_t ns = n->prefill_tokens_per_s ? cost(1000000000 / n->prefill_tokens_per_s) : o->ns;
    if (o->out->n_compute == PREFIX_OFFERS_MAX) return;
    if (decodes) ns *= 1 + place_decode_load(n);
    o->out->compute[o->out->n_compute++] = (struct prefix_offer){
        .node = n->node,
        .load = load(place_uncounted_load(n)),
        .per_load = cost(ns),
        .per_token = cost(grouped ? ns / GROUP_LESS : ns * SEEN_FIFTHS / 5),
        .alone = alone,
        .decodes = decodes,
    };
}

static void offer_decode(struct offering *o, const struct node_record *n)
{
    if (o->out->n_decode == PREFIX_OFFERS_MAX) return;
    o->out->decode[o->out->n_decode++] = (struct prefix_offer){
        .node = n->node,
        .forgets = !n->prefix_cache || n->block_tokens != o->out->block_tokens,
        .load = load(place_decode_load(n)),
        .per_load = SEQ_KV_TOKENS * GROUP_LESS,
        .per_token = n->group.name[0] ? 1 : GROUP_LESS,
    };
}

/* Has it a prefix cache whose keys are those of the choice? */
static bool is_comparable(const struct offering *o, const struct node_record *n,
                          const struct node_record *choice)
{
    return n->prefix_cache && n->block_tokens == o->out->block_tokens &&
           (place_is_whole(n) || !place_is_whole(choice));
}

static bool has_place(const struct offering *o, const struct node_record *n)
{
    return place_decode_fits(n, o->r) && place_has_capacity(n, o->r);
}

/* Instead of the choice's prefill node, or of both its nodes. */
static void try_compute(struct offering *o, const struct node_record *n)
{
    const struct node_record *prefill = o->chosen->prefill, *decode = o->chosen->decode;
    if (!is_comparable(o, n, prefill) || !place_is_candidate(n, o->r, n->role)) return;
    if (n->role == ROLE_DECODE && (o->r->is_again || place_decode_load(n) > ALONE_SEQS_MAX)) return;
    if (n->role == ROLE_PREFILL) {
        if (place_can_exchange(o->r, n, decode)) offer_compute(o, n, false);
    } else if (decode->block_tokens == o->out->block_tokens && has_place(o, n)) {
        offer_compute(o, n, true);
    }
}

/* Instead of the choice's decode node: also for the other prefill nodes, which can exchange KV with
 * it. */
static void try_decode(struct offering *o, const struct node_record *n)
{
    const struct place_request *r = o->r;
    const struct node_record *choice = o->chosen->decode;
    if (!is_comparable(o, n, choice) || !place_is_candidate(n, r, ROLE_DECODE)) return;
    for (size_t i = 0; i < r->n_apart; i++)
        if (r->apart[i].decode == n->node) return;
    if (place_is_same_kind(n, choice) && place_can_exchange(r, o->chosen->prefill, n) &&
        has_place(o, n))
        offer_decode(o, n);
}

/* Instead of the choice's only node. Decode nodes compute prompts of others only when one of them
 * was chosen to. */
static void try_alone(struct offering *o, const struct node_record *n)
{
    const struct node_record *choice = o->chosen->decode;
    if (!is_comparable(o, n, choice) || !place_is_candidate(n, o->r, ROLE_DECODE)) return;
    if (n->role == ROLE_DECODE && choice->role != ROLE_DECODE && !o->r->unsplit) return;
    if (has_place(o, n)) offer_compute(o, n, true);
}

void place_offers(const struct node_record *nodes, size_t n, const struct place_request *r,
                  const struct place_result *chosen, struct place_offers *out)
{
    const struct node_record *prefill = chosen->prefill, *decode = chosen->decode;
    struct offering o = { .r = r, .chosen = chosen, .ns = usual_ns(nodes, n), .out = out };
    const size_t first = n ? (size_t)(r->random >> 33) % n : 0;
    out->n_compute = out->n_decode = 0;
    out->block_tokens = (prefill ? prefill : decode)->block_tokens;
    if (!(prefill ? prefill : decode)->prefix_cache) return;
    offer_compute(&o, prefill ? prefill : decode, !prefill);
    if (prefill) offer_decode(&o, decode);
    for (size_t i = 0; i < n; i++) {
        const struct node_record *one = &nodes[(first + i) % n];
        if (!prefill && one != decode) try_alone(&o, one);
        if (prefill && one != prefill) try_compute(&o, one);
        if (prefill && one != decode) try_decode(&o, one);
    }
}
