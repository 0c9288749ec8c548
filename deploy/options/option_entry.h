/* option_entry.h - how an entry of the option table is written, and the parts that option_table.c
 * lists; nobody else includes it. Thread: any (constants). */
#ifndef BATON_DEPLOY_OPTIONS_OPTION_ENTRY_H
#define BATON_DEPLOY_OPTIONS_OPTION_ENTRY_H

#include <stddef.h>

#include "deploy/options/config.h"

/* Commands that run a model, and those that speak with other nodes. */
#define NODE "serve launch generate doctor"
#define NET  "serve launch doctor"
/* Commands that fetch a model when --pull asks for it, and the one that does nothing else. */
#define PULLS "serve launch generate"
#define PULL  "pull"
/* Those, and the router, which has the text of a model and speaks with nodes. */
#define TEXT  NODE " router"
#define ENTRY NET " router"

/* The heading under which --help lists an option, and the commands that take it. */
#define IN(group_, commands_) .group = group_, .commands = commands_

#define RANGE(min_, max_) .min = min_, .max = max_

/* Options of other systems, which change no answer here or cannot be honoured. */
#define ACCEPT(n, a, e, t, g, h, why)                                                              \
    {                                                                                              \
        .name = n, .aliases = a, .env = e, .type = t, .group = g, .commands = NODE, .help = h,     \
        .effect = EFFECT_ACCEPTED, .note = why                                                     \
    }
#define REFUSE(n, a, e, t, neutral_, g, h, why)                                                    \
    {                                                                                              \
        .name = n, .aliases = a, .env = e, .type = t, .neutral = neutral_, .group = g,             \
        .commands = NODE, .help = h, .effect = EFFECT_REFUSED, .note = why                         \
    }

/* Each ends with an entry whose name is NULL. */
extern const struct option MODEL_OPTIONS[];
extern const struct option ENGINE_OPTIONS[];
extern const struct option HTTP_OPTIONS[];
extern const struct option CLUSTER_OPTIONS[];
extern const struct option COMMAND_OPTIONS[];
extern const struct option PULL_OPTIONS[];
extern const struct option ROUTER_OPTIONS[];
extern const struct option LOGGING_OPTIONS[];
extern const struct option COMPATIBILITY_OPTIONS[];
extern const struct option OTHER_SERVERS_OPTIONS[];

#endif
