/* view.h - an entry node's view of the nodes: the directory's last snapshot, corrected by what the
 * entry node knows itself (its own placements, nodes whose links it lost).
 *
 * Between two snapshots the entry node adds its placements to the load of the nodes, so that two
 * requests do not both take the last free place. The directory has the last word: each snapshot
 * replaces the nodes. While the directory cannot be reached the nodes of the last snapshot stay in
 * use, but nobody says any more which load has ended there: after VIEW_KNOWN_MS the view counts
 * what this entry node has placed itself, and nothing else. This node itself is always in the view,
 * so that it serves alone when it knows no other.
 * In a small topic links are dialed ahead, and nodes that were lost are dialed again: trouble is
 * found before a request pays for it. Thread: loop. */
#ifndef BATON_SCHEDULER_VIEW_H
#define BATON_SCHEDULER_VIEW_H

#include "scheduler/breaker.h"
#include "scheduler/directory/proofs.h"
#include "scheduler/place/place.h"
#include "shared/cluster/cluster.h"

enum {
    VIEW_WHY_MAX = 256,
    /* How long load that others have placed is believed in without a fresh snapshot: a lease, and
     * the time until the next one would have come. */
    VIEW_KNOWN_MS = 3500
};

struct view_events {
    void (*on_snapshot)(void *arg); /* a fresh snapshot is in the view */
    void (*on_capacity)(
        void *arg); /* a placement was taken out, or those of others are forgotten */
    void *arg;
};

/* A node whose link was lost (is_lost of its record): never chosen until the link is up again,
 * however long the directory lists it, or cannot tell. It is dialed at once, so that a link that
 * broke for a moment is there again when the node is needed. Its breaker is open meanwhile, and one
 * request probes it then. */
struct view_suspect {
    uint64_t node;
    uint64_t dial_ms; /* it is dialed again then */
    uint64_t gone_ms; /* since when the directory does not list it; 0: it does */
    char why[VIEW_WHY_MAX];
};

/* What this entry node has placed on a node and not taken out. */
struct view_own {
    uint64_t node, tokens;
    uint32_t seqs, blocks;
};

struct view {
    struct cluster *cluster; /* both borrowed; learns the nodes' addresses */
    struct directory *directory;
    struct view_events events;
    struct node_record *nodes; /* [n_nodes] */
    size_t n_nodes;
    struct str secret; /* of the cluster, borrowed; records that it does not prove are left out */
    struct node_record unproven; /* one of those; node 0: none */
    struct proofs proofs;        /* verdicts of the last snapshot's records */
    uint64_t n_snapshots;        /* that arrived */
    char topics[512];            /* topics and roles that the directory has seen, for error texts */
    uint64_t model;              /* this node's own; requests go to nodes with the same. 0: any */
    uint64_t text;               /* of a router: its vocabulary, which chooses `model`. 0: not so */
    struct node_record me;       /* as published last; node 0: nothing, or a router */
    enum node_role my_role;      /* in the last snapshot; of `me` where it is not there */
    struct view_own *own;        /* [n_own], of `own_size`: as many as have some */
    size_t n_own, own_size;
    uint64_t t_snapshot_ms; /* when one came last, or failed to */
    uint64_t t_known_ms;    /* when one came last */
    bool counts_own;        /* that was too long ago: only `own` is counted */
    bool known;   /* the directory has answered, or failed to: no trouble is looked for before */
    bool unsplit; /* requests are never split: any node takes them, whatever its role */
    bool asking;  /* a snapshot was asked for and has not arrived */
    bool ask_again;
    struct view_suspect *suspects; /* [n_suspects], of `suspects_size`: as many as are lost */
    size_t n_suspects, suspects_size;
    struct breaker breaker;
};

/* Of tokens that have to be computed again as they were. */
enum view_again {
    VIEW_AGAIN_EQUAL,
    VIEW_AGAIN_UNSEEN, /* no node is seen that could: it may be there, and not be known yet */
    VIEW_AGAIN_OTHER,  /* some node has another model or another type of KV */
    VIEW_AGAIN_DIFFERS /* some node does not repeat its own bits */
};

