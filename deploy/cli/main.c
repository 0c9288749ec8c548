/* main.c - `baton COMMAND ...`: finds the command and runs it. Thread: main. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "deploy/cli/commands.h"
#include "deploy/options/near_name.h"
#include "shared/base/buf.h"
#include "shared/base/mem.h"
#include "shared/base/str.h"

static void usage(FILE *to)
{
    fprintf(to,
            "baton %s: large language models served with prefill and decode on different "
            "nodes\n\nusage: baton COMMAND [options]\n\n",
            BATON_VERSION);
    for (const struct command *c = COMMANDS; c->name; c++)
        fprintf(to, "  %-12s %s\n", c->name, c->summary);
    fprintf(to, "\n`baton COMMAND --help` lists the options of a command, --help=WORD those about "
                "WORD (`baton help WORD`: of serve), --help-all those without effect too.\n");
}

static const struct command *find(const char *name)
{
    for (const struct command *c = COMMANDS; c->name; c++)
        if (strcmp(c->name, name) == 0) return c;
    return NULL;
}

/* Commands of other programs, and what does that job here. */
static const struct {
    const char *name, *instead;
} OTHERS_COMMANDS[] = {
    { "run", "`baton serve` starts a node, `baton generate --prompt` answers one prompt" },
    { "chat", "`baton generate --prompt` answers one prompt; a node of `baton serve` has the chat "
              "API" },
    { "api_server", "`baton serve` starts a node with the OpenAI API" },
};

static struct str near_command(const char *name)
{
    struct near_search near;
    near_begin(&near, str_of(name));
    for (size_t i = 0; COMMANDS[i].name; i++) near_offer(&near, str_of(COMMANDS[i].name), i);
    return near_found(&near);
}

static void say_unknown(const char *name)
{
    for (size_t i = 0; i < sizeof OTHERS_COMMANDS / sizeof *OTHERS_COMMANDS; i++) {
        if (strcmp(OTHERS_COMMANDS[i].name, name) != 0) continue;
        fprintf(stderr, "baton: there is no command '%s': %s\n", name, OTHERS_COMMANDS[i].instead);
        return;
    }
    struct str meant = near_command(name);
    fprintf(stderr, "baton: there is no command '%s'%s%.*s%s; `baton --help` lists them\n", name,
            meant.n ? ", did you mean '" : "", STR_ARG(meant), meant.n ? "'?" : "");
}

/* `baton help WORD...`: a command, or what options of a node are about. */
static int help_about(int n_words, char **words)
{
    const struct command *c = n_words == 1 ? find(words[0]) : NULL;
    struct buf flag = { 0 };
    if (c) return c->run(2, (char *[]){ (char *)c->name, "--help", NULL });
    if (n_words == 1 && words[0][0] != '-' && near_command(words[0]).n) {
        say_unknown(words[0]);
        return 2;
    }
    buf_add_c(&flag, "--help=");
    for (int i = 0; i < n_words; i++) buf_printf(&flag, "%s%s", i ? " " : "", words[i]);
    int exit_status = find("serve")->run(2, (char *[]){ "serve", flag.data, NULL });
    buf_release(&flag);
    return exit_status;
}

int main(int argc, char **argv)
{
    mem_return_large_blocks();
    signal(SIGPIPE, SIG_IGN); /* a lost client or peer is an error of its socket, not a signal */
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (strncmp(argv[1], "--help=", 7) == 0 || strcmp(argv[1], "--help-all") == 0)
        return find("serve")->run(2, (char *[]){ "serve", argv[1], NULL });
    if (argc > 2 && strcmp(argv[1], "help") == 0) return help_about(argc - 2, argv + 2);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        usage(stdout);
        return 0;
    }
    const char *name = strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-v") == 0 ? "version"
                                                                                       : argv[1];
    const struct command *c = find(name);
    if (!c) {
        say_unknown(argv[1]);
        return 2;
    }
    return c->run(argc - 1, argv + 1);
}
