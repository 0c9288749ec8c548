/* engine_state.h - the engine's private state, shared by the files of this folder only.
 *
 *   engine.c, engine_command.c  life cycle, public calls, the thread; what a command does
 *   batch.c           the batch of the next step: admission, growth, preemption
 *   engine_step.c     runs a step and chooses tokens
 *   engine_group.c    steps that other ranks take too
 *   engine_ranks.c    what the group's ranks compute, and for whom they wait
 *   engine_follow.c   steps of a node of several ranks, step_plan.c what its leader tells them
 *   engine_pace.c     lets a step last what a curve or a fault says (pace.h, engine_fault.h)
 *   tiers/            blocks that go to and come from memories behind the pool, and peers
 *   engine_end.c      ends sequences and gives their blocks back; draft/ has engine_draft.c
 *   engine_metrics.c  metrics, and load and speed (engine_speed.h) that other threads read
 *
 * Thread: engine, except `opt`, `layout`, `kv`, `limits` (fixed after engine_create, read by any
 * thread), `commands` (a mailbox), `is_called` and `load` (atomics). */
#ifndef BATON_ENGINE_ENGINE_STATE_H
#define BATON_ENGINE_ENGINE_STATE_H

#include <stdatomic.h>

#include "kernels/device.h"
#include "shared/base/mailbox.h"
#include "shared/base/map.h"
#include "shared/base/thread.h"
#include "shared/engine/batch.h"
#include "shared/engine/engine_speed.h"
#include "shared/engine/sampler_batch.h"
#include "shared/engine/seq.h"
#include "shared/engine/step_plan.h"

enum engine_command_kind {
    ENGINE_COMMAND_SUBMIT,
    ENGINE_COMMAND_RESERVE,
    ENGINE_COMMAND_ACTIVATE,
    ENGINE_COMMAND_CANCEL,
    ENGINE_COMMAND_FENCE,
    ENGINE_COMMAND_RELEASE,
    ENGINE_COMMAND_FETCHED,
    ENGINE_COMMAND_FETCH_HANGS,
    ENGINE_COMMAND_LEND,
    ENGINE_COMMAND_JOIN,
    ENGINE_COMMAND_NODE,
    ENGINE_COMMAND_WAKE
};

/* By value through the mailbox; the receiver owns what the pointers point at. */
struct engine_command {
    enum engine_command_kind kind;
    bool fenced; /* CANCEL */
    uint64_t id;
    uint32_t n_good;               /* FETCHED */
    struct seq *seq;               /* SUBMIT, RESERVE, LEND */
    struct token_logprobs *first;  /* ACTIVATE */
    float *hidden;                 /* ACTIVATE; NULL: none */
    struct ep *ep;                 /* JOIN; NULL: leave. NODE */
    struct model_experts *experts; /* JOIN; NULL: those of the share */
    uint64_t epoch;                /* JOIN */
};

/* Written by the engine thread (n_waiting and waiting_tokens also by submitting threads), read by
 * any thread. All accesses are relaxed: each figure stands alone and publishes no other memory. */
struct engine_load {
    _Atomic uint32_t n_running, n_waiting, n_reserved, n_blocks_free;
    _Atomic uint32_t prefill_per_s, step_us;
    _Atomic uint64_t n_progress, n_steps, waiting_tokens, sent, received;
    _Atomic bool stepping;
    const char *_Atomic backend; /* engine_stats.ep_backend, a constant */
    uint64_t n_waits;            /* ep_config.progress: by __atomic builtins */
};

struct engine_metrics {
    struct counter *steps, *ahead, *graph_steps, *host_sampled, *abandoned, *paced_late,
        *preemptions, *swaps, *prompt_tokens, *generated, *recomputed, *queried, *hit, *evicted;
    struct gauge *paced, *running, *loading, *waiting, *reserved, *free, *held, *cached,
        *quarantine, *prefill_per_s, *decode_step;
    struct histogram *step_seconds;
    struct counter *drafts, *draft_tokens, *accepted; /* NULL without a drafter */
    struct counter *passes, *graph_passes;            /* of the model's draft layer */
    struct counter *accepted_at[DRAFT_TOKENS_MAX];
    struct gauge *accepted_length;
    uint64_t last_queried, last_hit, last_evicted; /* pool totals at the last update */
};