/* What requests are placed on: the nodes of an attempt. */
struct view_attempt {
    uint64_t request;
    uint64_t prefill; /* 0: none */
    uint64_t decode;
};

/* Asks for the first snapshot. */
void view_start(struct view *v, struct cluster *cluster, struct directory *directory,
                const struct view_events *events);
void view_release(struct view *v);
/* For view.c, after a snapshot: of a router that has a text, takes the model of the nodes with the
 * same text. The one that was taken stays while some node has it. Where no node has that text no
 * node is used. */
void view_choose_model(struct view *v);
/* Asks for a snapshot when one is due and dials suspects. Call it every few milliseconds. */
void view_tick(struct view *v);
/* Makes the next snapshot due soon instead of at its usual time. */
void view_refresh(struct view *v);
/* What this node publishes of itself now. */
void view_set_me(struct view *v, const struct node_record *me);
const struct node_record *view_find(const struct view *v, uint64_t node);
/* A link to the node was lost. */
void view_suspect(struct view *v, uint64_t node, const char *why);
/* The reason why a node has no link, or NULL: it was not lost, or is linked again. */
const char *view_why_unreachable(const struct view *v, uint64_t node);
/* ---- view_model.c ---- */
/* A number of what a node's tokens depend on beside the request: the model and the type of its KV.
 * Never 0. */
uint64_t view_model_bits(const struct node_record *n);
/* The model of the nodes with these bits; else a number that is no node's model. */
uint64_t view_model_of_bits(const struct view *v, uint64_t bits);
/* Has the node the vocabulary of this one, as far as they are known? */
bool view_shares_text(const struct view *v, const struct node_record *n);
/* Finds two nodes of one model that differ in what a resumed answer depends on (docs/resume.md),
 * and writes what that means. False: there are none. */
bool view_find_difference(const struct view *v, char text[ERR_TEXT_MAX]);
/* Would the tokens of a node with these bits be computed again, wherever they are? */
enum view_again view_again(const struct view *v, uint64_t bits);
/* The nodes whose breaker is open or being probed: no request is placed there. Returns how many. */
size_t view_excluded_nodes(const struct view *v, uint64_t out[BREAKER_MAX]);
/* Likewise the pairs. */
size_t view_excluded_pairs(const struct view *v, struct place_pair out[BREAKER_MAX]);
/* The breakers of a failure: of one node of the attempt, or (node 0) of its pair. */
void view_note_failure(struct view *v, const struct view_attempt *a, uint64_t node, enum status st,
                       const char *why);
/* BREAKER_WORKED, TAKEN or GIVEN_UP, for both nodes of the attempt and their pair. */
void view_note(struct view *v, const struct view_attempt *a, enum breaker_event ev);
/* Why the breaker of two nodes is not closed; NULL: it is. */
const char *view_why_apart(const struct view *v, uint64_t prefill, uint64_t decode);
/* ---- view_load.c ---- */
/* Load accounting of this entry node's own placements. */
void view_add_load(struct view *v, const struct placement *p);
void view_remove_load(struct view *v, const struct placement *p);
/* The directory has placed it on other nodes, or counts fewer tokens. */
void view_change_load(struct view *v, const struct placement *from, const struct placement *to);
/* The directory has refused it, since it knows of more load than the view: it is this entry node's
 * no more, but is counted until the next snapshot tells what is there. */
void view_disown_load(struct view *v, const struct placement *p);
/* Its prompt was computed. */
void view_remove_tokens(struct view *v, const struct placement *p);
/* For view.c: sets what waits at a node although it is not counted as placed there. */
void view_note_unplaced(struct node_record *n);
/* For view.c: forgets what other entry nodes have placed, and what other nodes reported of
 * themselves, until the next snapshot. */
void view_count_own(struct view *v);

#endif
