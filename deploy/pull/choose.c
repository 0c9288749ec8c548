/* choose.c - see choose.h. Thread: any. */
#include "deploy/pull/choose.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "shared/base/json/json.h"
#include "shared/base/map.h"
#include "shared/model/load/foreign_checkpoint.h"
#include "shared/model/load/model_files.h"

enum { SHOWN_MAX = 6 };

static bool ends(const struct pull_file *f, const char *suffix)
{
    return str_ends(str_of(f->name), suffix);
}

/* ---- split .gguf models ---- */

/* Of "STEM-00002-of-00005.gguf" the length of STEM and the two numbers; false: not of a split. */
static bool is_split(const char *name, size_t *stem, unsigned *i, unsigned *n)
{
    const size_t length = strlen(name), tail = strlen("-00001-of-00001.gguf");
    int end = 0;
    if (length <= tail) return false;
    *stem = length - tail;
    return sscanf(name + *stem, "-%5u-of-%5u.gguf%n", i, n, &end) == 2 && (size_t)end == tail;
}

/* Are both parts of one model, or the same file? */
static bool is_same_model(const char *a, const char *b)
{
    size_t stem_a, stem_b;
    unsigned i, n_a, n_b;
    if (strcmp(a, b) == 0) return true;
    return is_split(a, &stem_a, &i, &n_a) && is_split(b, &stem_b, &i, &n_b) && n_a == n_b &&
           stem_a == stem_b && memcmp(a, b, stem_a) == 0;
}

uint32_t choose_split_parts(const char *name)
{
    size_t stem;
    unsigned i, n;
    return is_split(name, &stem, &i, &n) ? n : 0;
}

void choose_split_name(const char *name, uint32_t i, struct buf *out)
{
    size_t stem;
    unsigned own, n;
    buf_clear(out);
    if (is_split(name, &stem, &own, &n))
        buf_printf(out, "%.*s-%05u-of-%05u.gguf", (int)stem, name, i, n);
}

/* Takes the choice as one model: all parts of a split must be there. */
static enum status check_split(const struct file_list *l, const char *name, struct err *err)
{
    size_t stem;
    unsigned i, n, n_found = 0;
    if (!is_split(name, &stem, &i, &n)) return OK;
    for (size_t k = 0; k < l->n; k++) n_found += is_same_model(l->files[k].name, name);
    if (n_found == n) return OK;
    return err_set(err, ERR_NOT_FOUND, "%.200s is one of %u files, of which the source has %u",
                   name, n, n_found);
}

/* ---- what to say ---- */

static void list_chosen(const struct file_list *l, struct buf *out)
{
    size_t n = 0;
    for (size_t i = 0; i < l->n; i++) {
        if (!l->files[i].chosen) continue;
        if (n++ < SHOWN_MAX) buf_printf(out, "%s%.60s", n > 1 ? ", " : "", l->files[i].name);
    }
    if (n > SHOWN_MAX) buf_printf(out, " and %zu more", n - SHOWN_MAX);
}

static void forget(struct file_list *l)
{
    for (size_t i = 0; i < l->n; i++) l->files[i].chosen = false;
}

static enum status say_which(struct file_list *l, struct err *err)
{
    struct buf names = { 0 };
    list_chosen(l, &names);
    forget(l);
    enum status st = err_set(err, ERR_NOT_FOUND,
                             "the source has several models in .gguf files: name one of them as "
                             "org/name/FILE or org/name:Q4_K_M (%s)",
                             names.data);
    buf_release(&names);
    return st;
}

static enum status say_nothing_found(const struct file_list *l, struct err *err)
{
    size_t n_static = 0, n_torch = 0;
    for (size_t i = 0; i < l->n; i++) {
        const struct pull_file *f = &l->files[i];
        n_static += ends(f, ".pdiparams") || ends(f, ".pdmodel");
        n_torch += ends(f, ".bin") || ends(f, ".pth") || ends(f, ".pt");
    }
    if (n_static) return err_set(err, ERR_UNSUPPORTED, "%s", FOREIGN_STATIC);
    if (n_torch)
        return err_set(err, ERR_UNSUPPORTED,
                       "the source has weights in PyTorch's pickled files alone, which are not "
                       "read: pull one in safetensors or GGUF");
    return err_set(err, ERR_NOT_FOUND,
                   "the source has neither model.safetensors nor " CHOOSE_INDEX
                   " nor a .gguf file; --include names files by patterns");
}

/* ---- .gguf ---- */

static bool has_part(const char *name, const char *part)
{
    const size_t n = strlen(part);
    for (; *name; name++)
        if (strncasecmp(name, part, n) == 0) return true;
    return n == 0;
}

/* Projectors of images and importance matrices lie beside models. */
bool choose_is_gguf(const char *name, const char *part)
{
    return str_ends(str_of(name), ".gguf") && !strstr(name, "mmproj") && !strstr(name, "imatrix") &&
           has_part(name, part);
}

/* Chooses the one model in .gguf files whose names have this part. */
static enum status choose_gguf(struct file_list *l, const char *part, struct err *err)
{
    const char *first = NULL;
    bool several = false;
    for (size_t i = 0; i < l->n; i++) {
        struct pull_file *f = &l->files[i];
        f->chosen = choose_is_gguf(f->name, part);
        if (f->chosen && !first) first = f->name;
        several |= f->chosen && !is_same_model(first, f->name);
    }
    if (several) return say_which(l, err);
    if (first) return check_split(l, first, err);
    if (!part[0]) return say_nothing_found(l, err);
    return err_set(err, ERR_NOT_FOUND, "the source has no .gguf file with \"%s\" in its name",
                   part);
}