/* A step from submission to completion, when its tokens are fetched. With sampling on the device
 * the next step is submitted before this one completes; otherwise a step completes at once. */
struct inflight_step {
    bool active;
    bool sampled;                 /* by the device */
    bool drafted;                 /* what makes drafts behind it was submitted, too */
    bool is_full;                 /* of prompt rows (engine_speed.h) */
    uint32_t n_choosers, n_taken; /* sequences that chose tokens, and these tokens */
    uint64_t begin_ns;
    uint64_t called_ns;    /* when it was built; waiting for other ranks follows */
    uint64_t n_recomputed; /* positions that a peer had written */
};

/* Blocks of a sequence that ended while the step ahead still writes to them. They are freed when
 * that step completes. */
struct deferred_blocks {
    int32_t *blocks; /* owned */
    uint32_t n;
};

#define ENGINE_EVERY_EPOCH UINT64_MAX
/* An engine knows of two groups at a time, this one and the next. */
enum { ENGINE_ABORTED_MAX = 8 };

/* What each rank says at the beginning of a step. */
struct engine_group_words {
    uint64_t epoch, step, n_rows;
    uint64_t n_passes;      /* of the draft layer that it wants behind the step; 0: it has none */
    uint64_t next_epoch;    /* of the group that it is ready to step in; this one's: no other */
    uint64_t rows;          /* that its experts computed since it said so last */
    uint32_t rank, wait_us; /* wait_us: in its exchanges, since then */
};

/* Sums of words since the start; written by the engine thread alone. */
struct engine_rank_sums {
    _Atomic uint64_t rows, wait_us, late_us;
};

struct engine_group {
    pthread_mutex_t lock;          /* of what other threads use: ep, epoch, aborted, rung.. */
    struct ep *ep;                 /* NULL: in no group */
    struct model_experts *experts; /* that ep places here; NULL: those of the share */
    uint64_t epoch;                /* of ep, or of the last one */
    uint64_t aborted[ENGINE_ABORTED_MAX]; /* epochs, by engine_abort_group, the last ones */
    uint32_t n_aborted;                   /* of all time */
    uint64_t step;                        /* the next */
    struct ep *next; /* to step in from next_epoch on; NULL with next_epoch > epoch: leaves */
    struct model_experts *next_experts;
    uint64_t next_epoch;
    bool asleep;                      /* nobody had rows at the last agreement */
    bool is_told;                     /* the others know of next_epoch */
    uint64_t rung_epoch, rung_step;   /* of the latest bell; epoch 0: none came */
    struct engine_group_words *words; /* [EP_RANKS_MAX] */
    struct engine_rank_sums *sums;    /* [EP_RANKS_MAX], by rank */
    struct ep_traffic counted;        /* of ep */
    uint64_t counted_rows;            /* of the model */
};

/* The ranks of a node, of whose model this one has a share. */
struct engine_node {
    pthread_mutex_t lock; /* of what other threads use: ep, aborted, rung */
    struct ep *ep;        /* NULL: not given yet */
    bool aborted;         /* by engine_abort_node or engine_stop */
    uint64_t rung;        /* step of the latest bell + 1 */
    uint64_t step;        /* of the next plan */
    bool asleep;          /* the next plan comes after a bell */
    bool is_eager;        /* its ranks have captured different steps */
    uint64_t called;      /* follower: rang for the plan of step called - 1 */
    uint64_t ready_epoch; /* the last group of which this rank said that it is in it, or was */
    uint64_t lost_epoch;  /* the last lost group of which the node's others were told */
    uint64_t held_epoch;  /* leader: a group that a follower was not in; a bell says when it is */
    struct err fault;     /* why the node is lost; code OK: it is not */
    uint64_t *plan;       /* [max_words / 2], 32-bit words */
    uint32_t max_words, first_words; /* first_words: of the next plan's first message */
};

