/* prefill.h - the prefill worker: computes a prompt, and pushes its KV and first token to a decode
 * node.
 *
 * Life cycle of a prompt (prompt.h), keyed by entry node, request id and attempt:
 *
 *   ASK_CREDIT ─▶ ASKED ─ less than two steps of work pending ─▶ CREDITED ─ PREFILL ─▶ CONNECTING
 *   ─ transfers of all ranks open ─▶ COMPUTING (each layer is pushed when it is done) ─ first token ─▶ DRAINING
 *   ─ receivers acknowledged all parts ─▶ gone
 *   CANCEL, entry or decode node lost, failure ─▶ CLOSING ─ engine and transfer done ─▶ gone
 *
 * Credits bound the decode memory that waits for this node: a decode node reserves only for prompts
 * that start within about two steps. Threads: loop, except prefill_on_kv_ready (engine). */
#ifndef BATON_PREFILL_PREFILL_H
#define BATON_PREFILL_PREFILL_H

#include "kvtransfer/kvtransfer.h"
#include "shared/cluster/cluster.h"
#include "shared/engine/engine.h"

struct prefill_worker;

struct prefill_options {
    struct loop *loop; /* all borrowed until prefill_free */
    struct engine *engine;
    struct kvt *kvt; /* NULL: no transfer protocol, prompts are refused */
    struct cluster *cluster;
    struct metrics *metrics;
    uint32_t step_tokens; /* tokens of one engine step; credits cover at most two steps */
    uint32_t max_prompts; /* asked and running; more are refused as busy */
    /* Ids of prompts are id_base + multiples of KV_PARTS_MAX; kvtransfer's are those plus the
     * number of the part. */
    uint64_t id_base;
    /* Processes of the node's ranks above 0, by rank, if it is of several (prefill_follow.h). The
     * cluster knows where they are. */
    const uint64_t *followers;
    uint32_t n_followers;
};

struct prefill_worker *prefill_create(const struct prefill_options *o);
void prefill_free(struct prefill_worker *w);

/* As decode_set_role, for ASK_CREDIT; it settles while the node has grants of a role before. A new
 * role gives back the prompts that wait for a credit, which hold nothing anywhere. */
void prefill_set_role(struct prefill_worker *w, uint32_t role, bool settles);
/* Prompts of a role before with a credit that are not computed: decode nodes hold blocks for them,
 * or are asked. */
uint32_t prefill_n_old_credits(const struct prefill_worker *w);
/* The node shuts down: gives new prompts, and those that wait for a credit, back to their entry
 * nodes at once, which start them elsewhere; or takes them again. */
void prefill_set_leaving(struct prefill_worker *w, bool leaves);
/* It shuts down: gives all prompts that are not computed back as well. */
void prefill_hand_back(struct prefill_worker *w);
bool prefill_on_message(struct prefill_worker *w, const struct cluster_message *m);
void prefill_on_engine(struct prefill_worker *w, const struct engine_event *ev);
void prefill_on_kvt(struct prefill_worker *w, const struct kvt_event *ev);
void prefill_on_lost(struct prefill_worker *w, uint64_t node);
/* Engine thread: gives finished layers of sequence `id` to kvtransfer
 * (engine_options.on_kv_ready). */
void prefill_on_kv_ready(struct kvt *kvt, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                         const int32_t *blocks, uint64_t event);
uint32_t prefill_n_live(const struct prefill_worker *w);

#endif
