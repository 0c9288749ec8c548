/* http_state.h - the structs of an `http` directory, for http.c and http_answer.c only.
 * Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_HTTP_STATE_H
#define BATON_SCHEDULER_DIRECTORY_HTTP_STATE_H

#include "scheduler/directory/remote.h"
#include "scheduler/directory/wire.h"

struct directory_http {
    struct directory base;
    struct directory_remote remote;
    struct loop *loop;
    char topic[NODE_NAME_MAX];
    char *host;
    uint16_t port;
    char at[80]; /* both, for people */
    struct buf secret;
    struct http_client *client;
    struct loop_timer *probe;
    bool publishing;        /* a renewal is in flight */
    struct buf next_record; /* the renewal after it; empty: none */
    struct buf leaving;     /* ids of nodes that leave when the renewal is answered */
    uint32_t n_holds;       /* callbacks running */
    struct log_repeats refused_calls;
    uint64_t prefix_from_ms; /* no placement tells of its prefix before: the server has no table */
    bool closed;
};

struct directory_http_call {
    struct directory_http *d;
    enum directory_op op;
    directory_snapshot_fn *snapshot; /* NULL: a probe */
    directory_reserve_fn *reserve;
    directory_meter_fn *meter;
    void *arg;
    uint64_t request, id;
    struct prefix_placed chosen; /* reserve: the nodes that it stays with if nothing is told */
    bool told_prefix;
    struct meter_sum *room; /* [n_room] of the sums that meter asked for */
    uint32_t n_room;
};

/* A parsed answer. */
struct directory_http_answer {
    enum status st;
    struct directory_placed placed;
    struct node_record *nodes; /* their identities lie in doc */
    cJSON *doc;
    struct directory_snapshot snapshot;
    struct meter_sums sums; /* in the call's room */
    char why[ERR_TEXT_MAX];
};

/* Reads the answer to a call. Returns whether the server works: a call it refused
 * (malformed, a limit) says nothing about others. */
bool directory_http_read_answer(struct directory_http *d, const struct directory_http_call *c,
                                enum status st, int http_status, struct str body,
                                struct directory_http_answer *a);
void directory_http_answer_release(struct directory_http_answer *a);

#endif
