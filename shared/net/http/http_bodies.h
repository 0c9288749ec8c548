/* http_bodies.h - bounds the memory that the large request bodies of one server take together.
 *
 * A body of more than HTTP_SMALL_BODY bytes needs a place before it is read: its Content-Length, or
 * the largest length allowed when it is chunked. Places are given in the order of arrival while
 * their sum stays within the limit (one alone always is); TCP holds back the clients that wait, and
 * clients that send slowly lose their place while others wait (http_conn.c). A handler that takes a
 * body takes its place too, so that what is being parsed counts as well.
 * Owner: the server, and each body that was taken from it. Thread: loop. */
#ifndef BATON_NET_HTTP_HTTP_BODIES_H
#define BATON_NET_HTTP_HTTP_BODIES_H

#include <stdint.h>

#include "shared/base/list.h"

enum { HTTP_SMALL_BODY = 64 * 1024 };

struct http_bodies;

struct http_place {
    struct list link; /* in the queue while it waits */
    size_t n_bytes;   /* wanted or given; 0: neither */
    void (*given)(struct http_place *p);
};

struct http_bodies *http_bodies_create(size_t max_bytes);
/* For the server's end: nobody waits any more. Freed when the last place is released. */
void http_bodies_close(struct http_bodies *b);

void http_place_init(struct http_place *p, void (*given)(struct http_place *p));
/* Asks for n > 0 bytes; `p` has none. False: it waits, and p->given is called when it has them. */
bool http_bodies_reserve(struct http_bodies *b, struct http_place *p, size_t n);
/* Returns whether somebody waits. */
bool http_bodies_contended(const struct http_bodies *b);
/* Takes the bytes of a place that was given out of it; whoever has them returns them later. */
size_t http_place_take(struct http_place *p);
void http_bodies_return(struct http_bodies *b, size_t n);
/* Gives the place back, or stops waiting; harmless without either. May call `given` of others. */
void http_bodies_release(struct http_bodies *b, struct http_place *p);

#endif
