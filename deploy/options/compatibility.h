/* compatibility.h - what becomes of every flag, environment variable and command that our users'
 * documents show.
 *
 * One row per name and owner. Options of Baton's own table (option_table.h) carry no effect here:
 * it is looked up there, so the two cannot disagree. docs/compatibility.md is printed from this
 * table (`baton docs compatibility`), and tests/seeds holds the table against the documents
 * themselves. Thread: any (constants). */
#ifndef BATON_DEPLOY_OPTIONS_COMPATIBILITY_H
#define BATON_DEPLOY_OPTIONS_COMPATIBILITY_H

#include "deploy/options/config.h"

enum compat_kind { COMPAT_COMMAND, COMPAT_FLAG, COMPAT_ENV, COMPAT_VALUE, COMPAT_N_KINDS };

struct compat_entry {
    enum compat_kind kind;
    const char *name;          /* as the documents write it; an environment variable may end in
                                * '*': all that begin so; NULL ends */
    const char *owner;         /* flags: the program they belong to, NULL: the server's own */
    const char *seeds;         /* numbers of the documents, separated by spaces; "" for
                                * families */
    enum option_effect effect; /* unused when `sentence` is NULL */
    const char *sentence;      /* NULL: effect and sentence are those of the option */
    bool quiet;                /* environment: often set for other programs, so nothing is said at
                                * start */
};

extern const struct compat_entry COMPATIBILITY[];

/* Effect and sentence of a row; false when it relies on an option that does not exist. */
bool compatibility_resolve(const struct compat_entry *entry, enum option_effect *effect,
                           const char **sentence);
void compatibility_markdown(struct buf *out);
/* What must be said at start: one sentence per environment variable that is set and has no effect,
 * or looks misspelt. */
void compatibility_env_notes(void (*emit)(void *arg, const char *sentence), void *arg);

#endif
