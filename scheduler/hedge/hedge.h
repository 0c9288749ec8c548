/* hedge.h - a second attempt beside the first, where a client asked for one (x-baton-hedge-ms).
 *
 *   submit ──▶ first alone ── no token so long after it was placed, room elsewhere ──▶ both
 *   both ── a first token, or the other one lost something ──▶ one goes on, the other is ended
 *
 * The second is a request of its own number on other nodes; since an answer is a function of its
 * body and its name, both give the same tokens (on GPUs with --deterministic). Invariants: 1. The
 * client hears of one: tokens and the end come from the winner, prompt logprobs once from whoever
 * has the next. 2. While both run the second never waits for a node, moves, or counts as a request.
 * 3. There is one second at most. 4. From the moment when one has won it follows request.h alone.
 * Life cycle: from hedge_create until both requests have ended; e->hedges has it by the number that
 * its client knows until the client is told the end. Owner: the scheduler. Thread: loop. */
#ifndef BATON_SCHEDULER_HEDGE_HEDGE_H
#define BATON_SCHEDULER_HEDGE_HEDGE_H

#include "scheduler/retry.h"
#include "shared/base/status.h"

struct entry;
struct request;

/* `r` has just been created: it gets a second attempt when it is due. */
void hedge_create(struct entry *e, struct request *r);
/* Does `r` run beside the request that its client knows? */
bool hedge_is_second(const struct request *r);
/* Starts the second when it is due. True: `r` is a second that is to be left alone, or is gone. */
bool hedge_advance(struct entry *e, struct request *r);
/* The directory has counted the placement of `r`, or is away: its attempt begins. */
void hedge_on_placed(struct entry *e, struct request *r);
/* Before the first token of `r` is delivered: it goes on alone. */
void hedge_on_token(struct entry *e, struct request *r);
/* True: the other one goes on instead, and `r` is gone. */
bool hedge_on_loss(struct entry *e, struct request *r, enum request_loss loss, const char *why);
/* Does nobody hear of this end of `r`? */
bool hedge_hides_end(const struct request *r, enum status st);
/* The client needs no more; `id`: the number that it knows. False: there is no such hedge. */
bool hedge_cancel(struct entry *e, uint64_t id);

#endif
