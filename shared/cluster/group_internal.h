/* group_internal.h - the state of a group, shared by its files only.
 *
 *     group.c           this rank: its epochs, whom it follows, messages that come
 *     group_lead.c      the rank that leads: who is there, what comes next
 *     group_exchange.c  what ranks exchange while they make an ep object
 *     group_reach.c     whether the other hosts answer
 *     group_waits.c     whom this rank waits for, said to people and to the others
 *     group_wire.c      messages packed, and rosters copied
 *
 * The leader sends its own messages to itself like to any other, so that there is one way for all.
 * Thread: loop, except what struct group_round says. */
#ifndef BATON_CLUSTER_GROUP_INTERNAL_H
#define BATON_CLUSTER_GROUP_INTERNAL_H

#include <pthread.h>

#include "shared/base/log/log_repeats.h"
#include "shared/cluster/group.h"
#include "shared/cluster/proto/node.pb-c.h"

enum { GROUP_BLOB_MAX = 4096 };

/* Messages of a type go both ways, and the leader is a rank too: this is their request number. */
enum group_way { TO_LEADER, FROM_LEADER };

/* A rank's running exchange, between the thread that makes an ep object and the loop. `lock` guards
 * all of it. */
struct group_round {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t epoch; /* that is prepared; an exchange fails when it is not `lives` */
    bool lives, stopped;
    uint32_t n_members;
    uint32_t round; /* of the epoch */
    bool is_sent, is_done;
    size_t bytes;
    uint8_t mine[GROUP_BLOB_MAX];
    uint8_t *all; /* the caller's */
};

/* What the leader knows of a rank, mostly by its last hello. */
struct group_seat {
    struct group_member at;   /* node 0: it is not there */
    uint64_t joined, running; /* epochs: the last, and that of now */
    bool is_free, drains, leaves;
    bool stays;          /* in the group that is being proposed */
    bool is_expected;    /* of the last group, and not heard of since this rank leads; ... */
    uint64_t was;        /* ... it was this process then */
    bool has_blob;       /* of the round that is collected */
    uint64_t met;        /* who answered at its last address; ... */
    uint64_t t_look_ms;  /* ... no other try before */
    uint32_t n_failures; /* epochs that it could not prepare, one after the other */
    uint64_t t_shut_ms;  /* because of them not proposed before */
    uint64_t told;       /* hash of what it was told it waits for */
};

struct group_bell {
    uint64_t epoch, step;
};

/* Of the rank that leads; seats of the others stay empty. */
struct group_lead {
    struct group_seat *seats;   /* [size] */
    struct group_roster before; /* the last group that all members joined */
    struct group_roster next;   /* proposed, and not joined by all; epoch 0: none */
    uint64_t epoch;             /* the highest that anybody spoke of */
    uint64_t t_grace_ms;        /* expected ranks are waited for until then */
    uint64_t t_retry_ms;        /* no proposal before */
    uint64_t t_leave_ms; /* none because of ranks that leave before: all may be told to end */
    uint32_t n_failures; /* since the ranks that are there changed */
    char refusal[GROUP_WHY_MAX]; /* why a rank was refused, ... */
    uint64_t t_refusal_ms;       /* ... the last time */
    uint32_t i_met;              /* whose address is being tried */
    struct group_bell bell;      /* the last that was rung */
    uint32_t i_look;             /* whose address is tried next */
    bool renews;
    uint32_t i_round;
    uint64_t t_round_ms; /* when the first rank came to it */
    bool is_late_told;
    size_t blob_bytes;
    uint8_t *blobs; /* [next.n][blob_bytes] */
};

