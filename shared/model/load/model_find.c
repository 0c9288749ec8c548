/* model_find.c - finds the folder or file of a model name: paths first, then local caches. Nothing
 * is downloaded; `baton pull` and --pull do (deploy/pull).
 *
 * Hugging Face's cache has models--ORG--NAME/{refs/main, snapshots/COMMIT/}. ModelScope's has
 * ORG/NAME, in newer versions under models/, with '.' in the name written as "___".
 *
 * Thread: any. */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/load/file_map.h"
#include "shared/model/load/gguf_split.h"
#include "shared/model/load/model_files.h"

enum {
    NAME_BYTES_MAX = 256,
    REF_BYTES_MAX = 256,
    NAME_SHOWN_MAX = 80, /* of a name and of the places looked at, in an error: one sentence */
    PLACES_SHOWN_MAX = 240
};

/* ---- one place ---- */

/* Replaces a folder without config.json by its only .gguf file, or by the first file of its only
 * split model. */
static enum status resolve_folder(struct buf *path, struct err *err)
{
    struct buf config = { 0 }, gguf = { 0 }, first = { 0 };
    size_t n_gguf = 0, n_safetensors = 0, n_split = 0;
    buf_printf(&config, "%s/config.json", path->data);
    bool has_config = file_is_regular(config.data);
    buf_release(&config);
    if (has_config) return OK;
    DIR *d = opendir(path->data);
    if (!d) return err_set(err, ERR_IO, "the folder %s cannot be read", path->data);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (str_ends(str_of(e->d_name), ".safetensors")) n_safetensors++;
        if (!str_ends(str_of(e->d_name), ".gguf")) continue;
        n_gguf++;
        buf_clear(&gguf);
        buf_printf(&gguf, "%s/%s", path->data, e->d_name);
        if (gguf_split_count(buf_str(&gguf)) == 0) continue;
        n_split = gguf_split_count(buf_str(&gguf));
        buf_clear(&first);
        buf_add_str(&first, buf_str(&gguf));
    }
    closedir(d);
    enum status st = OK;
    if (n_gguf > 1 && n_gguf != n_split)
        st = err_set(err, ERR_CONFIG, "the folder %s holds %zu .gguf files: name one of them",
                     path->data, n_gguf);
    else if (n_gguf == 0)
        st = err_set(err, ERR_NOT_FOUND, "the folder %s holds no config.json and no .gguf file%s",
                     path->data,
                     n_safetensors ? " (its weights alone do not say what model it is)" : "");
    if (st == OK) {
        buf_clear(path);
        buf_add_str(path, buf_str(n_gguf > 1 ? &first : &gguf));
    }
    buf_release(&gguf);
    buf_release(&first);
    return st;
}

/* Does the candidate `path` exist? If not, adds it to `looked`. */
static bool is_there(const struct buf *path, struct buf *looked)
{
    if (file_is_folder(path->data) || file_is_regular(path->data)) return true;
    buf_printf(looked, "%s%s", looked->len ? ", " : "", path->data);
    return false;
}

/* ---- caches ---- */

static bool find_in_folders(const char *folders, const char *name, struct buf *out,
                            struct buf *looked)
{
    struct str rest = str_of(folders), folder;
    while (str_split(&rest, ':', &folder)) {
        if (folder.n == 0) continue;
        static const char *const SUFFIXES[] = { "", ".gguf" };
        for (size_t i = 0; i < COUNT_OF(SUFFIXES); i++) {
            buf_clear(out);
            buf_printf(out, "%.*s/%s%s", STR_ARG(folder), name, SUFFIXES[i]);
            if (is_there(out, looked)) return true;
        }
    }
    return false;
}

void model_cache_folder(struct buf *out)
{
    const char *own = getenv("BATON_CACHE"), *cache = getenv("XDG_CACHE_HOME"),
               *user = getenv("HOME");
    if (own && *own) buf_printf(out, "%s/models", own);
    else if (cache && *cache) buf_printf(out, "%s/baton/models", cache);
    else buf_printf(out, "%s/.cache/baton/models", user ? user : "");
}

