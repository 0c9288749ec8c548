/* retry.h - the one recovery table: what a loss means for a request, by its state and by what was
 * lost.
 *
 * Pure: (state, event) -> action. The request's state machine (request.c) asks here and nowhere
 * else. Thread: any. */
#ifndef BATON_SCHEDULER_RETRY_H
#define BATON_SCHEDULER_RETRY_H

#include "shared/base/status.h"

enum request_state {
    REQUEST_PLACING, /* no node chosen yet: choosing, or waiting for one with room */
    REQUEST_CREDIT,  /* placed; the prefill node's start credit is awaited; nothing is held
                      * anywhere */
    REQUEST_RESERVE, /* the decode node is asked for blocks */
    REQUEST_PREFILL, /* blocks granted; the prefill node computes and pushes */
    REQUEST_DECODE,  /* tokens flow from the decode node; the prefill node is not needed any
                      * more */
    REQUEST_RUN,     /* one node does all of it */
    REQUEST_ENDED,
    REQUEST_N_STATES
};

enum request_loss {
    LOSS_PREFILL_NODE, /* link lost: process dead, frozen or unreachable */
    LOSS_DECODE_NODE,
    LOSS_BUSY,    /* a node refused for want of room */
    LOSS_PEER,    /* a node reports trouble with another node or a transfer (class PEER) */
    LOSS_REQUEST, /* a node finds the request itself at fault (class REQUEST) */
    LOSS_NODE,    /* a node reports that it cannot serve at all (class FATAL) */
    LOSS_STUCK,   /* the attempt made no progress for its limit */
    REQUEST_N_LOSSES
};

enum request_action {
    ACTION_IGNORE,  /* not about anything this state depends on */
    ACTION_REQUEUE, /* place again after a short pause; does not count as a move */
    ACTION_MOVE,    /* new attempt elsewhere, from the last delivered token */
    ACTION_FAIL     /* tell the client */
};

enum {
    REQUEST_MOVES_MAX = 8,
    REQUEST_SPLITS_MAX = 4 /* attempts that may be split: the ones after them need no transfer, the
                            * decode node computes the prompt itself */
};

const char *request_state_name(enum request_state s);
enum request_action retry_action(enum request_state state, enum request_loss loss);
const char *retry_action_name(enum request_action action); /* for logs */
/* The loss that a FAILED message with this status stands for. */
enum request_loss retry_loss_of(enum status st);

#endif