/* Speculative decoding; drafter NULL: none. Arrays by the sequences of a step. */
struct engine_draft {
    struct draft_config config;
    struct drafter *drafter;
    struct draft_control control;
    struct draft_request *requests; /* [max_seqs] */
    struct draft_choice *choices;   /* [max_seqs] */
    struct draft_rate **rates;      /* [max_seqs] of the choices */
    struct seq **seqs;             /* [max_seqs] that choose a token, their lengths then, and the */
    uint32_t *n_tokens, *n_wanted; /* drafts wanted behind it */
    uint64_t observe_ns;           /* of the last step */
    uint32_t n_blocks_kept;        /* for who waits and could start when there were drafts last */
    uint64_t n_ahead;              /* times that a step might have been submitted early */
    bool has_told_lack;
    /* Of the next step: passes of the draft layer that it wants, 0 without one; once the step was
     * agreed on, those that some rank wants, and the most rows that a rank of the group routes. */
    uint32_t n_passes, group_rows;
    struct model_hidden_rows *hidden; /* [max_seqs] of a rank that follows */
};

struct engine {
    struct engine_options opt;
    struct device *device;               /* the model's kernels' */
    struct copy_stream *progress_stream; /* says when the device has computed a layer: the
                                          * progress of a step that this thread has only
                                          * handed over */
    struct kv_layout layout;
    struct dev_mem kv;
    struct seq_limits limits;

    struct mailbox *commands;
    _Atomic bool is_called; /* a WAKE is among them: bells take no room of other commands */
    pthread_t thread;
    bool joined;       /* by engine_stop */
    _Atomic bool stop; /* release by engine_free, acquire by the thread */

    struct kv_pool *pool;
    struct kv_store *store;        /* the memories behind it; NULL: none */
    struct kv_store_options tiers; /* with opt.tiers, which points at it */
    struct hash128 *tier_keys;     /* [n_blocks] of the load that is being planned */
    struct tier_rate peer_rate;    /* of fetches from peers */
    struct list left_fetches;      /* of engine_peers.c */
    struct sampler_batch *sampler;
    struct sampler_row *rows; /* [max_logits] */
    struct map seqs;          /* id → struct seq: every live sequence, whatever its state */
    struct list waiting;      /* first in, first out; preempted ones at the front */
    struct list loading;      /* holding blocks, some of which come from a tier; by arrival */
    struct list running;      /* holding blocks, computing */
    uint32_t n_loading, n_running, n_reserved;
    uint64_t last_order;
    struct batch batches[2]; /* [parity] */
    struct inflight_step inflight[2];
    int parity;              /* of the step being built or submitted last */
    uint64_t t_completed_ns; /* when the last step completed */
    uint64_t t_overtook_ns;  /* when a prompt that goes first came last; 0: none has */
    float *logits;           /* [max_logits, n_vocab]: for sampling on the host */
    float *lse;              /* [max_logits] */
    struct sample_request *sample_requests; /* [max_logits] */
    struct token_logprobs *fetched;         /* [max_logits]: tokens that the device chose */
    struct deferred_blocks *deferred_free;  /* [max_seqs] */
    uint32_t n_deferred_free;

    struct pace_curve pace;         /* with opt.pace, which points at it */
    struct engine_fault_plan fault; /* with opt.fault, likewise */
    uint64_t n_paced;               /* steps that these were asked about */

    struct engine_draft draft; /* with opt.draft */

    struct engine_group group; /* with opt.on_group */
    struct engine_node node;   /* with a share of the model */

    struct engine_load load;
    struct engine_speed speed;
    struct engine_metrics metrics;
};

static inline struct batch *engine_batch(struct engine *e) { return &e->batches[e->parity]; }
static inline bool engine_has_inflight(const struct engine *e)
{
    return e->inflight[0].active || e->inflight[1].active;
}

/* engine_command.c */
void engine_command_run(struct engine *e, const struct engine_command *c);
/* Frees an undelivered command's data. */
void engine_command_drop(struct engine *e, struct engine_command *c);

/* engine_step.c */
/* Computes one step. False: nothing can be computed until a command changes something. */
bool engine_step(struct engine *e);
/* Gives up the steps in flight, which a lost group has spoiled: it is as if they had not begun, and
 * their rows are computed again. Waits until the device has left them. */