struct group {
    struct group_options o;
    char name[GROUP_HOST_MAX + 8]; /* where its ranks meet */
    char terms[GROUP_TERMS_MAX];
    bool is_ready, drains, leaves, is_told_left;
    /* Whom it follows: itself, when it leads; node 0: nobody. */
    struct group_member leader;
    uint64_t last_leader; /* that was lost; not followed again before t_forgive_ms */
    uint64_t t_forgive_ms;
    uint64_t t_referred_ms; /* when it last followed where it was sent */
    bool *is_gone;          /* [size]: ranks of nodes that were lost since the last leader was */
    uint32_t n_tried;       /* of the last group at once, since the one to lead did not answer */
    bool is_refused;
    /* Epochs: made by a thread; handed to the engine; joined by it. 0: none. */
    uint64_t preparing, given, running;
    bool is_next_lost, is_now_lost; /* was told so, and is not yet rid of it */
    uint64_t epoch;                 /* the highest heard of */
    struct group_roster next;       /* of `preparing` or `given` */
    struct group_roster now;        /* of `running`, or of the last */
    uint64_t t_apart_ms;            /* since when no group has it */
    uint64_t t_waits_ms;            /* since when it waits for others; 0: it does not */
    char why[GROUP_WHY_MAX];        /* why the last epoch ended, or this rank was refused */
    struct group_bell rung;         /* by this rank, the last */
    struct loop_timer *retry;
    struct group_round round;
    struct group_lead lead;
    struct log_repeats refusals, endings, waits;
    struct gauge *epoch_gauge, *size_gauge;
    struct counter *losses, *epochs[GROUP_REASONS];
};

/* ---- group.c ---- */

/* Tells the leader what this rank is doing; without one, nothing. */
void group_say_hello(struct group *g);
void group_follow(struct group *g, const struct group_member *leader);
/* The epoch is over: its thread's exchange fails, its engine gives it up. */
void group_end_epoch(struct group *g, uint64_t epoch, const char *why);
/* May a next group be proposed to this rank? */
bool group_is_free(const struct group *g);

/* ---- group_lead.c ---- */

/* This rank leads from now on; the others of its last group are expected to come. */
void group_lead_begin(struct group *g);
/* It does not any more: `leader` does. */
void group_lead_end(struct group *g, const struct group_member *leader);
void group_lead_release(struct group *g);
/* A rank's message to the leader. */
void group_lead_on_message(struct group *g, const struct cluster_message *m,
                           const ProtobufCMessage *body);
/* `other` leads too, n_running ranks that step. */
void group_lead_on_lead(struct group *g, const struct group_member *other, uint32_t n_running);
/* A rank was met at an address that was tried. */
void group_lead_on_met(struct group *g, uint64_t node);
void group_lead_on_lost(struct group *g, uint64_t node, const char *why);
/* Says to the node that this rank leads. */
void group_lead_tell(struct group *g, uint64_t node);
/* Now and then: proposes what is due, looks for ranks that are not there. */
void group_lead_tick(struct group *g);
/* Is the rank there? */
bool group_lead_has(const struct group *g, uint32_t rank);
/* Is any not there? */
bool group_lead_misses(const struct group *g);
/* Is the rank there, and left out for a while because it could not join? */
bool group_lead_has_shut_out(const struct group *g, uint32_t rank);
/* Why it refused a rank that still asks; "": there is none. */
const char *group_lead_refusal(const struct group *g);
void group_refuse_rank(struct group *g, uint64_t node, const char *why,
                       const struct group_member *leader);

/* ---- group_exchange.c ---- */

void group_round_init(struct group_round *r);
void group_round_release(struct group_round *r);
void group_round_set(struct group *g, uint64_t epoch, uint32_t n_members, bool lives);
/* The bytes of all members are here. */
void group_round_take(struct group *g, const Baton__GroupBlob *m);

/* ---- group_waits.c ---- */

/* Now and then: logs whom this rank waits for, once that lasts; the rank that leads tells it to the
 * others. */
void group_waits_tick(struct group *g);
/* What the rank that leads said. */
void group_waits_take(struct group *g, const char *why);

/* ---- group_wire.c ---- */

void group_send(struct group *g, uint64_t node, enum frame_type type, enum group_way way,
                const ProtobufCMessage *body);
const ProtobufCMessageDescriptor *group_body_of(enum frame_type type);
void group_roster_move(struct group_roster *to, struct group_roster *from);
bool group_roster_has_node(const struct group_roster *r, uint64_t node);
/* False: not ascending by rank, or a rank that cannot be. */
bool group_roster_unpack(struct group_roster *to, const Baton__GroupPropose *m, uint32_t size);
void group_roster_send(struct group *g, const struct group_roster *r, uint64_t node);
bool group_member_unpack(struct group_member *to, const Baton__GroupMember *m, uint32_t size);
void group_member_pack(Baton__GroupMember *to, const struct group_member *m);

#endif
