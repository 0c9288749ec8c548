/* role_change.h - the change of a running node's role: what is asked, what is answered, and when a
 * node refuses. `baton role` asks, deploy/node/node_mount.c answers.
 *
 *   POST /cluster/v1/role { "role": "decode", "node": "10.0.0.1:8000" }
 *                      -> { "node": "10.0.0.1:8000", "role": "decode", "was": "prefill" }
 *
 * A role only says which work entry nodes place on a node, so work that runs goes on as it is.
 * Thread: any (pure functions). */
#ifndef BATON_DEPLOY_ROLE_ROLE_CHANGE_H
#define BATON_DEPLOY_ROLE_ROLE_CHANGE_H

#include "scheduler/directory/wire.h"

#define ROLE_PATH DIRECTORY_PATH "role"

struct role_ask {
    enum node_role role;
    char node[NODE_NAME_MAX]; /* the name of the node that is meant; "": whoever is asked */
};

void role_ask_write(const struct role_ask *ask, struct buf *out);
/* ERR_FORMAT, ERR_INVALID: the body is none, or names no role. */
enum status role_ask_read(struct str body, struct role_ask *out, struct err *err) MUST_CHECK;

void role_answer_write(const char *node, enum node_role is, enum node_role was, struct buf *out);

/* What a node knows that matters for its role. */
struct role_facts {
    const char *name, *topic;
    enum node_role role;
    bool unsplit;       /* --scheduler-name global: it serves whole requests, whatever its role */
    bool exchanges_kv;  /* some transport works on it */
    bool is_seen;       /* others place work on it: it shares their view, or a router lists it */
    bool shares_view;   /* so what it sees is the whole topic */
    bool others_decode; /* a node that it sees, besides itself, decodes for its model */
};

/* May the node change its role as asked? ERR_CONFLICT: not as it was started, or as its cluster is
 * now. ERR_NOT_FOUND: another node was meant. The sentence says what would be right. The role that
 * the node has already is always taken. */
enum status role_check(const struct role_facts *f, const struct role_ask *ask,
                       struct err *err) MUST_CHECK;

#endif