/* ---- a checkpoint ---- */

static bool has(const struct file_list *l, const char *name)
{
    return file_list_find(l, name) != NULL;
}

static void choose_one(struct file_list *l, const char *name)
{
    struct pull_file *f = file_list_find(l, name);
    if (f) f->chosen = true;
}

/* A vocabulary is read only where there is no tokenizer.json, and then the first. */
static void choose_text(struct file_list *l)
{
    bool vocabulary = has(l, "tokenizer.json");
    for (const struct model_text_file *f = MODEL_TEXT_FILES; f->name; f++) {
        if (f->is_vocabulary && vocabulary) continue;
        choose_one(l, f->name);
        vocabulary |= f->is_vocabulary && has(l, f->name);
    }
}

static enum status choose_checkpoint(struct file_list *l, struct err *err)
{
    if (!has(l, "config.json"))
        return err_set(err, ERR_NOT_FOUND,
                       "the source has weights but no config.json, without which no model can be "
                       "loaded; --include names files by patterns");
    choose_text(l);
    if (!has(l, CHOOSE_INDEX)) {
        choose_one(l, "model.safetensors");
        return OK;
    }
    for (size_t i = 0; i < l->n; i++) {
        struct pull_file *f = &l->files[i];
        if (ends(f, ".safetensors") && !strchr(f->name, '/')) f->chosen = true;
    }
    choose_one(l, CHOOSE_INDEX);
    return OK;
}

/* ---- all ---- */

static bool matches(const char *name, const char *const *patterns, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct str p = str_of(patterns[i]);
        if (fnmatch(patterns[i], name, 0) == 0) return true;
        if (str_ends(p, "/") && strncmp(name, p.p, p.n) == 0) return true;
    }
    return false;
}

static enum status choose_file(struct file_list *l, const char *name, struct err *err)
{
    if (!has(l, name))
        return err_set(err, ERR_NOT_FOUND, "the source has no file \"%.200s\"", name);
    for (size_t i = 0; i < l->n; i++) l->files[i].chosen = is_same_model(l->files[i].name, name);
    return check_split(l, name, err);
}

static enum status choose(struct file_list *l, const struct choose_options *o, struct err *err)
{
    if (o->file[0]) return choose_file(l, o->file, err);
    if (o->part[0]) return choose_gguf(l, o->part, err);
    if (!o->n_include)
        return has(l, CHOOSE_INDEX) || has(l, "model.safetensors") ? choose_checkpoint(l, err)
                                                                   : choose_gguf(l, "", err);
    for (size_t i = 0; i < l->n; i++)
        l->files[i].chosen = matches(l->files[i].name, o->include, o->n_include);
    return OK;
}

enum status choose_files(struct file_list *l, const struct choose_options *o, struct err *err)
{
    size_t n = 0;
    forget(l);
    TRY(choose(l, o, err));
    for (size_t i = 0; i < l->n; i++) {
        struct pull_file *f = &l->files[i];
        if (matches(f->name, o->exclude, o->n_exclude)) f->chosen = false;
        n += f->chosen;
    }
    if (n) return OK;
    return err_field(err, ERR_NOT_FOUND, "include",
                     "of the %zu files of the source --include and --exclude leave none", l->n);
}

bool choose_needs_index(const struct file_list *l)
{
    const struct pull_file *f = file_list_find(l, CHOOSE_INDEX);
    return f && f->chosen;
}

static enum status read_index(const cJSON *index, const struct file_list *l, struct map *shards,
                              struct err *err)
{
    const cJSON *names = json_member(index, "weight_map"), *v;
    if (!cJSON_IsObject(names) || !names->child)
        return err_set(err, ERR_FORMAT, CHOOSE_INDEX " has no \"weight_map\"");
    cJSON_ArrayForEach (v, names) {
        if (!cJSON_IsString(v))
            return err_set(err, ERR_FORMAT, CHOOSE_INDEX " names no file for a tensor");
        struct pull_file *f = file_list_find(l, v->valuestring);
        if (!f)
            return err_set(err, ERR_FORMAT,
                           CHOOSE_INDEX " names a file %.120s, which the source does not have",
                           file_name_is_safe(str_of(v->valuestring)) ? v->valuestring : "");
        map_put(shards, str_of(f->name), f);
    }
    return OK;
}

enum status choose_shards(struct file_list *l, struct str index, struct err *err)
{
    struct map shards = { 0 };
    cJSON *o = NULL;
    enum status st = file_list_parse_json(index, &o, err);
    if (st != OK) err_prefix(err, CHOOSE_INDEX " is no index: ");
    if (st == OK) st = read_index(o, l, &shards, err);
    for (size_t i = 0; st == OK && i < l->n; i++) {
        struct pull_file *f = &l->files[i];
        if (f->chosen && ends(f, ".safetensors")) f->chosen = map_get(&shards, str_of(f->name));
    }
    cJSON_Delete(o);
    map_release(&shards);
    return st;
}

const struct pull_file *choose_model_file(const struct file_list *l)
{
    const struct pull_file *config = file_list_find(l, "config.json");
    if (config && config->chosen) return NULL;
    for (size_t i = 0; i < l->n; i++)
        if (l->files[i].chosen && choose_is_gguf(l->files[i].name, "")) return &l->files[i];
    return NULL;
}
