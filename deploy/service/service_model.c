/* service_model.c - see service_model.h. */
#include "deploy/service/service_model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "deploy/node/node_options.h"
#include "deploy/pull/source.h"
#include "deploy/service/service.h"
#include "shared/model/load/model_files.h"

static const char *variable(const char *name, const char *usual)
{
    const char *value = getenv(name);
    return value && *value ? value : usual;
}

const char *service_model_dir(void) { return variable("MODEL_DIR", SERVICE_MODELS); }

const char *service_model_name(void) { return variable("model_name", NULL); }

static bool is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* A path that has a model: a file, or a folder with a config.json or a single .gguf. */
static bool has_model(const char *path, struct buf *out)
{
    struct buf found = { 0 }, config = { 0 };
    struct err err = { 0 };
    struct stat st;
    bool has = stat(path, &st) == 0 && model_find(path, &found, &err) == OK;
    if (has) buf_printf(&config, "%s/config.json", found.data);
    has = has && (is_file(found.data) || is_file(config.data));
    if (has) buf_add_str(out, buf_str(&found));
    buf_release(&found);
    buf_release(&config);
    return has;
}

static bool has_named_model(const char *name, struct buf *out)
{
    struct buf below = { 0 };
    buf_printf(&below, "%s/%s", service_model_dir(), name);
    const bool has = has_model(below.data, out);
    buf_release(&below);
    return has;
}

/* Is it a name that hubs have? Of a static model *out has the checkpoint, and its quantisation. */
static bool read_name(const char *name, struct pull_source *out)
{
    const struct source_options o = { .hub = PULL_HUGGING_FACE };
    struct err err;
    return source_is_elsewhere(name) && source_parse(name, &o, out, &err) == OK;
}

static enum status find_named(const char *name, struct buf *path, struct err *err)
{
    struct pull_source source;
    if (has_named_model(name, path)) return OK;
    const enum status st = node_options_find_model(name, path, err);
    if (st != ERR_NOT_FOUND) return st == OK ? OK : err_prefix(err, "model_name: ");
    if (read_name(name, &source) && !source.file[0] && !source.part[0] &&
        model_find(source.repository, path, err) == OK)
        return OK;
    return err_set(err, ERR_NOT_FOUND,
                   "model_name %.200s: MODEL_DIR (%.200s) has no such folder, "
                   "and no local cache has that model",
                   name, service_model_dir());
}

enum status service_model_find(struct buf *path, const char **by, struct err *err)
{
    const char *name = service_model_name(), *dir = service_model_dir(),
               *how = getenv(SERVICE_VARIABLE);
    const bool is_argument = name && how && strcmp(how, SERVICE_NAMED) == 0;
    *by = "MODEL_DIR";
    if (!is_argument && has_model(dir, path)) return OK;
    *by = "model_name";
    if (name) return find_named(name, path, err);
    return err_set(err, ERR_CONFIG,
                   "MODEL_DIR (%.200s) has no model: neither a config.json nor a single .gguf file "
                   "is there; set it to the folder of a model, or name one: start_server NAME",
                   dir);
}

bool service_model_is_elsewhere(const char *name)
{
    struct pull_source source;
    return read_name(name, &source);
}

/* A static model's name says how its weights are to be. */
static enum status take_quantization(struct config *c, const char *name, struct err *err)
{
    struct pull_source source;
    if (config_is_set(c, "quantization") || !read_name(name, &source) || !source.quantization)
        return OK;
    return config_set_from(c, "quantization", source.quantization, "model_name", err);
}

enum status service_model_complete(struct config *c, struct err *err)
{
    struct buf path = { 0 };
    const char *by, *name = service_model_name();
    if (config_is_set(c, "model")) return OK;
    enum status st = service_model_find(&path, &by, err);
    if (st == OK) st = config_set_from(c, "model", path.data, by, err);
    if (st == OK && strcmp(by, "model_name") == 0 && !config_is_set(c, "served-model-name"))
        st = config_set_from(c, "served-model-name", name, by, err);
    if (st == OK && name) st = take_quantization(c, name, err);
    buf_release(&path);
    return st;
}
