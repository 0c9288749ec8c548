/* group.h - the ranks that share the experts of one model: how they find each other, and what
 * happens when one is lost.
 *
 *     MEETING ─ link to rank 0 ─▶ WAITING ─ all are there ─▶ PREPARING ─ all have an ep ─▶ TOGETHER
 *        ◀───── rank 0 is lost ─────┴◀────────────── a rank is lost ───┴─────────────────────┘
 *
 * Rank 0 leads: the others connect to its cluster port and say who they are. When all are there it
 * proposes the group of the next epoch; every rank makes its ep object on a worker thread, whose
 * exchange passes through rank 0, as bells do (engine.h), and hands it to its engine. A loss is
 * told by a link, or by an engine whose exchange failed, and ends the epoch everywhere.
 * LIMIT: a group has all its ranks or does not step; rank 0's address does not move.
 * Life cycle: create, group_ready once the model is loaded, free. Thread: loop, except
 * group_exchange and group_stop. Owner: the node. */
#ifndef BATON_CLUSTER_GROUP_H
#define BATON_CLUSTER_GROUP_H

#include "shared/base/metrics.h"
#include "shared/cluster/cluster.h"

enum { GROUP_RANKS_MAX = 256, GROUP_TERMS_MAX = 256 };

enum group_state { GROUP_MEETING, GROUP_WAITING, GROUP_PREPARING, GROUP_TOGETHER };

struct group;

struct group_options {
    struct loop *loop;
    struct cluster *cluster;
    struct metrics *metrics;
    uint64_t node; /* this process's incarnation id */
    uint32_t rank, size;
    const char *meet_host; /* where rank 0 listens; ranks above 0 connect there */
    uint16_t meet_port;
    uint32_t retry_ms; /* between tries to connect, and after a failed epoch; 500 when 0 */
    /* A group was proposed: the owner makes an ep object with group_exchange, on another thread,
     * then calls group_prepared, and group_joined once its engine has met the others. A new one
     * comes after group_prepared of the one before failed, or group_report_lost. */
    void (*on_prepare)(void *arg, uint64_t epoch);
    /* The group of this epoch is no more. Comes for an epoch that is being prepared, too. */
    void (*on_lost)(void *arg, uint64_t epoch, const char *why);
    void (*on_bell)(void *arg, uint64_t epoch, uint64_t step);
    void *arg;
};

struct group *group_create(const struct group_options *o);
void group_free(struct group *g);
/* This rank can step. `terms` say what all ranks must have alike, for people: model, precision,
 * sizes; a rank with others is refused, which both sides log. */
void group_ready(struct group *g, const char *terms);
/* The ep object of this epoch was given to the engine (OK), or could not be made. */
void group_prepared(struct group *g, uint64_t epoch, enum status st, const char *why);
/* The engine has met all ranks of this epoch. */
void group_joined(struct group *g, uint64_t epoch);
/* An exchange of this epoch failed in this rank's engine, or the engine gave its object up: it has
 * none any more. */
void group_report_lost(struct group *g, uint64_t epoch, const char *why);
/* This rank begins a step after all slept: the bell goes to all others. */
void group_ring(struct group *g, uint64_t epoch, uint64_t step);

/* Tells a rank that this node is no rank 0. Other messages: false. */
bool group_refuse(struct cluster *c, const struct cluster_message *m);
/* From the cluster's callbacks. False: the message is not for a group. */
bool group_on_message(struct group *g, const struct cluster_message *m);
void group_on_lost(struct group *g, uint64_t node, const char *why);
/* A link that cluster_meet asked for is up. */
void group_on_met(struct group *g, uint64_t node);

/* ep_exchange_fn of the epoch that is being prepared; arg: the group. ERR_PEER_LOST: the epoch was
 * given up, or nothing came for 30 s. Thread: the one that makes the ep object. */
enum status group_exchange(void *arg, const void *mine, size_t bytes, void *all, struct err *err);
/* After this group_exchange fails at once, and nothing is sent. Call before the thread that makes
 * the object is waited for; group_free may then be posted to the loop, behind what that thread
 * posted. */
void group_stop(struct group *g);

/* What it is waiting for, in a sentence, "" when the ranks are together: "rank 3 of 8 is not there
 * yet". */
enum group_state group_describe(const struct group *g, char *why, size_t n);
/* For how long the ranks have not been together; 0: they are. */
uint64_t group_apart_ms(const struct group *g);
/* Of the last epoch that this rank was in; 0: none yet. */
uint64_t group_epoch(const struct group *g);

#endif
