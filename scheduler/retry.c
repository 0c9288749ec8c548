/* retry.c - the recovery table (retry.h). One row per state, one column per loss.
 * Thread: any (constant tables). */
#include "scheduler/retry.h"

#include <stddef.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"

#define I ACTION_IGNORE
#define Q ACTION_REQUEUE
#define M ACTION_MOVE
#define F ACTION_FAIL
#define C ACTION_COMPUTE

/* clang-format off */
static const enum request_action TABLE[REQUEST_N_STATES][REQUEST_N_LOSSES] = {
    /*         prefill node  decode node  busy  peer  request  node  stuck  pair  back  directory */
    [REQUEST_PLACING] = { I, I,           I,    I,    I,       I,    I,     I,    I,    I },
    [REQUEST_CREDIT]  = { M, M,           Q,    M,    F,       M,    I,     M,    Q,    I },
    [REQUEST_RESERVE] = { M, M,           Q,    M,    F,       M,    M,     M,    Q,    I },
    [REQUEST_PREFILL] = { M, M,           Q,    M,    F,       M,    I,     M,    Q,    I },
    [REQUEST_DECODE]  = { I, M,           M,    M,    F,       M,    I,     M,    Q,    I },
    [REQUEST_RUN]     = { I, M,           Q,    M,    F,       M,    I,     I,    Q,    I },
    [REQUEST_ATTACH]  = { I, C,           I,    I,    I,       I,    C,     I,    I,    I },
    [REQUEST_ENDED]   = { I, I,           I,    I,    I,       I,    I,     I,    I,    I },
};
/* clang-format on */

#undef I
#undef Q
#undef M
#undef F
#undef C

/* request_attach.c knows two losses only: FAILED of the last node asked is as if its link was lost,
 * whatever it says; nobody is blamed. */
static const char IN_ATTACH[] =
    "it is not told: whatever a node says of a sequence that it does not have, it counts as lost";

/* Of the cells that their state and loss do not explain; a state of REQUEST_N_STATES: of every
 * state that has a node. */
static const struct {
    enum request_state state;
    enum request_loss loss;
    const char *text;
} REASONS[] = {
    { REQUEST_PLACING, LOSS_REQUEST,
      "it has no node that could say so; its own faults are found before" },
    { REQUEST_PLACING, LOSS_DIRECTORY,
      "it goes ahead with the nodes seen last, uncounted: reservations are soft state" },
    { REQUEST_N_STATES, LOSS_DIRECTORY,
      "nodes and links are there; the reservation ends by itself" },
    { REQUEST_N_STATES, LOSS_BUSY,
      "a full node is no fault, so it costs no move; all being full is bounded by "
      "--max-queue-time. A pair that is still connecting is as if full, and avoided next" },
    { REQUEST_N_STATES, LOSS_HANDED_BACK,
      "no fault of the node, so it costs no move; what was delivered stays, and the next attempt "
      "avoids the node while others have room; when it lacked KV only, it may have it again" },
    { REQUEST_N_STATES, LOSS_PAIR,
      "the next attempt avoids the pair, and may use either node with another" },
    { REQUEST_CREDIT, LOSS_STUCK, "it has no limit but the request's own: the line moves" },
    { REQUEST_RESERVE, LOSS_STUCK, "the answer is one round trip and one step of the engine" },
    { REQUEST_PREFILL, LOSS_STUCK,
      "it has no limit: progress is watched where the work is, by engine, transfer and link" },
    { REQUEST_DECODE, LOSS_STUCK, "as in prefill" },
    { REQUEST_RUN, LOSS_STUCK, "as in prefill" },
    { REQUEST_DECODE, LOSS_PREFILL_NODE, "its KV has arrived: the prefill node is done" },
    { REQUEST_DECODE, LOSS_BUSY,
      "a refusal in mid-answer: the decode node has dropped the sequence, so its KV is lost" },
    { REQUEST_DECODE, LOSS_PAIR,
      "only the decode node is listened to by now, and it has dropped the sequence" },
    { REQUEST_RUN, LOSS_PREFILL_NODE, "one node does both" },
    { REQUEST_RUN, LOSS_PAIR,
      "there is none: whatever its node says of a pair is that node's own trouble" },
    { REQUEST_ATTACH, LOSS_PREFILL_NODE, "none is asked: a kept answer is past its prompt" },
    { REQUEST_ATTACH, LOSS_BUSY, IN_ATTACH },
    { REQUEST_ATTACH, LOSS_PEER, IN_ATTACH },
    { REQUEST_ATTACH, LOSS_REQUEST, IN_ATTACH },
    { REQUEST_ATTACH, LOSS_NODE, IN_ATTACH },
    { REQUEST_ATTACH, LOSS_STUCK, "asking must not make a request late that nobody has" },
    { REQUEST_ATTACH, LOSS_PAIR, IN_ATTACH },
    { REQUEST_ATTACH, LOSS_HANDED_BACK, IN_ATTACH },
    { REQUEST_ATTACH, LOSS_DIRECTORY, "it needs the view and links only; placing goes ahead" },
};

const char *request_state_name(enum request_state s)
{
    static const char *const names[REQUEST_N_STATES] = { "placing", "credit", "reserve", "prefill",
                                                         "decode",  "run",    "attach",  "ended" };
    ASSERT(s < REQUEST_N_STATES);
    return names[s];
}

const char *request_loss_name(enum request_loss loss)
{
    static const char *const names[REQUEST_N_LOSSES] = {
        "prefill_node", "decode_node", "busy", "peer",        "request",
        "node",         "stuck",       "pair", "handed_back", "directory",
    };
    ASSERT(loss < REQUEST_N_LOSSES);
    return names[loss];
}

enum request_action retry_action(enum request_state state, enum request_loss loss)
{
    ASSERT(state < REQUEST_N_STATES);
    ASSERT(loss < REQUEST_N_LOSSES);
    return TABLE[state][loss];
}

const char *retry_action_name(enum request_action action)
{
    static const char *const names[ACTION_N] = {
        "ignore", "requeue", "move", "compute", "fail", "end",
    };
    ASSERT(action < ACTION_N);
    return names[action];
}

const char *retry_reason(enum request_state state, enum request_loss loss)
{
    const char *of_all = NULL;
    for (size_t i = 0; i < COUNT_OF(REASONS); i++) {
        if (REASONS[i].loss != loss) continue;
        if (REASONS[i].state == state) return REASONS[i].text;
        if (REASONS[i].state == REQUEST_N_STATES) of_all = REASONS[i].text;
    }
    return state == REQUEST_PLACING || state == REQUEST_ENDED ? NULL : of_all;
}

static enum request_loss loss_of_status(enum status st)
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

enum request_loss retry_loss_of(enum status st, uint32_t blame)
{
    enum request_loss loss = loss_of_status(st);
    if (loss == LOSS_REQUEST) return loss; /* whoever is blamed: no other node can serve it */
    if (blame == BLAME_HANDED_BACK) return LOSS_HANDED_BACK;
    return blame == BLAME_PAIR && loss != LOSS_BUSY ? LOSS_PAIR : loss;
}
