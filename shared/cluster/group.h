/* group.h - the ranks that share the experts of one model, or one attention: how they find each
 * other, go on without one that is lost, and take it back.
 *
 *     LOOKING ─ link to the leader ─▶ WAITING ─ a group is proposed ─▶ PREPARING ─▶ TOGETHER
 *        ◀──── the leader is lost ────────┴◀────── a rank of the group is lost ────────┘
 *
 * Ranks first meet at rank 0, which leads: it knows who is there and proposes the group of the next
 * epoch, the first with all ranks, later ones with those that are left. Each rank makes its ep
 * object on a worker, whose exchange and bells (engine.h) pass through the leader, and hands it to
 * its engine; the group before goes on stepping until all have it. When the leader is lost, the
 * lowest rank left leads; two leaders that meet become one. docs/parallelism.md tells what each
 * loss means. Life cycle: create, group_ready, maybe group_leave, free.
 * Thread: loop, except group_exchange, group_reach and group_prepares. Owner: the node. */
#ifndef BATON_CLUSTER_GROUP_H
#define BATON_CLUSTER_GROUP_H

#include "shared/base/metrics.h"
#include "shared/cluster/cluster.h"

enum {
    GROUP_RANKS_MAX = 256,
    GROUP_TERMS_MAX = 256,
    GROUP_HOST_MAX = 64,
    GROUP_WHY_MAX = 2 * GROUP_TERMS_MAX + 160 /* of a sentence with the terms of two ranks */
};

/* A process may be in one of each kind. A node has all of its ranks or none: without one it is
 * lost, and no epoch follows its first. */
enum group_kind { GROUP_OF_EXPERTS, GROUP_OF_NODE };

enum group_state { GROUP_LOOKING, GROUP_WAITING, GROUP_PREPARING, GROUP_TOGETHER };

/* Why there is a next group. */
enum group_reason {
    GROUP_START,     /* the first */
    GROUP_LOSS,      /* a rank was lost, or a step failed */
    GROUP_RETURN,    /* a rank has come, or come back */
    GROUP_DRAIN,     /* a rank has left in order */
    GROUP_REBALANCE, /* group_renew */
    GROUP_REASONS
};

struct group_member {
    uint32_t rank;
    uint64_t node; /* incarnation; 0: not there */
    char host[GROUP_HOST_MAX];
    uint16_t port; /* where its cluster listens; 0: not known */
};

/* The members of one epoch, ascending by rank: member i has number i in the ep object. */
struct group_roster {
    uint64_t epoch; /* 0: none yet */
    enum group_reason reason;
    uint32_t n;
    struct group_member *members; /* [n] */
    struct buf placement;         /* group_options.place wrote it */
    uint32_t n_failures;          /* epochs before it that could not be made */
};

void group_roster_clear(struct group_roster *r);
void group_roster_copy(struct group_roster *to, const struct group_roster *from);
/* The number of the member of this rank; -1: it is none. */
int32_t group_roster_find(const struct group_roster *r, uint32_t rank);

struct group;

struct group_options {
    enum group_kind kind;
    struct loop *loop;
    struct cluster *cluster;
    struct metrics *metrics;
    uint64_t node; /* this process's incarnation id */
    uint32_t rank, size;
    uint32_t node_size;    /* ranks next to each other that can only be in it together; 1 when 0 */
    const char *host;      /* where other ranks reach this one's cluster port */
    const char *meet_host; /* where rank 0 listens; ranks above 0 connect there */
    uint16_t meet_port;
    /* For sentences: the option that starts a rank, or the node of node_size ranks that it is of;
     * NULL: none is named, nor for the ranks that this one's parent starts: n_own from own_first
     * on. */
    const char *rank_option;
    uint32_t own_first, n_own;
    uint32_t retry_ms; /* between tries to connect, and after a failed epoch; 200 when 0 */
    uint32_t grace_ms; /* how long a new leader waits for ranks of the last group; 1,000 when 0 */
    /* Of the rank that leads: says which experts the members of `next` get, whose placement it
     * appends to. `before` is the last group, whose ranks have experts already; epoch 0: none.
     * NULL: there is nothing to place. */
    void (*place)(void *arg, struct group_roster *next, const struct group_roster *before);
    /* A group with this rank as member `me` was proposed, valid until on_prepare comes again: the
     * owner makes an ep object with group_exchange on another thread, then calls group_prepared,
     * and group_joined once its engine has met the others. */
    void (*on_prepare)(void *arg, const struct group_roster *next, uint32_t me);
    /* A group without this rank comes: its engine leaves the group with the others, then the owner
     * calls group_has_left. */
    void (*on_leave)(void *arg, uint64_t epoch);
    /* The group of this epoch is no more, be it prepared, handed to the engine or joined: its
     * engine gives it up, and group_report_lost follows if it was handed over. */
    void (*on_lost)(void *arg, uint64_t epoch, const char *why);
    void (*on_bell)(void *arg, uint64_t epoch, uint64_t step);
    /* Of the rank that leads: what a rank gave group_report_load. May be NULL. */
    void (*on_load)(void *arg, uint32_t rank, struct str load);
    /* After group_leave: no group has this rank any more. */
    void (*on_left)(void *arg);
    void *arg;
};

