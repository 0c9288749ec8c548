/* retry.h - the recovery table: what the request does about a loss, by its state and by what was
 * lost.
 *
 * A pure function (state, loss) -> action, used only by the request's state machine (request.c),
 * and docs/recovery.md, which is written from it (recovery_page.c). Thread: any. */
#ifndef BATON_SCHEDULER_RETRY_H
#define BATON_SCHEDULER_RETRY_H

#include "shared/base/status.h"
#include "shared/cluster/answer.h"

enum request_state {
    REQUEST_PLACING, /* no node is chosen yet, or all are full */
    REQUEST_CREDIT,  /* placed; the prefill node's start credit is awaited; no node holds memory */
    REQUEST_RESERVE, /* the decode node is asked for blocks */
    REQUEST_PREFILL, /* blocks granted; the prefill node computes and pushes */
    REQUEST_DECODE,  /* tokens flow from the decode node; the prefill node is done */
    REQUEST_RUN,     /* one node does both */
    REQUEST_ATTACH,  /* its client comes back: a node may have kept the answer (request_attach.h) */
    REQUEST_ENDED,
    REQUEST_N_STATES
};

enum request_loss {
    LOSS_PREFILL_NODE, /* link lost: process dead, frozen or unreachable */
    LOSS_DECODE_NODE,
    LOSS_BUSY,        /* a node refused: no capacity */
    LOSS_PEER,        /* a node reports trouble with another node or a transfer (class PEER) */
    LOSS_REQUEST,     /* a node reports that the request itself is at fault (class REQUEST) */
    LOSS_NODE,        /* a node reports that it cannot serve at all (class FATAL) */
    LOSS_STUCK,       /* no answer within the time limit of the state, if it has one */
    LOSS_PAIR,        /* both nodes live, but cannot exchange KV or messages with each other */
    LOSS_HANDED_BACK, /* a node shuts down, changes its role, or has no blocks or not the KV that it
                       * was chosen for, and gives it back */
    LOSS_DIRECTORY,   /* the directory cannot be reached, when the request needs it */
    REQUEST_N_LOSSES
};

enum request_action {
    ACTION_IGNORE,  /* this state does not depend on what was lost */
    ACTION_REQUEUE, /* place again after a short pause; does not count as a move */
    ACTION_MOVE,    /* new attempt elsewhere, from the last delivered token */
    ACTION_COMPUTE, /* no node has kept the answer: place it as a new request */
    ACTION_FAIL,    /* end the request with the error */
    ACTION_END,     /* end it well: the answer was complete. Not in the table */
    ACTION_N
};

enum {
    REQUEST_MOVES_MAX = 8,
    REQUEST_SPLITS_MAX = 4 /* after so many moves attempts are not split any more: the decode node
                            * computes the prompt itself, without a transfer */
};

const char *request_state_name(enum request_state s);
const char *request_loss_name(enum request_loss loss); /* "handed_back": a label of metrics */
enum request_action retry_action(enum request_state state, enum request_loss loss);
const char *retry_action_name(enum request_action action); /* for logs and metrics */
/* Why a cell is as it is; NULL: its state and loss say it. */
const char *retry_reason(enum request_state state, enum request_loss loss);
/* Maps what a FAILED message says to a loss. A number of blame that is not known is as if nothing
 * were said. */
enum request_loss retry_loss_of(enum status st, uint32_t blame);

#endif
