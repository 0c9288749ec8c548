/* trouble.h - why requests cannot be served, or not as the operator wants, in one sentence.
 *
 * trouble_find looks at what an entry node knows (facts) and names the one cause that must be
 * removed first, with the next step. The same sentence goes into the 503, /ready, /cluster (`baton
 * status`) and the log. trouble_update keeps the present one: a change is logged, and a cause that
 * keeps coming back is counted, and logged again once it lasts. A trouble that ends because the
 * node it was about has left the list of nodes is not over: the log says that.
 * Thread: loop. */
#ifndef BATON_SCHEDULER_TROUBLE_H
#define BATON_SCHEDULER_TROUBLE_H

#include "scheduler/view.h"

enum trouble_cause {
    TROUBLE_NONE,
    TROUBLE_DIRECTORY,    /* Redis or the directory server cannot be used */
    TROUBLE_LAUNCHER,     /* the launcher that started this node is gone */
    TROUBLE_PRIVATE_VIEW, /* a decode node, but no other node can get into the topic */
    TROUBLE_PEER,         /* a node cannot be connected */
    TROUBLE_OTHER_MODEL,  /* nodes of the topic have another model or precision */
    TROUBLE_NO_DECODE,    /* no node that can decode is in the topic */
    TROUBLE_KV,           /* prefill and decode nodes that cannot exchange KV */
    TROUBLE_N_CAUSES
};

/* A router that this node cannot see lists it (deploy/router/listed.h). */
enum trouble_listed {
    TROUBLE_NOT_LISTED,
    TROUBLE_LISTED_ALONE,      /* ... and sees no other node that decodes, ... */
    TROUBLE_LISTED_WITH_OTHERS /* ... or does */
};

/* What is looked at; all borrowed. */
struct trouble_facts {
    const struct view *view;
    const char *topic;
    /* The options that bring another node into the topic, "--router 10.0.0.1:9400", with its
     * model and port where they are known; "": only the launcher's own nodes can join; NULL: none
     * can. */
    const char *join;
    const char *directory_down; /* directory_why_down */
    const char *launcher_gone;  /* what that means; NULL: it is there, or there was none */
    bool launcher_held_view;    /* it was the directory server, too */
    const char *missing; /* of a router: nodes that its operator lists do not answer, or some that
                          * want to register are not let in; NULL: neither */
    enum trouble_listed listed;
};

/* A node that a trouble is about; node 0: none. */
struct trouble_node {
    uint64_t node;
    char name[NODE_NAME_MAX];
};

struct trouble {
    enum trouble_cause cause;
    bool blocks; /* no request can be served */
    char text[ERR_TEXT_MAX];
    struct trouble_node about[2];
    uint64_t since_ms;
    uint32_t n_requests; /* that ended for it */
    struct {
        uint64_t state; /* what the log says now: a hash; 0: all is well */
        enum trouble_cause cause;
        struct trouble_node about[2];
        uint64_t since_ms, t_minute_ms;
        uint32_t n_requests;          /* of the trouble that the log says */
        uint32_t n_lines, n_unlogged; /* lines of this minute; changes since the last line */
    } logged;
};

/* Fills in cause, blocks, text and about; cause TROUBLE_NONE and "" when all is well. */
void trouble_find(const struct trouble_facts *f, struct trouble *out);
/* Can the node decode requests of this one now? */
bool trouble_can_decode(const struct view *v, const struct node_record *n);
/* Looks again and logs a change. */
void trouble_update(struct trouble *t, const struct trouble_facts *f, uint64_t now_ms);
/* "directory", "peer", ... */
const char *trouble_name(enum trouble_cause c);
/* Appends {"cause":...,"blocks":...,"text":...,"since_s":...,"requests":...}, or null. */
void trouble_write(const struct trouble *t, uint64_t now_ms, struct buf *out);

#endif