void engine_abandon_steps(struct engine *e);
/* Appends output token lp->id, emits it, and ends the sequence after its last token: false, `s` is
 * invalid then. */
bool engine_take_token(struct engine *e, struct seq *s, const struct token_logprobs *lp);
/* Will the sequence end with token `id`, its last of n_tokens? */
bool engine_ends_with(const struct engine *e, const struct seq *s, int32_t id, uint32_t n_tokens);

/* draft/engine_draft.c */
enum status engine_draft_init(struct engine *e, struct err *err) MUST_CHECK;
void engine_draft_release(struct engine *e);
/* Decodes are chosen, and have their blocks: puts drafts behind the tokens of some, with blocks, as
 * long as the step has rows for them. */
void engine_draft_propose(struct engine *e);
/* May a running sequence get drafts in the next step, if that is built when its last token is
 * known? */
bool engine_draft_is_wanted(struct engine *e);
/* The step was submitted, and the device samples. Submits what drafts behind it, if the drafter can
 * do that without the step's tokens. */
bool engine_draft_submit(struct engine *e);
/* The batch was built: how many drafts are to be made behind its step by a drafter that
 * observes. */
void engine_draft_plan(struct engine *e);
/* The most rows that a rank routes in a pass behind the last step; 0: without a group. */
uint32_t engine_draft_pass_rows(const struct engine *e);
/* The step of `b` is complete; e->fetched has its tokens, which are taken next. False: the group,
 * or the node, was lost in a pass of the draft layer, which says nothing about the step; prompts
 * whose KV of that layer is missing have ended. */
bool engine_draft_observe(struct engine *e, struct batch *b);
/* How many of the n drafts behind the sequence's tokens are what was chosen in their places. */
uint32_t engine_draft_n_right(const struct seq *s, const struct token_logprobs *chosen, uint32_t n);
/* For a drafter that chooses: how many drafts of n sequences, which will have n_tokens[i] tokens,
 * are worth while; at most max_seqs. Returns the sum. */
uint32_t engine_draft_want(struct engine *e, struct seq *const *seqs, const uint32_t *n_tokens,
                           uint32_t n, uint32_t *n_wanted);
/* Has it a block for that position, or can get the next one without taking it from others? */
bool engine_draft_has_block(struct engine *e, struct seq *s, uint32_t pos);
/* A step has computed n drafts of the sequence, which it is right about n_accepted of. */
void engine_draft_count(struct engine *e, struct seq *s, uint32_t n, uint32_t n_accepted);
/* A step of these attention sequences lasted so long. */
void engine_draft_count_step(struct engine *e, const struct attn_seq *seqs, uint32_t n_seqs,
                             uint64_t ns);
/* A sequence came from a peer without a draft layer's KV. */
void engine_draft_tell_lack(struct engine *e);
/* The sequence ends. */
void engine_draft_end(struct engine *e, struct seq *s);

/* engine_group.c */
void engine_group_init(struct engine *e);
void engine_group_release(struct engine *e);
/* Leaves the group without its agreement. After the thread has ended. */
void engine_group_leave(struct engine *e);
static inline bool engine_is_grouped(const struct engine *e) { return e->opt.on_group != NULL; }
/* Agrees with the other ranks on the next step, in which this one has n_rows. True: all take it,
 * and the busiest rank routes *most rows. False: nobody has rows, or there is no group. */
bool engine_group_agree(struct engine *e, uint32_t n_rows, uint32_t *most);
/* An exchange failed: leaves the group. The steps in flight are abandoned. */
void engine_group_lose(struct engine *e, const struct err *why);
void engine_group_command(struct engine *e, const struct engine_command *c);
/* Wakes the engine if it sleeps. Any thread. */
void engine_wake(struct engine *e);

