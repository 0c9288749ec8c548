/* option_table_logging.c - options of the log. Thread: any (a constant table). */
#include "deploy/options/option_entry.h"

const struct option LOGGING_OPTIONS[] = {
    {
        .name = "log-level",
        .env = "BATON_LOG_LEVEL",
        .type = OPT_ENUM,
        .choices = "error|warn|info|debug",
        .def = "info",
        .group = "Logging",
        .help = "Least important lines shown.",
    },
    {
        .name = "log-dir",
        .env = "BATON_LOG_DIR FD_LOG_DIR",
        .type = OPT_STRING,
        .service_def = "log",
        IN("Logging", TEXT),
        .help = "Also write the log to this folder: baton-PORT.log of a node "
                "(baton-process-PID.log with --port 0), baton-router-PORT.log of a router, "
                "baton-launch.log of the launcher, baton-generate.log of `generate`. SIGHUP opens "
                "it again.",
    },
    {
        .name = "log-to-console",
        .env = "BATON_LOG_TO_CONSOLE",
        .service_env = "OUTPUT_LOG_TO_CONSOLE",
        .type = OPT_BOOL,
        .def = "true",
        .service_def = "false",
        IN("Logging", TEXT),
        .help = "With --log-dir: write the log to standard error as well.",
        .works_with = "log-dir",
        .note = "without --log-dir the log goes to standard error",
    },
    {
        .name = "log-max-mib",
        .env = "BATON_LOG_MAX_MIB",
        .type = OPT_INT,
        RANGE(0, 1048576),
        .def = "100",
        IN("Logging", TEXT),
        .help = "Size at which the file in --log-dir is renamed (.1, .2, ...) and a new one begun; "
                "0: never.",
    },
    {
        .name = "log-files",
        .env = "BATON_LOG_FILES",
        .type = OPT_INT,
        RANGE(0, 1000),
        .def = "5",
        IN("Logging", TEXT),
        .help = "How many renamed files are kept.",
    },
    {
        .name = "log-requests",
        .aliases = "enable-log-requests",
        .env = "BATON_LOG_REQUESTS",
        .type = OPT_BOOL,
        IN("Logging", ENTRY),
        .help = "Log each request's begin (its number and x-request-id) and end, with the time of "
                "each of its stages, at level info; else at level debug.",
    },
    { .name = NULL },
};
