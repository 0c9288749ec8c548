/* fetch_internal.h - the state of a fetch, for fetch.c (connections, single answers) and
 * fetch_parts.c (files) only. Thread: main. */
#ifndef BATON_DEPLOY_PULL_FETCH_FETCH_INTERNAL_H
#define BATON_DEPLOY_PULL_FETCH_FETCH_INTERNAL_H

#include "deploy/pull/fetch/checker.h"
#include "deploy/pull/fetch/fetch.h"

struct fetch {
    struct fetch_options o;
    struct curl_library curl;
    CURLM *multi;
    struct checker *checker;
    struct http_get requests[FETCH_CONNECTIONS_MAX]; /* [n_connections] */
    uint64_t hold_until_ms;                          /* a server asked for a pause */
    struct answer_head refusal;
    char *ca_file, *ca_dir; /* NULL: the system's */
};

/* Starts a request whose part, text or only_head is set. ERR_INTERNAL. */
enum status fetch_start(struct fetch *f, struct http_get *r, const char *url, bool direct,
                        uint64_t begin, uint64_t end, struct err *err) MUST_CHECK;
/* Takes a request off the wire, finished or not. */
void fetch_stop(struct fetch *f, struct http_get *r);
/* Waits for the network, the checker or the stop, at most so long, and lets libcurl work.
 * ERR_CANCELED: the stop. */
enum status fetch_wait(struct fetch *f, uint32_t at_most_ms, struct err *err) MUST_CHECK;
/* The next request that has ended, stalled ones included; what its end means. NULL: none. */
struct http_get *fetch_take_ended(struct fetch *f, enum get_end *end);
/* How long to wait before try number `n_failures` + 1, with a part of chance in it. */
uint32_t fetch_backoff_ms(uint32_t n_failures);
/* After GET_AGAIN: notes a pause that the server asked for. ERR_UNAVAILABLE: too long a one. */
enum status fetch_note_pause(struct fetch *f, const struct http_get *r, struct err *err) MUST_CHECK;
/* Logs that something is tried again: of more than a hiccup everybody hears. */
void fetch_say_again(struct fetch *f, const char *what, uint32_t n_failures, const char *why);
/* Why the request is the end of the fetch: "WHAT: SENTENCE". */
enum status fetch_fail(struct fetch *f, const struct http_get *r, const char *what,
                       struct err *err);

#endif
