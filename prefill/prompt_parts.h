/* prompt_parts.h - the KV transfers of one prompt on all ranks of a prefill node: a part for each
 * pair of ranks that share heads (shared/kv/kv_parts.h). This process opens its own (kv_sender.h),
 * followers theirs (prefill_follow.h).
 *
 * Thread: loop. Owner: prefill_prompt. */
#ifndef BATON_PREFILL_PROMPT_PARTS_H
#define BATON_PREFILL_PROMPT_PARTS_H

#include "prefill/kv_sender.h"

/* This node's ranks above 0; borrowed from prefill_worker. */
struct prefill_ranks {
    struct cluster *cluster;
    uint64_t followers[KV_RANKS_MAX - 1];
    uint32_t n_followers;
};

struct prompt_parts {
    uint64_t id;                /* of the prompt */
    uint8_t from[KV_PARTS_MAX]; /* rank that sends each */
    uint32_t n;
    uint32_t open;            /* bit i: part i was opened or asked for, and has not ended */
    uint32_t opening;         /* bit r: rank r has not opened its transfers yet */
    struct kv_sends sends;    /* those of this process */
    uint64_t bytes;           /* of all parts that were sent */
    struct kvt_event slowest; /* SENT of the part that took longest */
};

/* The rank above 0 whose process this is; 0: none. */
uint32_t prefill_ranks_find(const struct prefill_ranks *ranks, uint64_t process);
void prompt_parts_init(struct prompt_parts *p, uint64_t id);
/* Reads who sends what to whom. Grants of this process go to `arena`. */
enum status prompt_parts_take(struct prompt_parts *p, const struct prefill_ranks *ranks,
                              struct kv_sender *sender, const Baton__Prefill *m,
                              struct arena *arena, struct err *err) MUST_CHECK;
/* Asks every follower that has parts to open them. After a failure those that were asked must be
 * told KV_CANCEL. */
enum status prompt_parts_ask(struct prompt_parts *p, const struct prefill_ranks *ranks,
                             const Baton__Prefill *m) MUST_CHECK;
/* Bits of the parts that a rank sends. */
uint32_t prompt_parts_of_rank(const struct prompt_parts *p, uint32_t rank);
/* Sends KV_FINISH or KV_CANCEL to every follower with an open part. */
void prompt_parts_tell(const struct prompt_parts *p, const struct prefill_ranks *ranks,
                       enum frame_type type);
/* Does this process send to that one? */
bool prompt_parts_go_to(const struct prompt_parts *p, uint64_t process);
/* A part ended; false: it was not open. */
bool prompt_parts_end(struct prompt_parts *p, const struct kvt_event *ev);

#endif