struct group *group_create(const struct group_options *o);
void group_free(struct group *g);
/* This rank can step. `terms` say what all ranks must have alike, for people: model, precision,
 * sizes; a rank with others is refused, which both sides log. */
void group_ready(struct group *g, const char *terms);
/* The ep object of this epoch was given to the engine (OK), or could not be made. */
void group_prepared(struct group *g, uint64_t epoch, enum status st, const char *why);
/* The engine has met all ranks of this epoch, and given up the group before. */
void group_joined(struct group *g, uint64_t epoch);
/* The engine is in no group since this epoch. */
void group_has_left(struct group *g, uint64_t epoch);
/* An exchange of this epoch failed in this rank's engine, or the engine gave its object up: it has
 * none of this epoch any more. */
void group_report_lost(struct group *g, uint64_t epoch, const char *why);
/* This rank begins a step after all slept: the bell goes to all others. */
void group_ring(struct group *g, uint64_t epoch, uint64_t step);
/* Tells the rank that leads which experts this rank's rows chose, for its next `place`. */
void group_report_load(struct group *g, struct str load);
/* This rank takes no new requests: others take over its experts, if they go on. */
void group_drain(struct group *g);
/* And it has none left: on_left comes, maybe at once, when the others go on without it. */
void group_leave(struct group *g);
/* Of the rank that leads: makes the next group, of the same ranks, when it can; `place` chooses
 * their experts anew. */
void group_renew(struct group *g);

/* Tells a rank that this process is in no group of its kind. Other messages: false. */
bool group_refuse(struct cluster *c, const struct cluster_message *m);
/* From the cluster's callbacks. False: the message is not for a group of this kind. */
bool group_on_message(struct group *g, const struct cluster_message *m);
void group_on_lost(struct group *g, uint64_t node, const char *why);
/* A link that was asked for is up; cluster_meet's purposes are kinds of groups. */
void group_on_met(struct group *g, uint64_t node);

/* ep_exchange_fn of the epoch that is being prepared; arg: the group. ERR_PEER_LOST: the epoch was
 * given up, or nothing came for 10 minutes. Thread: the one that makes the ep object. */
enum status group_exchange(void *arg, const void *mine, size_t bytes, void *all, struct err *err);
/* Waits until the other hosts of `r`, whose member `me` this is, answer connections at the
 * addresses of their ranks, but for 2 s at most: ERR_PEER_LOST names one that does not. OK also
 * when the epoch cannot become the group any more. Same thread; before the ep object is made.
 * LIMIT: rows may take another network of the same host, of which this says nothing. */
enum status group_reach(struct group *g, const struct group_roster *r, uint32_t me,
                        struct err *err) MUST_CHECK;
/* Whether the epoch that on_prepare proposed may still become the group. Any thread. */
bool group_prepares(struct group *g, uint64_t epoch);
/* After this group_exchange fails at once, and nothing is sent. Call before the thread that makes
 * the object is waited for; group_free may then be posted to the loop, behind what that thread
 * posted. */
void group_stop(struct group *g);

/* What it is waiting for, or whom it goes on without, in a sentence; "" when all ranks are
 * together: "rank 3 of 8 is not there". The rank that leads says whom it refused as well. n:
 * GROUP_WHY_MAX. */
enum group_state group_describe(const struct group *g, char *why, size_t n);
/* For how long this rank has not been in a group that steps; 0: it is. */
uint64_t group_apart_ms(const struct group *g);
/* The last group that this rank was in, or is; epoch 0: none. Valid until the loop's next turn. */
const struct group_roster *group_now(const struct group *g);
bool group_leads(const struct group *g);
/* Does it step now, in a group of all ranks? */
bool group_is_whole(const struct group *g);
const char *group_reason_name(enum group_reason r);

#endif
