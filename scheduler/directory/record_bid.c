/* record_bid.c - what a node's record says to the prefix table (scheduler/prefix/prefix.h): of
 * which kind the node is and what it costs, short enough to be read with each placement. Thread:
 * any (pure functions). */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "scheduler/directory/directory.h"
#include "shared/base/hash/hash.h"

/* The host counts for nodes that reach no other. */
uint64_t node_record_kind(const struct node_record *r, enum node_role role, bool is_whole)
{
    char text[2 * KV_TYPE_MAX + KV_BY_MAX + 96];
    const int n = snprintf(text, sizeof text, "%d %d %016" PRIx64 " %u %u %s %d %s %016" PRIx64,
                           (int)role, is_whole, r->model, r->block_tokens, r->max_model_len,
                           r->kv_type, r->kv_lossy, r->kv_by, r->kv_by[0] ? 0 : r->kv_host);
    const uint64_t h = hash_64(text, (size_t)n, 0);
    return h ? h : 1;
}

static uint32_t limited(uint64_t v, uint32_t max) { return v < max ? (uint32_t)v : max; }

struct prefix_bid node_record_bid(const struct node_record *r)
{
    const bool grouped = r->group.name[0];
    struct prefix_bid c = { .waiting = limited(r->waiting_tokens, PREFIX_LOAD_MAX),
                            .grouped = grouped };
    if (r->prefix_cache && !r->draining)
        c.kind = node_record_kind(r, r->role, !grouped || r->group.is_whole);
    if (r->prefill_tokens_per_s) {
        const uint32_t ns = 1000000000 / r->prefill_tokens_per_s;
        c.ns = ns ? limited(ns, PREFIX_COST_MAX) : 1;
    }
    if (r->role != ROLE_PREFILL)
        c.seqs = limited((uint64_t)r->n_running + r->n_waiting, PREFIX_LOAD_MAX);
    return c;
}
