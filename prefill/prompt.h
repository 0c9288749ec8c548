/* prompt.h - the record of one prompt and its states (prefill.h has the diagram). Thread: loop.
 * Owner: prefill_worker. */
#ifndef BATON_PREFILL_PROMPT_H
#define BATON_PREFILL_PROMPT_H

#include "prefill/prompt_parts.h"
#include "shared/base/list.h"
#include "shared/base/mem.h"
#include "shared/cluster/answer.h"
#include "shared/cluster/cluster.h"
#include "shared/cluster/generation_wire.h"
#include "shared/engine/engine.h"

enum prefill_prompt_state {
    PROMPT_ASKED,      /* in the queue for a credit */
    PROMPT_CREDITED,   /* has a credit; PREFILL is awaited */
    PROMPT_CONNECTING, /* waits for data connections of all ranks to its decode node's */
    PROMPT_COMPUTING,  /* in the engine; finished layers are being pushed */
    PROMPT_DRAINING,   /* computed; the receiver's acknowledgement is awaited */
    PROMPT_CLOSING     /* ended: waits for the engine and the transfer */
};

struct prefill_prompt {
    uint64_t id; /* in engine and kvtransfer */
    uint64_t request;
    uint32_t attempt;
    uint64_t entry, decode;
    enum prefill_prompt_state state;
    uint32_t n_tokens; /* of ASK_CREDIT: what the credit counts */
    bool credited;     /* counts in worker->credited_tokens */
    bool goes_first;   /* before prompts that wait here and do not */
    bool of_old_role;  /* its node had another role when it came */
    bool in_engine;    /* the engine has it, until FINISHED with engine_release, or CANCELED */
    bool computed;     /* FINISHED came: engine_release frees its blocks */
    struct prompt_parts parts; /* its KV transfers, on all ranks of this node */
    uint64_t t_credit_ms;      /* when the credit was given */
    uint64_t t_connect_ms;     /* when it was used: CONNECTING began */
    struct arena arena;        /* holds `wire` and the grants until the engine has its copy */
    struct generation_wire wire;
    uint64_t queue_ns, prefill_ns;
    uint32_t n_cached;
    struct engine_cache_use cache;
    struct kv_kept kept; /* who is said to have KV of it */
    struct list link;    /* worker.live */
    struct list queue;   /* worker.asked; else unlinked */
};

#endif
