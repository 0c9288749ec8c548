/* http_bodies.h - bounds the memory that the request bodies of one server take together.
 *
 * Nothing counts before its first byte arrives. A small body, announced with HTTP_SMALL_BODY bytes
 * or less (a chunked one until it has more), then counts whole: together they have half of the
 * limit, beside it, and those of one address half of that. A large one counts as its bytes arrive,
 * in steps of HTTP_BODY_STEP. In each class one alone is always read. What finds no room waits: its
 * connection is not read, so TCP holds the client back. Room goes to the addresses in turn, and
 * within an address to the body whose first step is the oldest.
 * No deadlock: a small body with room never waits again. The steps leave a reserve for one body of
 * the largest size. When they are used up it goes to the next body in turn, which is then read to
 * its end without waiting, parsed, and returns it; or its client stops sending and loses it (while
 * others wait slow clients lose what they have: http_conn.c). So who waits waits for one that goes
 * on. A handler that takes a body takes its share too, so what is being parsed counts.
 * Owner: the server, and each body that was taken from it. Thread: loop. */
#ifndef BATON_NET_HTTP_HTTP_BODIES_H
#define BATON_NET_HTTP_HTTP_BODIES_H

#include <stdint.h>

#include "shared/base/list.h"

enum { HTTP_SMALL_BODY = 64 * 1024, HTTP_BODY_STEP = 256 * 1024 };

enum http_body_class { HTTP_BODY_SMALL, HTTP_BODY_LARGE, HTTP_BODY_CLASSES };

struct http_bodies;

/* The bodies of one client address. */
struct http_turn {
    struct list link[HTTP_BODY_CLASSES];    /* among the addresses of which a body waits */
    struct list waiting[HTTP_BODY_CLASSES]; /* of http_place.link */
    size_t n_small;                         /* bytes of its small bodies */
};

/* What one body counts for. */
struct http_share {
    size_t n_small, n_steps, n_reserve; /* bytes; at most one of them is not 0 */
};

struct http_place {
    struct list link; /* of the turn, while it waits */
    struct http_turn *turn;
    struct http_share share;
    enum http_body_class class; /* in which it waits */
    size_t n_bytes, n_max;      /* while it waits: what has arrived, and the whole body at most */
    uint64_t age;               /* by the first step; UINT64_MAX: none yet */
    void (*given)(struct http_place *p);
};

/* One body has at most max_body bytes. */
struct http_bodies *http_bodies_create(size_t max_bytes, size_t max_body);
/* For the server's end: nobody waits any more. Freed when the last share is returned. */
void http_bodies_close(struct http_bodies *b);

void http_turn_init(struct http_turn *t);
/* `turn` lives as long as the place. */
void http_place_init(struct http_place *p, struct http_turn *turn,
                     void (*given)(struct http_place *p));
/* Counts n > 0 bytes of a body that will have n_max at most. False: they found no room and more
 * must not be read; p->given is called when they have it. */
bool http_bodies_hold(struct http_bodies *b, struct http_place *p, size_t n, size_t n_max);
static inline bool http_place_waits(const struct http_place *p) { return !list_empty(&p->link); }
static inline size_t http_share_bytes(const struct http_share *s)
{
    return s->n_small + s->n_steps + s->n_reserve;
}
/* Returns whether others wait for what this place has. */
bool http_bodies_wanted(const struct http_bodies *b, const struct http_place *p);
/* Returns whether so little room is left that bodies are to be read in small pieces. */
bool http_bodies_scarce(const struct http_bodies *b);
/* Bytes that all bodies count for. */
size_t http_bodies_bytes(const struct http_bodies *b);
/* Takes the share out of the place; whoever has it returns it later. */
struct http_share http_place_take(struct http_place *p);
void http_bodies_return(struct http_bodies *b, struct http_share share);
/* Gives the share back, and stops waiting; harmless without either. May call `given` of others. */
void http_bodies_release(struct http_bodies *b, struct http_place *p);

#endif