/* A folder of `baton pull` counts once it is complete. */
static bool find_pulled(const char *name, struct buf *out, struct buf *looked)
{
    struct buf marker = { 0 };
    buf_clear(out);
    model_cache_folder(out);
    buf_printf(out, "/%s", name);
    buf_printf(&marker, "%s/%s", out->data, MODEL_PULLED);
    bool complete = file_is_regular(marker.data);
    buf_release(&marker);
    if (complete) return true;
    if (is_there(out, looked))
        buf_printf(looked, "%s%s (not complete)", looked->len ? ", " : "", out->data);
    return false;
}

/* Replaces `repo`, a path to models--ORG--NAME, by its snapshot: the one that refs/main names, or
 * the only one. */
static bool find_snapshot(struct buf *repo)
{
    struct buf path = { 0 }, ref = { 0 };
    struct err err;
    bool found = false;
    buf_printf(&path, "%s/refs/main", repo->data);
    if (file_read(path.data, REF_BYTES_MAX, &ref, &err) == OK) {
        struct str commit = str_trim(buf_str(&ref));
        buf_clear(&path);
        buf_printf(&path, "%s/snapshots/%.*s", repo->data, STR_ARG(commit));
        found = commit.n > 0 && commit.p[0] != '.' && str_find_char(commit, '/') == SIZE_MAX &&
                file_is_folder(path.data);
    }
    if (!found) {
        struct buf folder = { 0 };
        size_t n = 0;
        buf_printf(&folder, "%s/snapshots", repo->data);
        DIR *d = opendir(folder.data);
        for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
            if (e->d_name[0] == '.') continue;
            n++;
            buf_clear(&path);
            buf_printf(&path, "%s/%s", folder.data, e->d_name);
        }
        if (d) closedir(d);
        found = n == 1 && file_is_folder(path.data);
        buf_release(&folder);
    }
    if (found) {
        buf_clear(repo);
        buf_add_str(repo, buf_str(&path));
    }
    buf_release(&path);
    buf_release(&ref);
    return found;
}

static bool find_in_hugging_face(const char *name, struct buf *out, struct buf *looked)
{
    const char *hub = getenv("HF_HUB_CACHE"), *home = getenv("HF_HOME"),
               *cache = getenv("XDG_CACHE_HOME"), *user = getenv("HOME");
    buf_clear(out);
    if (hub && *hub) buf_add_c(out, hub);
    else if (home && *home) buf_printf(out, "%s/hub", home);
    else if (cache && *cache) buf_printf(out, "%s/huggingface/hub", cache);
    else buf_printf(out, "%s/.cache/huggingface/hub", user ? user : "");
    buf_add_c(out, "/models--");
    for (const char *c = name; *c; c++) {
        if (*c == '/') buf_add_c(out, "--");
        else buf_add_char(out, *c);
    }
    if (!is_there(out, looked)) return false;
    if (find_snapshot(out)) return true;
    buf_printf(looked, "%s%s (no snapshot)", looked->len ? ", " : "", out->data);
    return false;
}

static bool find_in_modelscope(const char *name, struct buf *out, struct buf *looked)
{
    const char *cache = getenv("MODELSCOPE_CACHE"), *user = getenv("HOME");
    struct buf root = { 0 }, written = { 0 };
    if (cache && *cache) buf_add_c(&root, cache);
    else buf_printf(&root, "%s/.cache/modelscope/hub", user ? user : "");
    for (const char *c = name; *c; c++) {
        if (*c == '.') buf_add_c(&written, "___");
        else buf_add_char(&written, *c);
    }
    static const char *const FOLDERS[] = { "", "/models", "/hub", "/hub/models" };
    bool found = false;
    for (size_t i = 0; i < COUNT_OF(FOLDERS) && !found; i++)
        for (int plain = 0; plain < 2 && !found; plain++) {
            const char *spelled = plain ? name : written.data;
            if (plain && strcmp(name, written.data) == 0) continue;
            buf_clear(out);
            buf_printf(out, "%s%s/%s", root.data, FOLDERS[i], spelled);
            found = is_there(out, looked);
        }
    buf_release(&root);
    buf_release(&written);
    return found;
}

