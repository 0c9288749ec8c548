/* place_uses.c - which nodes may stand in for an entry node's choice (place.h), by their kinds. */
#include "scheduler/place/place_node.h"

enum { NS_UNKNOWN = 10000 /* of a prompt token, where no node publishes its speed */ };

/* The mean of those that do. */
static uint32_t usual_ns(const struct node_record *nodes, size_t n)
{
    uint64_t per_s = 0, n_known = 0;
    for (size_t i = 0; i < n; i++) {
        per_s += nodes[i].prefill_tokens_per_s;
        n_known += nodes[i].prefill_tokens_per_s > 0;
    }
    if (!n_known) return NS_UNKNOWN;
    const uint64_t ns = 1000000000 * n_known / per_s;
    return (uint32_t)(ns < 1 ? 1 : ns < PREFIX_COST_MAX ? ns : PREFIX_COST_MAX);
}

/* Nodes like this one, of that role. Those whose groups lack ranks may do only what one of the
 * choice does that lacks some, too. The kind of the choice itself is named in any case. */
static void use(struct place_uses *u, const struct place_result *c, const struct node_record *like,
                enum node_role role, unsigned flags)
{
    const struct node_record *computes = c->prefill ? c->prefill : c->decode;
    for (int whole = 1; whole >= 0; whole--) {
        unsigned f = flags;
        if (!whole && place_is_whole(computes)) f &= ~(unsigned)(PREFIX_COMPUTES | PREFIX_ALONE);
        if (!whole && place_is_whole(c->decode)) f &= ~(unsigned)PREFIX_TAKES;
        const bool is_its_own = role == like->role && place_is_whole(like) == (whole == 1);
        if (!(f & (PREFIX_COMPUTES | PREFIX_TAKES)) && !is_its_own) continue;
        u->uses[u->n_uses++] = (struct prefix_use){ node_record_kind(like, role, whole),
                                                    (uint8_t)f };
    }
}

/* Instead of one of two nodes. Of two mixed ones the first has the lower number (place_node.c), so
 * a mixed one takes KV only from prefill nodes. */
static void use_split(struct place_uses *u, const struct place_request *r,
                      const struct place_result *c)
{
    const unsigned alone = PREFIX_COMPUTES | PREFIX_ALONE;
    const bool is_mixed = c->prefill->role == ROLE_MIXED;
    if (!is_mixed) use(u, c, c->prefill, ROLE_PREFILL, PREFIX_COMPUTES);
    if (c->decode->block_tokens != u->block_tokens) return;
    use(u, c, c->decode, ROLE_MIXED, alone | (is_mixed ? 0 : PREFIX_TAKES));
    use(u, c, c->decode, ROLE_DECODE, PREFIX_DECODE | PREFIX_TAKES | (r->is_again ? 0 : alone));
}

/* Instead of the only node. Decode nodes compute prompts of others only when one of them was chosen
 * to. */
static void use_alone(struct place_uses *u, const struct place_request *r,
                      const struct place_result *c)
{
    const unsigned alone = PREFIX_COMPUTES | PREFIX_ALONE;
    use(u, c, c->decode, ROLE_MIXED, alone);
    if (r->unsplit) use(u, c, c->decode, ROLE_PREFILL, alone);
    if (r->unsplit || c->decode->role == ROLE_DECODE)
        use(u, c, c->decode, ROLE_DECODE, PREFIX_DECODE | alone);
}

/* When there are too many of them, nobody stands in. */
static void avoid(struct place_uses *u, uint64_t node)
{
    if (!node || nodes_have(u->avoid, u->n_avoid, node)) return;
    if (u->n_avoid < PREFIX_AVOID_MAX) u->avoid[u->n_avoid++] = node;
    else
        for (uint32_t i = 0; i < u->n_uses; i++) u->uses[i].flags &= PREFIX_DECODE;
}

void place_uses(const struct node_record *nodes, size_t n, const struct place_request *r,
                const struct place_result *chosen, struct place_uses *out)
{
    const struct node_record *computes = chosen->prefill ? chosen->prefill : chosen->decode;
    *out = (struct place_uses){ .block_tokens = computes->block_tokens, .ns = usual_ns(nodes, n) };
    if (!computes->prefix_cache || !computes->block_tokens) return;
    if (chosen->prefill) use_split(out, r, chosen);
    else use_alone(out, r, chosen);
    out->blocks = (r->n_total + out->block_tokens - 1) / out->block_tokens;
    for (size_t i = 0; i < r->n_avoid; i++) avoid(out, r->avoid[i]);
    for (size_t i = 0; i < r->n_apart; i++)
        avoid(out, r->apart[i].decode == chosen->decode->node ? r->apart[i].prefill
                                                              : r->apart[i].decode);
    for (size_t i = 0; i < n; i++)
        if (nodes[i].is_lost) avoid(out, nodes[i].node);
    avoid(out, r->saved);
}