/* How the ranks of a group agree on a step. */
enum engine_agreement {
    ENGINE_AGREED_STEP,   /* all take it */
    ENGINE_AGREED_SLEEP,  /* nobody has rows */
    ENGINE_AGREED_CHANGE, /* another group has taken over */
    ENGINE_AGREED_NOTHING /* this rank is not in the group, or the group was lost */
};
/* The parts of engine_group_agree, for ranks of a node, which follow its leader in all of them. */
void engine_group_drop_aborted(struct engine *e);
/* Is there a group whose ranks should meet? */
bool engine_group_is_called(struct engine *e, uint32_t n_rows);
enum engine_agreement engine_group_meet(struct engine *e, uint32_t n_rows, uint32_t *most);
static inline bool engine_group_is_in(const struct engine *e, uint64_t epoch)
{
    return e->group.ep && e->group.epoch == epoch;
}
/* Is this rank in the group of `epoch`? If it was given it and has not lost the one before yet, it
 * does now. */
bool engine_group_enter(struct engine *e, uint64_t epoch);

/* engine_ranks.c */
/* What this rank says in its words of what it did since the last. */
void engine_ranks_say(struct engine *e, struct engine_group_words *mine);
/* All have said theirs. */
void engine_ranks_hear(struct engine *e);
/* The ep object is given up: what was not said counts here. */
void engine_ranks_end(struct engine *e);

/* engine_follow.c */
static inline bool engine_is_node(const struct engine *e)
{
    return e->opt.model->share.tp_size > 1;
}
/* Ranks make their passes of the draft layer in step: each learns of a lost one before the next. */
static inline bool engine_is_of_ranks(const struct engine *e)
{
    return engine_is_node(e) || engine_is_grouped(e);
}
void engine_node_init(struct engine *e);
void engine_node_release(struct engine *e);
/* Lets the node's object go. After the thread has ended. */
void engine_node_leave(struct engine *e);
void engine_node_command(struct engine *e, const struct engine_command *c);
/* Leader: plans the step of engine_batch(e) with the other ranks, and with the group's. As
 * engine_group_agree. */
bool engine_lead_step(struct engine *e, uint32_t *group_rows);
/* Leader: plans a pass of the draft layer with the other ranks, which compute it. False: the node
 * is lost. */
bool engine_lead_pass(struct engine *e, const struct model_draft *pass,
                      const struct step_plan_announced *announced, uint32_t n_announced);
/* Follower: takes part in the next step. False: nothing to do until it is rung. */
bool engine_follow_step(struct engine *e);
/* After the model's step of n_rows rows: have all ranks of the node come to its end? If one has
 * not, it is a fault of the model's exchanges. False: the node is lost. */
bool engine_node_settle(struct engine *e, uint32_t n_rows);

/* engine_pace.c */
/* Before anybody hears of a step that began at begin_ns (clock_ns) and was computed for these
 * attention sequences: waits as long as a curve and a fault plan say, if there is one. */
void engine_pace_step(struct engine *e, uint64_t begin_ns, const struct attn_seq *seqs,
                      uint32_t n_seqs);

/* engine_tiers.c */
enum status engine_tiers_create(struct engine *e, struct err *err) MUST_CHECK;
/* Takes what the tiers report; once per turn of the thread. */
void engine_tiers_run(struct engine *e);
/* How long the thread may sleep; -1: until it is woken. */
int engine_tiers_wait_ms(const struct engine *e);
/* Do the tiers bring the next cacheable blocks of the waiting sequence for another one now? Then it
 * will find them in the pool. */
bool engine_tiers_are_bringing(struct engine *e, struct seq *s);
/* Begins to load blocks of a sequence that has just taken its blocks. False: it has what there is,
 * or computing is sooner. */
bool engine_load(struct engine *e, struct seq *s);
/* What the tiers have of these blocks, for a peer. Returns plan->n; 0 without tiers. */
uint32_t engine_plan_lent(struct engine *e, const struct hash128 *keys, uint32_t n,
                          struct kv_store_plan *out);
/* Ends the load of a sequence, if it has one. Nobody writes to its blocks any more. */
void engine_stop_load(struct engine *e, struct seq *s);
/* Keeps in host memory what the prefix cache and the tiers might lose of a sequence that is about
 * to be preempted, if that is sooner than computing it again. */
