/* listed.h - nodes that a router's operator lists, or adds over HTTP, instead of letting them
 * register: each is asked for its record (GET /cluster/v1/records), which goes into the router's
 * own directory as if the node had published it. Listed nodes need not know each other, nor it.
 *
 *     NEW ──record──▶ UP ──no answer, a refusal, a record that cannot be used──▶ DOWN
 *      └──the same────────────────────────────────────────────────────────────────▲│
 *                      ▲──────────────────────record───────────────────────────────┘
 *
 * The question also says whether another node decodes for the node's model, which it cannot see
 * itself: when it shuts down it gives its work back if so (node_stop.c).
 *
 * A node that is DOWN leaves the view when its lease ends, as any other. The role with which a node
 * is listed names it in answers and sentences; what it computes is its own role. Thread: loop. */
#ifndef BATON_DEPLOY_ROUTER_LISTED_H
#define BATON_DEPLOY_ROUTER_LISTED_H

#include "deploy/router/addresses.h"
#include "scheduler/directory/directory.h"

enum { LISTED_MAX = 1024 };

/* "1": others decode too; "0": none does; without it, that is not known yet. */
#define LISTED_OTHERS_HEADER "x-baton-others"

struct listed;

struct listed_options {
    struct loop *loop;
    struct directory *directory; /* of backend "local"; borrowed until free */
    struct str secret;           /* of the cluster; borrowed */
    const char *topic;           /* of the router; borrowed */
    struct metrics *metrics;
    uint32_t poll_ms; /* between two questions; 700 when 0, so that three fit into a lease */
};

struct listed *listed_create(const struct listed_options *o);
void listed_free(struct listed *l);

/* Lists a node, which is asked at once; one that is there stays. ERR_FULL at LISTED_MAX. */
enum status listed_add(struct listed *l, const struct node_at *node, struct err *err) MUST_CHECK;
/* Takes it off the list and out of the view; its running requests go on. False: it is not there. */
bool listed_remove(struct listed *l, const struct node_at *node);
bool listed_has(const struct listed *l, const struct node_at *node);
/* Calls fn once, when the node's next answer has come or failed to, with the sentence of a failure;
 * NULL: it is UP. Not called from inside. fn may remove the node. */
void listed_when_asked(struct listed *l, const struct node_at *node,
                       void (*fn)(void *arg, const char *why), void *arg);
/* `arg` waits no more. */
void listed_forget(struct listed *l, const void *arg);

/* Appends ["host:port", ...] of one role. */
void listed_write_names(const struct listed *l, enum node_role role, struct buf *out);
/* Appends [{"at":..., "role":..., "state":..., "why":...}, ...]. */
void listed_write(const struct listed *l, struct buf *out);
/* Which listed nodes do not answer, a sentence; NULL: all do. Valid until the next turn. */
const char *listed_why_down(struct listed *l);

#endif
