/* commands.h - the subcommands of `baton`, one table entry each.
 *
 * A command gets its own arguments (argv[0] is its name) and returns the process's exit status:
 * 0 success, 1 failure, 2 wrong usage.
 * Thread: main. */
#ifndef BATON_DEPLOY_CLI_COMMANDS_H
#define BATON_DEPLOY_CLI_COMMANDS_H

#include "deploy/launch/ranks.h"
#include "deploy/pull/pull.h"
#include "shared/base/address/host_port.h"

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
};

extern const struct command COMMANDS[]; /* NULL name ends it */

int cmd_serve(int argc, char **argv);
int cmd_launch(int argc, char **argv);
int cmd_router(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_pull(int argc, char **argv);
int cmd_start_server(int argc, char **argv);
int cmd_stop_server(int argc, char **argv);
int cmd_status(int argc, char **argv);
int cmd_top(int argc, char **argv);
int cmd_role(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_nics(int argc, char **argv);
int cmd_version(int argc, char **argv);
int cmd_docs(int argc, char **argv);

/* Reads the environment and the arguments of `command` with the option table. --help prints the
 * help and sets *done, unless it is about a word that no option has. NULL on failure, after
 * printing the sentence to stderr; the caller returns 2. `words` receives at most *n_words words
 * that are not options (NULL: none allowed). */
struct config *command_config(const char *command, const char *intro, int argc, char **argv,
                              const char **words, int *n_words, bool *done);

/* What the options say about hubs, for commands that fetch models; the rest as if nothing was
 * given. Texts are borrowed from `c`. */
struct pull_options command_pull_options(const struct config *c);
/* --pull: fetches --model if it is neither a path nor on this host, and makes --model its folder
 * where org/name does not find it; likewise the small model that drafts, which keeps its name. Says
 * on stderr why it failed, then returns an exit status; 0: go on. */
int command_pull_model(struct config *c, const char *command);

/* `--listen host:port` of doctor and bench: run the probe server that --peers on another host
 * names, until a signal. Returns the exit status. */
int command_listen(const struct config *c, const char *command);

/* Starts the nodes of a plan and supervises them until a signal; `command` is its name in messages.
 * Returns the exit status. */
struct launch_args;
struct ready_pipe;
int command_launch(struct config *c, const char *command, const struct launch_args *args);
/* What the parent of such nodes checks before it starts them (deploy/launch/ranks_model.h); prints
 * what works and is hardly meant. */
enum status command_check_ranks(const struct config *c, const struct ranks *r,
                                struct err *err) MUST_CHECK;
/* `serve` as the parent of ranks: this process has the port, and an entry node behind it. `waits`:
 * who started it. */
int command_serve_ranks(struct config *c, const struct ranks *r, struct ready_pipe *waits);

/* `router --workers N`: supervises the processes; argv holds the argc words of the command, its
 * name first. Returns the exit status. */
int command_router_workers(const struct config *c, int argc, char **argv);

/* Reads http://host:port[/...], or the same without http://; a port that is not given is 80, and
 * localhost is 127.0.0.1. False: it is not that. */
bool command_parse_url(const char *url, char host[HOST_TEXT_MAX], uint16_t *port);

/* What the answer of a node's API says that is none of 200, in a sentence: that a key is missing,
 * or its own error. `at` names the node. */
void command_explain_refusal(const char *at, int http_status, struct str answer, struct err *err);

/* Prints a sentence about an option without effect to stderr; for config_notes. */
void command_print_note(void *arg, const char *sentence);
/* Prints a note for each option and variable that was given and has no effect; none at --log-level
 * warn and error. */
void command_print_notes(const struct config *c);

#endif
