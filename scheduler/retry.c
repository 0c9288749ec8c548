/* retry.c - the recovery table (retry.h). One row per state, one column per loss.
 * Thread: any (a constant table). */
#include "scheduler/retry.h"

#include "shared/base/assert.h"

#define I ACTION_IGNORE
#define Q ACTION_REQUEUE
#define M ACTION_MOVE
#define F ACTION_FAIL

/* clang-format off */
static const enum request_action TABLE[REQUEST_N_STATES][REQUEST_N_LOSSES] = {
    /*                   prefill node  decode node  busy  peer  request  node  stuck */
    [REQUEST_PLACING] = { I,           I,           I,    I,    F,       I,    I },
    [REQUEST_CREDIT]  = { M,           M,           Q,    M,    F,       M,    M },
    [REQUEST_RESERVE] = { M,           M,           Q,    M,    F,       M,    M },
    [REQUEST_PREFILL] = { M,           M,           Q,    M,    F,       M,    M },
    [REQUEST_DECODE]  = { I,           M,           M,    M,    F,       M,    M },
    [REQUEST_RUN]     = { I,           M,           Q,    M,    F,       M,    M },
    [REQUEST_ENDED]   = { I,           I,           I,    I,    I,       I,    I },
};
/* clang-format on */

#undef I
#undef Q
#undef M
#undef F

const char *request_state_name(enum request_state s)
{
    static const char *const names[REQUEST_N_STATES] = { "placing", "credit", "reserve", "prefill",
                                                         "decode",  "run",    "ended" };
    ASSERT(s < REQUEST_N_STATES);
    return names[s];
}

enum request_action retry_action(enum request_state state, enum request_loss loss)
{
    ASSERT(state < REQUEST_N_STATES);
    ASSERT(loss < REQUEST_N_LOSSES);
    return TABLE[state][loss];
}

const char *retry_action_name(enum request_action action)
{
    static const char *const names[] = { [ACTION_IGNORE] = "ignore",
                                         [ACTION_REQUEUE] = "requeue",
                                         [ACTION_MOVE] = "move",
                                         [ACTION_FAIL] = "fail" };
    return names[action];
}

enum request_loss retry_loss_of(enum status st)
{
    switch (status_class_of(st)) {
    case CLASS_BUSY: return LOSS_BUSY;
    case CLASS_PEER: return LOSS_PEER;
    case CLASS_FATAL: return LOSS_NODE;
    case CLASS_REQUEST:
    case CLASS_OK: break;
    }
    /* A deadline that passed on a node (an unused credit, say) ends only the attempt; so does lack
     * of memory. */
    return st == ERR_TIMEOUT || st == ERR_NOMEM || st == ERR_CANCELED ? LOSS_PEER : LOSS_REQUEST;
}
