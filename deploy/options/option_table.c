/* option_table.c - every option of every command: the parts, in the order of --help. An option has
 * FastDeploy's name where there is one; vLLM's names are aliases. An option whose effect is not
 * EFFECT_WORKS has the sentence that is printed when it is given.
 * Thread: any (a constant table). */
#include "deploy/options/option_table.h"

#include "deploy/options/option_entry.h"

/* clang-format off: one line each */
const struct option *const OPTIONS[] = {
    MODEL_OPTIONS,         ENGINE_OPTIONS,        HTTP_OPTIONS, CLUSTER_OPTIONS,
    ROUTER_OPTIONS,        COMMAND_OPTIONS,       PULL_OPTIONS, LOGGING_OPTIONS,
    COMPATIBILITY_OPTIONS, OTHER_SERVERS_OPTIONS, NULL,
};
/* clang-format on */
