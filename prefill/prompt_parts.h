/* prompt_parts.h - the KV transfers of one prompt, or of blocks that are lent (kv_lend.h), on all
 * ranks of the sending node: a part for each pair of ranks that share heads (shared/kv/kv_parts.h).
 * This process opens its own (kv_sender.h), followers theirs (prefill_follow.h).
 *
 * Thread: loop. Owner: prefill_prompt or kv_lend. */
#ifndef BATON_PREFILL_PROMPT_PARTS_H
#define BATON_PREFILL_PROMPT_PARTS_H

#include "prefill/kv_sender.h"

/* This node's ranks above 0; borrowed from prefill_worker. */
struct prefill_ranks {
    struct cluster *cluster;
    uint64_t followers[KV_RANKS_MAX - 1];
    uint32_t n_followers;
};

/* Who sends what to whom, as a message says it. Borrowed for the call. */
struct prompt_parts_asked {
    Baton__NodeAddress **to; /* [n_to] the receiving node's ranks, by rank */
    size_t n_to;
    Baton__KvPart **parts; /* [n_parts] */
    size_t n_parts;
    /* [n_blocks] complete on all ranks, which followers send at once; none: a prompt's layers,
     * which their engines announce. */
    const int32_t *blocks;
    uint32_t n_blocks;
};

struct prompt_parts {
    uint64_t id;                /* of the prompt */
    uint8_t from[KV_PARTS_MAX]; /* rank that sends each */
    uint32_t n;
    uint32_t open;            /* bit i: part i was opened or asked for, and has not ended */
    uint32_t opening;         /* bit r: rank r has not opened its transfers yet, and will say so */
    struct kv_sends sends;    /* those of this process */
    uint64_t bytes;           /* of all parts that were sent */
    struct kvt_event slowest; /* SENT of the part that took longest */
};

/* The rank above 0 whose process this is; 0: none. */
uint32_t prefill_ranks_find(const struct prefill_ranks *ranks, uint64_t process);
void prompt_parts_init(struct prompt_parts *p, uint64_t id);
/* Reads who sends what to whom. Grants of this process go to `arena`. */
enum status prompt_parts_take(struct prompt_parts *p, const struct prefill_ranks *ranks,
                              struct kv_sender *sender, const struct prompt_parts_asked *a,
                              struct arena *arena, struct err *err) MUST_CHECK;
/* There is one: from this process, the only one of its node, to that one, which is linked. */
void prompt_parts_take_one(struct prompt_parts *p, uint64_t process, ProtobufCBinaryData grant,
                           struct arena *arena);
/* Asks every follower that has parts to open them. After a failure those that were asked must be
 * told KV_CANCEL. */
enum status prompt_parts_ask(struct prompt_parts *p, const struct prefill_ranks *ranks,
                             const struct prompt_parts_asked *a) MUST_CHECK;
/* Bits of the parts that a rank sends. */
uint32_t prompt_parts_of_rank(const struct prompt_parts *p, uint32_t rank);
/* Sends KV_FINISH or KV_CANCEL to every follower with an open part. */
void prompt_parts_tell(const struct prompt_parts *p, const struct prefill_ranks *ranks,
                       enum frame_type type);
/* Does this process send to that one? */
bool prompt_parts_go_to(const struct prompt_parts *p, uint64_t process);
/* This process's transfers are open, or cannot all be opened. */
void prompt_parts_opened(struct prompt_parts *p);
/* A part ended; false: it was not open. */
bool prompt_parts_end(struct prompt_parts *p, const struct kvt_event *ev);
/* A follower is lost: it reads nothing any more. False: none of its parts was open. */
bool prompt_parts_on_lost(struct prompt_parts *p, uint32_t rank);

#endif
