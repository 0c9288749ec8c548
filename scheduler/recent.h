/* recent.h - what happened lately at an entry node, for `baton status`: output tokens per second,
 * and the last failures. Owner: the entry. Thread: loop. */
#ifndef BATON_SCHEDULER_RECENT_H
#define BATON_SCHEDULER_RECENT_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { RECENT_SECONDS = 10, RECENT_FAILURES = 4 };

struct recent_failure {
    uint64_t t_ms; /* clock_ms; 0: none */
    enum status st;
    char text[ERR_TEXT_MAX];
};

struct recent {
    uint64_t second;                       /* clock_ms / 1000 of the last token */
    uint32_t n_tokens[RECENT_SECONDS + 1]; /* by second, a ring */
    struct recent_failure failures[RECENT_FAILURES];
    uint32_t n_failures; /* ever; the next one's place is n_failures % RECENT_FAILURES */
};

/* One token was delivered. */
void recent_add_token(struct recent *r, uint64_t now_ms);
/* Mean over the last RECENT_SECONDS whole seconds. */
double recent_tokens_per_s(const struct recent *r, uint64_t now_ms);
/* A request failed; the same text as the last one's replaces it. */
void recent_add_failure(struct recent *r, uint64_t now_ms, enum status st, const char *text);
/* Appends [{"ago_s":3,"status":"unavailable","text":"..."}], the newest first. */
void recent_write_failures(const struct recent *r, uint64_t now_ms, struct buf *out);

#endif
