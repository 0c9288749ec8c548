/* prompt.h - one prompt's record and its states (prefill.h has the diagram). Thread: loop. Owner:
 * prefill_worker. */
#ifndef BATON_PREFILL_PROMPT_H
#define BATON_PREFILL_PROMPT_H

#include "shared/base/list.h"
#include "shared/base/mem.h"
#include "shared/cluster/cluster.h"
#include "shared/cluster/generation_wire.h"

enum prefill_prompt_state {
    PROMPT_ASKED,      /* in the queue for a credit */
    PROMPT_CREDITED,   /* told to go ahead; PREFILL is awaited */
    PROMPT_CONNECTING, /* the data connection to its decode node is being made */
    PROMPT_COMPUTING,  /* in the engine; pieces are leaving */
    PROMPT_DRAINING,   /* computed; the receiver's acknowledgement is awaited */
    PROMPT_CLOSING     /* no longer wanted: engine and transfer are letting go */
};

struct prefill_prompt {
    uint64_t id; /* in engine and kvtransfer */
    uint64_t request;
    uint32_t attempt;
    uint64_t entry, decode;
    enum prefill_prompt_state state;
    uint32_t n_tokens;    /* as asked: what the credit counts */
    bool credited;        /* counts in worker->credited_tokens */
    bool in_engine;       /* the engine owes FINISHED or CANCELED, or holds blocks until
                           * engine_release */
    bool computed;        /* FINISHED came: engine_release ends it */
    bool in_transfer;     /* kvtransfer owes SENT or SEND_FAILED */
    uint64_t t_credit_ms; /* when the credit was given */
    struct arena arena;   /* holds `wire` and the grant until the engine has its copy */
    struct generation_wire wire;
    struct str grant;
    uint64_t queue_ns, prefill_ns;
    uint32_t n_cached;
    struct list link;  /* worker.live */
    struct list queue; /* worker.asked or a route's waiting list; alone otherwise */
};

#endif
