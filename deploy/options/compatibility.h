/* compatibility.h - what Baton does with every flag, environment variable and command that its
 * users' documents show.
 *
 * One entry per name and owner. An option of Baton's own table (option_table.h) has no effect of
 * its own here: it is looked up there, so the two cannot disagree. docs/compatibility.md is printed
 * from this table (`baton docs compatibility`), and tests/seeds compares it with the documents.
 * Thread: any (constants). */
#ifndef BATON_DEPLOY_OPTIONS_COMPATIBILITY_H
#define BATON_DEPLOY_OPTIONS_COMPATIBILITY_H

#include "deploy/options/config.h"

enum compat_kind { COMPAT_COMMAND, COMPAT_FLAG, COMPAT_ENV, COMPAT_VALUE, COMPAT_N_KINDS };

struct compat_entry {
    enum compat_kind kind;
    const char *name;          /* as documented; a variable's name may end in '*'; NULL ends */
    const char *owner;         /* of a flag: the program that takes it; NULL: the server */
    const char *seeds;         /* document numbers, separated by spaces; "" for families */
    enum option_effect effect; /* unused when `sentence` is NULL */
    const char *sentence;      /* NULL: effect and sentence are those of the option */
    bool quiet;                /* variable often set for other programs: no note at start */
    bool start_only; /* variable that only what start_server starts reads: a note elsewhere */
};

extern const struct compat_entry COMPATIBILITY[];

/* Effect and sentence of an entry; false when it refers to an option that does not exist. */
bool compatibility_resolve(const struct compat_entry *entry, enum option_effect *effect,
                           const char **sentence);
/* Returns the entry of a value or model by its name in the table; NULL: there is none. */
const struct compat_entry *compatibility_value(const char *name);
void compatibility_markdown(struct buf *out);
/* Notes at start: emit one sentence per environment variable of another system that is set and has
 * no effect. is_service: start_server started this process. */
void compatibility_env_notes(bool is_service, void (*emit)(void *arg, const char *sentence),
                             void *arg);

#endif
