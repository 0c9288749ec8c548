/* commands.h - the subcommands of `baton`: one row each. A command gets its own arguments (argv[0]
 * is its name) and returns the process's exit status: 0 well, 1 failed, 2 wrong usage. Thread:
 * main. */
#ifndef BATON_DEPLOY_CLI_COMMANDS_H
#define BATON_DEPLOY_CLI_COMMANDS_H

#include "deploy/options/config.h"

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
};

extern const struct command COMMANDS[]; /* NULL name ends it */

int cmd_serve(int argc, char **argv);
int cmd_launch(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_status(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_version(int argc, char **argv);
int cmd_docs(int argc, char **argv);

/* Read environment and arguments of `command` with the option table
 * (deploy/options/option_table.h). --help prints and gives *done = true. On failure the sentence
 * has been printed to stderr; the caller returns 2. `words` receives at most *n_words words that
 * are not options (NULL: none allowed). */
struct config *command_config(const char *command, const char *intro, int argc, char **argv,
                              const char **words, int *n_words, bool *done);

/* `--listen host:port` of doctor and bench: be the agent that --peers of another host names, until
 * a signal. Returns the exit status. */
int command_listen(const struct config *c, const char *command);

/* One sentence about an option without effect, on stderr; for config_notes. */
void command_print_note(void *arg, const char *sentence);

#endif
