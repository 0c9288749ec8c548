/* prefix_request.h - what an entry node asks the directory about the beginning of a request's
 * prompt, and what it makes of the answers: the directory's, which nodes should have how much of
 * it, and the nodes', how much they had.
 *
 * A node that had less than it should have is told to the directory with a next placement
 * (prefix_drop). A decode node that was to compute a short rest for a prefill node, and would have
 * to compute more, hands the request back: that is tried once. Owner: the entry. Thread: loop. */
#ifndef BATON_SCHEDULER_PREFIX_PREFIX_REQUEST_H
#define BATON_SCHEDULER_PREFIX_PREFIX_REQUEST_H

#include "scheduler/place/place.h"
#include "scheduler/prefix/prefix_ladder.h"
#include "shared/base/metrics.h"

struct entry;
struct request;

/* Of an entry node. */
struct prefix_entry {
    struct prefix_drop drops[PREFIX_DROPS_MAX]; /* [n_drops] not told yet */
    uint32_t n_drops;
    struct counter *asked_tokens, *expected_tokens, *cached_tokens, *by_load, *by_prefix, *missed,
        *handed_back;
};

/* Of a request. */
struct prefix_state {
    struct prefix_ladder *ladder;    /* NULL: not made yet */
    struct prefix_expected expected; /* for the present attempt */
    uint32_t most_computed;          /* likewise: of RUN (node.proto) */
    bool was_lacking;                /* its node hands it back for that */
};

/* Where a query lies. */
struct prefix_room {
    struct place_uses uses;
    struct prefix_rung rungs[PREFIX_RUNGS_MAX];
    struct prefix_drop drops[PREFIX_DROPS_MAX];
    struct prefix_query query;
};

void prefix_entry_register(struct prefix_entry *p, struct metrics *m);
/* Fills in the query of a placement with this choice, whose room->uses are made, and returns it.
 * NULL: there is nothing to ask. */
const struct prefix_query *prefix_request_ask(struct entry *e, struct request *r,
                                              const struct place_result *chosen,
                                              struct prefix_room *room);
/* The directory's answer to it; `is_choice`: the nodes are those of the entry node. */
void prefix_request_answered(struct entry *e, struct request *r, const struct prefix_placed *on,
                             bool is_choice);
/* A node of the attempt tells how much of the prompt it had: the one that computes it, or that
 * takes its KV. */
void prefix_request_computed(struct entry *e, struct request *r, uint32_t n_cached);
void prefix_request_granted(struct entry *e, struct request *r, uint32_t n_cached);
/* Its node hands it back, since it has only n_cached tokens of the prompt and would compute more
 * than it may. */
void prefix_request_lacked(struct entry *e, struct request *r, uint32_t n_cached);
/* The node that should have more of the prompt than the one that computes it, and how much; NULL:
 * none is known, or it has gone. Whoever computes could fetch it from there. Valid until the view
 * changes. */
const struct node_record *prefix_request_keeper(const struct entry *e, const struct request *r,
                                                uint32_t *n_tokens);
void prefix_request_release(struct prefix_state *s);

#endif
