/* experts.h - the routed experts that a rank holds, which may change while it runs.
 *
 * Ranks of a group survive the loss of one by taking over its experts. A set has the weights of one
 * group's placement, a rank's part of it: of every sparse layer and slot. Sets share weights: each
 * (sparse layer, expert) is in memory once, as long as a set has it. What model_load packed is in
 * the first of them, the share's own set (model_set_ep without a set); with other ranks
 * (share.ep_size above 1) its weights that no set has are freed when a set is dropped for the first
 * time, so that memory follows the placement.
 *
 *     model_experts_take(m, .., &next)      any thread; the engine steps with `now`
 *     model_set_ep(m, ep, next)             engine thread, between steps
 *     model_experts_drop(m, now)            any thread
 *
 * All sets are dropped before model_free.
 * Thread: as each function says; a model's sets may be taken and dropped while it steps. */
#ifndef BATON_MODEL_EXPERTS_H
#define BATON_MODEL_EXPERTS_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"

struct model;
struct model_experts;

/* Which experts: logical [n_maps, n_local], for a slot its expert, in all sparse layers alike
 * (n_maps 1) or for each of them. A set may have an expert twice. */
struct experts_wanted {
    const int32_t *logical;
    int32_t n_maps, n_local;
    bool (*go_on)(void *arg, double done); /* false: the caller does not need them any more; NULL */
    void *go_on_arg;
};

/* Makes the set. What the model does not hold is read from the checkpoint and packed as model_load
 * does, on the calling thread: this can take long. One call at a time, not on the engine thread.
 * ERR_NOMEM: says how much is missing; ERR_INVALID: no such experts; ERR_UNSUPPORTED: the model was
 * loaded without other ranks; ERR_CANCELED: go_on. After an error all is as it was, but that with
 * too little memory nothing of a set that was dropped stays. */
enum status model_experts_take(struct model *m, const struct experts_wanted *w,
                               struct model_experts **out, struct err *err) MUST_CHECK;
/* Frees the set and the experts that no other has; those of the only one stay until another was
 * taken, since a rank whose group is lost will have most of them again. Not while it is the set of
 * the next steps (model_set_ep). NULL is accepted. */
void model_experts_drop(struct model *m, struct model_experts *x);

#endif
