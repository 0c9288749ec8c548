/* place_node.c - see place_node.h. */
#include "scheduler/place/place_node.h"

#include <string.h>

#include "shared/base/str.h"

bool place_is_candidate(const struct node_record *n, const struct place_request *r,
                        enum node_role role)
{
    if (n->role != role && n->role != ROLE_MIXED && !r->unsplit) return false;
    if (n->draining || n->is_lost || (r->model && n->model != r->model)) return false;
    return !nodes_have(r->avoid, r->n_avoid, n->node);
}

bool place_is_whole(const struct node_record *n) { return !n->group.name[0] || n->group.is_whole; }

bool place_are_of_one_group(const struct node_record *a, const struct node_record *b)
{
    return a->group.name[0] && a->group.size == b->group.size &&
           strcmp(a->group.name, b->group.name) == 0;
}

uint64_t place_decode_load(const struct node_record *n)
{
    uint32_t reported = n->n_running + n->n_waiting;
    return n->placed_seqs > reported ? n->placed_seqs : reported;
}

uint64_t place_prefill_load(const struct node_record *n)
{
    const uint64_t seqs = n->role == ROLE_PREFILL ? n->placed_seqs : place_decode_load(n);
    return n->placed_tokens + n->unplaced_tokens + PREFIX_SEQ_TOKENS * seqs;
}

static uint32_t blocks_for(const struct node_record *n, uint32_t tokens)
{
    return n->block_tokens ? (tokens + n->block_tokens - 1) / n->block_tokens : 0;
}

uint32_t place_first_blocks(const struct node_record *n, const struct place_request *r)
{
    return blocks_for(n, r->n_tokens < r->n_total ? r->n_tokens + 1 : r->n_tokens);
}

bool place_decode_fits(const struct node_record *n, const struct place_request *r)
{
    return blocks_for(n, r->n_total) <= n->n_blocks && r->n_total <= n->max_model_len;
}

bool place_has_capacity(const struct node_record *n, const struct place_request *r)
{
    if (n->node == r->saved) return false;
    if (r->needs_all && blocks_for(n, r->n_total) > n->n_blocks_free) return false;
    return n->placed_seqs < n->max_seqs &&
           n->placed_blocks + place_first_blocks(n, r) <= n->n_blocks;
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

bool place_is_same_kind(const struct node_record *a, const struct node_record *b)
{
    return strcmp(a->kv_type, b->kv_type) == 0 && a->kv_lossy == b->kv_lossy &&
           strcmp(a->kv_by, b->kv_by) == 0 && (a->kv_by[0] || a->kv_host == b->kv_host);
}

/* A request holds blocks on its decode node while it waits for those of its prefill node. Of two
 * mixed nodes the prefill node has the lower number, so that two requests cannot wait for each
 * other; prefill nodes hold no blocks for others, and decode nodes prefill for none. */
static bool is_in_order(const struct node_record *prefill, const struct node_record *decode)
{
    bool both_mixed = prefill->role == ROLE_MIXED && decode->role == ROLE_MIXED;
    return !both_mixed || prefill->node <= decode->node;
}

bool place_can_exchange(const struct place_request *r, const struct node_record *prefill,
                        const struct node_record *decode)
{
    for (size_t i = 0; i < r->n_apart; i++)
        if (r->apart[i].prefill == prefill->node && r->apart[i].decode == decode->node)
            return false;
    return is_in_order(prefill, decode) && place_exchange(prefill, decode) == EXCHANGE_OK;
}
