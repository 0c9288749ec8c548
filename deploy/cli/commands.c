/* commands.c - the table of subcommands, and reading the configuration that they share.
 * Thread: main. */
#include "deploy/cli/commands.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/options/compatibility.h"
#include "deploy/options/environment.h"
#include "deploy/options/option_table.h"
#include "deploy/service/service.h"
#include "shared/base/address/host_port.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"

const struct command COMMANDS[] = {
    { "serve", cmd_serve, "one node: API server, scheduler, engine" },
    { "launch", cmd_launch, "start and supervise the nodes of this host" },
    { "router", cmd_router, "one address for all nodes: an entry without an engine" },
    { "start_server", cmd_start_server, "serve in the background, by PaddleNLP's variables" },
    { "stop_server", cmd_stop_server, "stop what start_server has started" },
    { "generate", cmd_generate, "offline: a file of requests, or one prompt" },
    { "pull", cmd_pull, "fetch a model: a repository, a .gguf file, a folder" },
    { "status", cmd_status, "the cluster as a node sees it" },
    { "top", cmd_top, "the same, again and again: status --watch" },
    { "role", cmd_role, "change what a running node does: prefill, decode or mixed" },
    { "doctor", cmd_doctor, "check this host before the first request" },
    { "bench", cmd_bench, "how fast KV moves, compared with the machine's limits" },
    { "nics", cmd_nics, "RDMA devices and network interface to use, for export $(...)" },
    { "version", cmd_version, "version and what it was built with" },
    { "docs", cmd_docs, "print the pages of docs/ that are made from tables" },
    { NULL, NULL, NULL },
};

static struct config *fail(struct config *c, const char *command, const struct err *err)
{
    fprintf(stderr, "baton %s: %s\n", command, err->text);
    config_free(c);
    return NULL;
}

static void print_warning(void *arg, const char *sentence)
{
    (void)arg;
    fprintf(stderr, "warning: %s\n", sentence);
}

/* Says which variables nothing reads. A node that a launcher started leaves it to the launcher. */
static enum status check_environment(const struct config *c, const char *command, struct err *err)
{
    bool starts_nodes = strcmp(command, "serve") == 0 || strcmp(command, "launch") == 0 ||
                        strcmp(command, "router") == 0;
    if (getenv("BATON_SUPERVISED") || strcmp(command, "docs") == 0 ||
        strcmp(command, "version") == 0)
        return OK;
    if (starts_nodes) TRY(environment_check(c, err));
    if (strcmp(config_string(c, "log-level"), "error") != 0)
        environment_warnings(print_warning, NULL);
    return OK;
}

static void say_no_option(const char *command, const char *word)
{
    struct str meant = config_help_near(OPTIONS, command, word);
    fprintf(stderr, "baton: no option of baton %s is about \"%s\"%s%.*s%s; --help-all lists them\n",
            command, word, meant.n ? ", did you mean --" : "", STR_ARG(meant), meant.n ? "?" : "");
}

struct config *command_config(const char *command, const char *intro, int argc, char **argv,
                              const char **words, int *n_words, bool *done)
{
    struct err err = { 0 };
    int none = 0;
    *done = false;
    for (int i = 1; i < argc; i++) {
        bool all = str_eq_c(str_of(argv[i]), "--help-all");
        const char *word = str_starts(str_of(argv[i]), "--help=") ? argv[i] + 7 : NULL;
        if (!all && !word && !str_eq_c(str_of(argv[i]), "--help") &&
            !str_eq_c(str_of(argv[i]), "-h"))
            continue;
        struct buf text = { 0 };
        const struct config_help_options o = {
            .command = command, .intro = word ? NULL : intro, .all = all || word, .word = word
        };
        config_help(OPTIONS, &o, &text);
        *done = text.len > 0;
        if (*done) fwrite(text.data, 1, text.len, stdout);
        else say_no_option(command, word);
        buf_release(&text);
        return NULL;
    }
    struct config *c = config_create(OPTIONS, command);
    const bool serves = strcmp(command, "serve") == 0;
    if (serves && service_is_on()) config_as_service(c);
    if (config_load_env(c, &err) != OK) return fail(c, command, &err);
    if (config_load_args(c, argc - 1, argv + 1, words, n_words ? n_words : &none, &err) != OK)
        return fail(c, command, &err);
    if ((serves || strcmp(command, "launch") == 0) && service_complete(c, &err) != OK)
        return fail(c, command, &err);
    if (check_environment(c, command, &err) != OK) return fail(c, command, &err);
    return c;
}

bool command_parse_url(const char *url, char host[HOST_TEXT_MAX], uint16_t *port)
{
    const char *p = strncasecmp(url, "http://", 7) == 0 ? url + 7 : url;
    if (strstr(p, "://")) return false; /* a key must not travel in clear text */
    char at[HOST_PORT_TEXT_MAX];
    size_t n = strcspn(p, "/"), name = p[0] == '[' ? strcspn(p, "]") : 0;
    bool has_port = memchr(p + name, ':', n > name ? n - name : 0) != NULL;
    if (n + 4 > sizeof at) return false;
    snprintf(at, sizeof at, "%.*s%s", (int)n, p, has_port ? "" : ":80");
    if (!host_port_parse(at, host, port) || !host[0] || *port == 0) return false;
    if (strcmp(host, "localhost") == 0) snprintf(host, HOST_TEXT_MAX, "127.0.0.1");
    return true;
}

void command_explain_refusal(const char *at, int http_status, struct str answer, struct err *err)
{
    struct err unread;
    cJSON *doc = NULL;
    const cJSON *error = json_parse(answer, false, &doc, &unread) == OK ? json_member(doc, "error")
                                                                        : NULL,
                *said = cJSON_IsObject(error) ? json_member(error, "message") : error;
    if (http_status == 401)
        (void)err_set(err, ERR_UNAUTHORIZED,
                      "%s wants a key: give one of its own with --api-key or BATON_API_KEY", at);
    else if (cJSON_IsString(said))
        (void)err_set(err, ERR_PEER_REFUSED, "%s answered %d: %s", at, http_status,
                      said->valuestring);
    else
        (void)err_set(err, ERR_PEER_REFUSED, "%s answered %d: %.*s", at, http_status,
                      STR_ARG(answer));
    cJSON_Delete(doc);
}

void command_print_note(void *arg, const char *sentence)
{
    (void)arg;
    fprintf(stderr, "note: %s\n", sentence);
}

void command_print_notes(const struct config *c)
{
    if (log_level() < LOG_INFO) return;
    config_notes(c, command_print_note, NULL);
    compatibility_env_notes(config_is_service(c), command_print_note, NULL);
}