void engine_swap_out(struct engine *e, struct seq *s);
/* It ends: what was kept of it is not needed. */
void engine_drop_swap(struct engine *e, struct seq *s);
/* Publishes the sequence's full blocks of its first n_complete tokens, and offers them to the
 * tiers. */
void engine_publish(struct engine *e, struct seq *s, uint32_t n_complete);
/* Waits shortly for blocks that are held only to be copied to a tier. True: some came back. */
bool engine_settle_copies(struct engine *e);

/* Seconds in which a block of a prompt is computed; 0: not measured yet. */
double engine_block_seconds(const struct engine *e);

/* Where the sequence's cached tokens came from, for its trace. */
void engine_note_load(const struct engine *e, struct seq *s, const struct kv_load *l);

/* engine_stream.c */
/* May the sequence's blocks come layer by layer? */
bool engine_may_stream(const struct engine *e, const struct seq *s);
/* May a sequence that loads start now, since the rest comes in time? Then its blocks count as
 * computed. */
bool engine_stream(struct engine *e, struct seq *s);
/* Its load is over. */
void engine_end_stream_load(struct engine *e, struct seq *s);
/* Before the attention of a layer: waits for what the step's sequences read of it. */
void engine_await_layer(struct engine *e, uint32_t layer);
/* The step was submitted: takes those whose layers did not come out of it. */
void engine_end_streams(struct engine *e);

/* engine_peers.c */
void engine_peers_init(struct engine *e);
void engine_peers_release(struct engine *e);
/* Fetches blocks from the sequence's peer, those after the first n_before that caches have or
 * bring, if it has more and that is sooner than computing them. *load_s, *compute_s: what both
 * would take are added. True: it waits for them. */
bool engine_fetch(struct engine *e, struct seq *s, uint32_t n_before, double *load_s,
                  double *compute_s);
void engine_end_fetch(struct engine *e, uint64_t id, uint32_t n_good);
/* Its peer hangs: it takes other blocks, if there are any, and starts. */
void engine_go_on_without_fetch(struct engine *e, uint64_t id);
/* It is canceled while its fetch runs: the blocks that a peer may write to go to quarantine. */
void engine_leave_fetch(struct engine *e, struct seq *s);
/* Its loads are over, and it starts: what the peer brought counts as computed. */
void engine_use_fetched(struct engine *e, struct seq *s);
void engine_begin_lend(struct engine *e, struct seq *s);
/* Its load is over, or it needs none. */
void engine_lent(struct engine *e, struct seq *s);

/* engine_end.c */
/* Gives back the blocks, emits FINISHED and forgets the sequence. A prefill_only sequence keeps its
 * blocks and its entry until it is released. */
void engine_finish(struct engine *e, struct seq *s, enum status status, enum finish_reason why,
                   int32_t stop_token);
/* Ends a sequence that has not started if it has too little of its tokens, even with n_coming more,
 * to be computed here (engine_request.most_computed). True: `s` is invalid then. */
bool engine_end_lacking(struct engine *e, struct seq *s, uint32_t n_coming);
/* Removes the sequence, in any state, from its list and count. It keeps its blocks. */
void engine_unlist(struct engine *e, struct seq *s);
/* Unlists it, drops its blocks, forgets and frees it. */
void engine_forget(struct engine *e, struct seq *s);
/* Frees the blocks deferred to the step that has just completed. */
void engine_free_deferred(struct engine *e);
void engine_emit(struct engine *e, const struct engine_event *ev);

/* engine_metrics.c */
void engine_metrics_init(struct engine_metrics *m, struct metrics *registry, bool has_drafts);
/* Copies the counts of the lists and the pool to `load` and the gauges. */
void engine_update_metrics(struct engine *e);
/* Counts a step of these attention sequences in the engine's speed, and tells it. */
void engine_count_speed(struct engine *e, const struct attn_seq *seqs, uint32_t n_seqs,
                        const struct inflight_step *f, uint64_t ns);
/* Sets the number of prompt tokens of this sequence that are still to be computed. */
void engine_set_remaining(struct engine *e, struct seq *s, uint32_t n);

#endif
