/* fetch.h - brings files from their source to their parts: a bounded number of connections, chunks
 * of files in order, tries again and again what broke off, hashing and writing behind it.
 *
 *     connections ──chunks──▶ parts ──jobs──▶ checker (threads): hash, fdatasync, journal
 *
 * A chunk that breaks off goes on where it was. What the same server refused, fails the same way or
 * brings no byte in n_retries tries in a row ends the fetch; so does a signal (stop_fd). Whatever
 * ends it, the journals say what came: a later fetch goes on there.
 * Life cycle: fetch_create, fetch_text, fetch_head and fetch_parts one after the other, fetch_free.
 * Thread: main. */
#ifndef BATON_DEPLOY_PULL_FETCH_FETCH_H
#define BATON_DEPLOY_PULL_FETCH_FETCH_H

#include "deploy/pull/fetch/http_get.h"
#include "deploy/pull/fetch/progress.h"
#include "deploy/pull/hub.h"

enum { FETCH_CONNECTIONS_MAX = 64 };

struct fetch_options {
    uint32_t n_connections, n_retries, stall_ms;
    const struct model_hub *hub; /* whose token its addresses get; NULL: none */
    bool is_file;                /* addresses are file:// */
    int stop_fd;                 /* readable: end with ERR_CANCELED; -1: none */
    struct progress *progress;
};

struct fetch;

/* ERR_UNSUPPORTED: libcurl is not there. */
enum status fetch_create(const struct fetch_options *o, struct fetch **out,
                         struct err *err) MUST_CHECK;
void fetch_free(struct fetch *f);

/* Appends the whole answer, at most `max` bytes. */
enum status fetch_text(struct fetch *f, const char *url, size_t max, struct buf *out,
                       struct err *err) MUST_CHECK;
/* The head of the answer to a GET of the first byte. */
enum status fetch_head(struct fetch *f, const char *url, struct answer_head *out,
                       struct err *err) MUST_CHECK;

struct fetch_parts {
    struct part *parts; /* [n], begun, in the order in which they are wanted */
    size_t n;
    /* A part is whole, hashed and on the disk (OK), or is not what the source said (ERR_CHECKSUM;
     * of one in place at once, of another when fetching it again did not help). Not OK ends the
     * fetch. The part is closed afterwards. */
    enum status (*on_end)(void *arg, struct part *p, enum status st, struct err *err);
    void *arg;
};
/* OK: on_end was called for each part. After an error parts may be open: the caller closes all. */
enum status fetch_parts(struct fetch *f, const struct fetch_parts *what,
                        struct err *err) MUST_CHECK;

/* The answer that ended the last call; status 0: there was none. */
const struct answer_head *fetch_refusal(const struct fetch *f);

#endif