/* ---- all ---- */

/* "name" or "org/name" of letters, digits and -_. only: a name cannot leave the cache folder.
 * max_slashes 2: also what has a file or a quantisation behind it. */
static bool is_plain_name(const char *name, size_t max_slashes)
{
    size_t n = strlen(name), slashes = 0;
    if (n == 0 || n > NAME_BYTES_MAX || name[0] == '/' || name[n - 1] == '/') return false;
    for (size_t i = 0; i < n; i++) {
        char c = name[i];
        if (c == '/') slashes++;
        else if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                   strchr("-_.", c)))
            return false;
        if (c == '.' && (i == 0 || name[i - 1] == '/')) return false;
    }
    return slashes <= max_slashes;
}

static bool is_model_name(const char *name) { return is_plain_name(name, 1); }

/* Cuts a list of places that does not fit into a sentence, between two places. */
static void shorten(struct buf *looked)
{
    size_t n = looked->len;
    if (n <= PLACES_SHOWN_MAX) return;
    for (n = PLACES_SHOWN_MAX; n > 0 && looked->data[n] != ','; n--) {}
    looked->len = n;
    looked->data[n] = 0;
    buf_add_c(looked, " and more places of the same kind");
}

/* "https://huggingface.co/org/name/..." and "hf://org/name" are addresses of org/name: `out` gets
 * it, empty when the address has no such part. False: `name` is not an address. */
static bool is_address(const char *name, struct buf *out)
{
    struct str rest = str_of(name), scheme, part, org, model;
    size_t n = strcspn(name, ":");
    if (strncmp(name + n, "://", 3) != 0) return false;
    scheme = str_sub(rest, 0, n);
    rest = str_sub(rest, n + 3, SIZE_MAX);
    if (!str_eq_c(scheme, "hf") && !str_split(&rest, '/', &part)) return true;
    if (str_split(&rest, '/', &org) && str_split(&rest, '/', &model) && org.n && model.n)
        buf_printf(out, "%.*s/%.*s", STR_ARG(org), STR_ARG(model));
    if (out->len && !is_model_name(out->data)) buf_clear(out);
    return true;
}

/* Nothing is downloaded without being asked for, which a user of other servers may not expect. */
static enum status not_here(const char *name, struct buf *looked, struct err *err)
{
    struct buf repo = { 0 }, todo = { 0 };
    bool address = is_address(name, &repo);
    if (!address && is_plain_name(name, 2) && strchr(name, '/')) buf_add_c(&repo, name);
    if (repo.len && repo.len <= NAME_SHOWN_MAX)
        buf_printf(&todo, "fetch it with `baton pull %s`%s%s, or add --pull", repo.data,
                   address ? " and give --model " : "", address ? repo.data : "");
    else buf_add_c(&todo, "give a folder or a file that is here, or org/name and --pull");
    shorten(looked);
    enum status st = err_field(
        err, ERR_NOT_FOUND, "model", "model \"%.*s\" is not on this host: %s; looked at: %s",
        NAME_SHOWN_MAX, name, todo.data, looked->len ? looked->data : "nothing");
    buf_release(&repo);
    buf_release(&todo);
    return st;
}

enum status model_find(const char *name, struct buf *out, struct err *err)
{
    struct buf path = { 0 }, looked = { 0 };
    const char *folders = getenv("BATON_MODELS");
    buf_add_c(&path, name);
    bool found = name[0] && is_there(&path, &looked);
    if (!found && is_model_name(name)) {
        found = folders && find_in_folders(folders, name, &path, &looked);
        if (!found) found = find_pulled(name, &path, &looked);
        if (!found) found = find_in_hugging_face(name, &path, &looked);
        if (!found) found = find_in_modelscope(name, &path, &looked);
    }
    enum status st = found ? OK : not_here(name, &looked, err);
    if (st == OK && file_is_folder(path.data)) st = resolve_folder(&path, err);
    if (st == OK) {
        buf_clear(out);
        buf_add_str(out, buf_str(&path));
    }
    buf_release(&path);
    buf_release(&looked);
    return st;
}
