/* pull_model.c - the options about fetching, and --pull of the commands that run a model.
 * Thread: main. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "deploy/cli/commands.h"
#include "deploy/draft/draft_options.h"
#include "deploy/pull/pull.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/model/load/model_files.h"

/* vLLM's switch, where nothing else says which hub is meant. */
static bool is_modelscope(const struct config *c)
{
    const char *vllm = getenv("VLLM_USE_MODELSCOPE");
    if (config_is_set(c, "model-source"))
        return strcmp(config_string(c, "model-source"), "modelscope") == 0;
    return vllm && (strcasecmp(vllm, "true") == 0 || strcmp(vllm, "1") == 0);
}

struct pull_options command_pull_options(const struct config *c)
{
    return (struct pull_options){
        .hub = is_modelscope(c) ? PULL_MODELSCOPE : PULL_HUGGING_FACE,
        .hf_endpoint = config_string(c, "hf-endpoint"),
        .modelscope_endpoint = config_string(c, "modelscope-endpoint"),
        .n_connections = PULL_CONNECTIONS,
        .n_retries = PULL_RETRIES,
        .stall_ms = PULL_STALL_MS,
        .chunk_bytes = PULL_CHUNK_BYTES,
        .quiet = log_level() < LOG_INFO,
    };
}

/* Is it here under its own name? Other spellings of a model are not looked for. */
static bool is_here(const char *model)
{
    struct buf path = { 0 };
    struct err err;
    bool here = model_find(model, &path, &err) == OK;
    buf_release(&path);
    return here;
}

/* What the name asks for beside its files, unless an option says otherwise. */
static enum status take_result(struct config *c, const char *given, const struct pull_result *r,
                               struct err *err)
{
    if (!config_is_set(c, "served-model-name")) TRY(config_set(c, "served-model-name", given, err));
    if (r->source.quantization && !config_is_set(c, "quantization"))
        TRY(config_set(c, "quantization", r->source.quantization, err));
    if (r->source.note && log_level() >= LOG_INFO) command_print_note(NULL, r->source.note);
    return config_set(c, "model", r->path.data, err);
}

/* Fetches it unless it is here. r->path has no bytes then. */
static enum status pull_absent(const struct config *c, const char *model, struct pull_result *r,
                               struct err *err)
{
    if (!source_is_elsewhere(model) || is_here(model)) return OK;
    struct pull_options o = command_pull_options(c);
    o.what = model;
    o.only_if_absent = true;
    return pull_run(&o, r, err);
}

static enum status pull_main(struct config *c, struct err *err)
{
    struct pull_result r = { 0 };
    if (!config_string(c, "model")) return OK;
    char *given = mem_strdup(config_string(c, "model"));
    enum status st = pull_absent(c, given, &r, err);
    if (st == OK && r.path.len) st = take_result(c, given, &r, err);
    mem_free(given);
    buf_release(&r.path);
    return st;
}

/* The small model that drafts. An address is no name by which it would be found again. What is
 * wrong with the options is said by who reads them next. */
static enum status pull_draft(struct config *c, struct err *err)
{
    struct draft_config draft;
    struct buf notes = { 0 };
    struct err ignored;
    struct pull_result r = { 0 };
    enum status st = OK;
    if (draft_options_read(c, &draft, &notes, &ignored) == OK && draft.ops == &drafter_model_ops)
        st = pull_absent(c, draft.model, &r, err);
    if (st == OK && r.path.len) st = draft_options_set_model(c, r.path.data, err);
    buf_release(&notes);
    buf_release(&r.path);
    return st;
}

int command_pull_model(struct config *c, const char *command)
{
    struct err err = { 0 };
    if (!config_bool(c, "pull")) return 0;
    enum status st = pull_main(c, &err);
    if (st == OK) st = pull_draft(c, &err);
    if (st == OK) return 0;
    log_fatal(command, err.text);
    return st == ERR_CONFIG ? 2 : st == ERR_CANCELED ? 130 : 1;
}
