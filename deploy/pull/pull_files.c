/* pull_files.c - what of the chosen files is here, and fetching the rest. Thread: main. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deploy/pull/choose.h"
#include "deploy/pull/pull_internal.h"
#include "shared/base/log.h"
#include "shared/model/load/file_map.h"

enum { INDEX_BYTES_MAX = 64 << 20 };

/* Some of the chosen files, in one go. */
struct file_batch {
    struct pull *p;
    bool only_index;
    struct part *parts; /* [n] */
    size_t n;
    /* Of files in place that are not the source's: fetched in their stead. */
    struct pull_file **wrong; /* [n_wrong] */
    size_t n_wrong;
};

static bool is_in(const struct file_batch *b, const struct pull_file *f)
{
    return f->chosen && (!b->only_index || strcmp(f->name, CHOOSE_INDEX) == 0);
}

/* ---- sizes that the list lacks ---- */

static enum status set_url(struct pull *p, struct pull_file *f, struct err *err)
{
    struct buf url = { 0 };
    if (f->url) return OK;
    if (p->source.from == PULL_FOLDER) {
        struct buf path = { 0 };
        char *real = realpath(p->source.folder, NULL);
        if (!real)
            return err_set(err, ERR_IO, "%s cannot be read: %s", p->source.folder, strerror(errno));
        buf_printf(&path, "%s/%s", real, f->name);
        hub_local_url(path.data, &url);
        free(real);
        buf_release(&path);
    } else {
        hub_file_url(&p->hub, &p->source, p->list.commit, f->name, &url);
    }
    f->url = arena_strndup(&p->list.arena, url.data, url.len);
    buf_release(&url);
    return OK;
}

/* What a server says of one file stands for what a list would say. Only a hub's tags are sums. */
static void take_head(struct pull *p, struct pull_file *f, const struct answer_head *h)
{
    const char *version = h->etag[0] ? h->etag : h->modified;
    const char *tag = h->linked_etag[0] ? h->linked_etag : h->etag;
    if (h->linked_size != FILE_SIZE_UNKNOWN) f->size = h->linked_size;
    else if (h->has_range) f->size = h->range_total;
    else if (h->has_length && h->status == 200) f->size = h->length;
    f->version = arena_strndup(&p->list.arena, version, strlen(version));
    if (h->etag[0]) f->tag = f->version;
    else if (h->modified[0]) f->modified = f->version;
    if (p->source.from != PULL_HUGGING_FACE || f->sum.kind != SUM_NONE) return;
    sum_read(str_of(tag), strlen(tag) == 64 ? SUM_SHA256 : SUM_GIT, &f->sum);
}

static enum status find_sizes(struct file_batch *b, struct err *err)
{
    struct pull *p = b->p;
    for (size_t i = 0; i < p->list.n; i++) {
        struct pull_file *f = &p->list.files[i];
        struct answer_head head;
        if (!is_in(b, f)) continue;
        TRY(set_url(p, f, err));
        if (f->size != FILE_SIZE_UNKNOWN) continue;
        TRY(fetch_head(p->fetch, f->url, &head, err));
        take_head(p, f, &head);
        if (f->size == FILE_SIZE_UNKNOWN)
            return err_set(err, ERR_UNSUPPORTED, "%.200s: the server does not say how large it is",
                           f->url);
    }
    return OK;
}

/* ---- what is here ---- */

/* A file at its place that no pull has put there is its user's. */
static enum status refuse_foreign(const struct file_batch *b, const struct pull_file *f,
                                  struct err *err)
{
    struct buf path = { 0 };
    folder_path_of(&b->p->folder, f->name, &path);
    const bool ours = marker_find(&b->p->folder.known, f->name) != NULL;
    enum status st = OK;
    if (ours)
        log_warn("pull replaces a file", "file=%s it is not as it was pulled any more", path.data);
    else
        st = err_set(
            err, ERR_CONFIG,
            "%s is not the file that %.160s has, and no pull has put it there: move it, or "
            "give another folder by --dir",
            path.data, b->p->source_name.data);
    buf_release(&path);
    return st;
}

/* Without a sum of the source, what was pulled is known by its own. */
static bool is_as_pulled(const struct file_batch *b, const struct part *part)
{
    struct buf identity = { 0 };
    const struct marker_file *k = marker_find(&b->p->folder.known, part->file->name);
    folder_identity(part->file, &identity);
    bool same = part->file->sum.kind != SUM_NONE ||
                (k && identity.len && strcmp(identity.data, k->identity) == 0 &&
                 sum_eq(&k->sha256, &part->sum));
    buf_release(&identity);
    return same;
}

static enum status end_in_place(void *arg, struct part *part, enum status st, struct err *err)
{
    struct file_batch *b = arg;
    if (st == OK && is_as_pulled(b, part))
        return folder_add_checked(&b->p->folder, part->file, part->path.data, &part->sum, err);
    TRY(refuse_foreign(b, part->file, err));
    b->wrong[b->n_wrong++] = file_list_find(&b->p->list, part->file->name);
    return OK;
}

/* Files at their places that may be the source's, by their size, are hashed. */
static enum status look_in_place(struct file_batch *b, struct err *err)
{
    struct pull *p = b->p;
    struct buf path = { 0 };
    struct stat s;
    enum status st = OK;
    b->n = 0;
    for (size_t i = 0; i < p->list.n && st == OK; i++) {
        struct pull_file *f = &p->list.files[i];
        if (!is_in(b, f) || folder_find(&p->folder, f) != FOLDER_UNKNOWN) continue;
        folder_path_of(&p->folder, f->name, &path);
        if (stat(path.data, &s) == 0 && S_ISREG(s.st_mode) && (uint64_t)s.st_size == f->size) {
            part_begin_in_place(&b->parts[b->n++], &p->folder, f);
        } else {
            st = refuse_foreign(b, f, err);
            b->wrong[b->n_wrong++] = f;
        }
    }
    buf_release(&path);
    return st;
}

/* ---- links ---- */

static enum status link_file(struct pull *p, struct pull_file *f, struct err *err)
{
    struct buf part = { 0 }, target = { 0 };
    const struct sum none = { 0 };
    char *real = realpath(p->source.folder, NULL);
    enum status st = OK;
    folder_part_of(&p->folder, f->name, &part);
    buf_printf(&target, "%s/%s", real ? real : "", f->name);
    if (!real || (unlink(part.data) != 0 && errno != ENOENT) ||
        symlink(target.data, part.data) != 0)
        st = err_set(err, ERR_IO, "%s cannot be linked: %s", target.data, strerror(errno));
    if (st == OK) st = folder_add_checked(&p->folder, f, part.data, &none, err);
    free(real);
    buf_release(&part);
    buf_release(&target);
    return st;
}

/* ---- the rest ---- */

/* A pull that linked files, and did not end, has left a link where a copy is wanted now. */
static bool is_staged_link(const struct pull_folder *folder, const struct pull_file *f)
{
    struct buf part = { 0 };
    struct stat s;
    folder_part_of(folder, f->name, &part);
    const bool is_link = lstat(part.data, &s) == 0 && S_ISLNK(s.st_mode);
    buf_release(&part);
    return is_link;
}

static bool is_wanted(const struct file_batch *b, const struct pull_file *f)
{
    const struct pull *p = b->p;
    if (!is_in(b, f)) return false;
    for (size_t i = 0; i < b->n_wrong; i++)
        if (b->wrong[i] == f) return true;
    const enum folder_place at = folder_find(&p->folder, f);
    return at == FOLDER_ABSENT ||
           (at == FOLDER_STAGED && !p->o->link && is_staged_link(&p->folder, f));
}

static enum status end_fetched(void *arg, struct part *part, enum status st, struct err *err)
{
    struct file_batch *b = arg;
    TRY(st);
    TRY(folder_add_checked(&b->p->folder, part->file, part->path.data, &part->sum, err));
    unlink(part->journal.data);
    return OK;
}

static enum status begin_parts(struct file_batch *b, struct err *err)
{
    struct pull *p = b->p;
    b->n = 0;
    for (size_t i = 0; i < p->list.n; i++) {
        struct pull_file *f = &p->list.files[i];
        if (!is_wanted(b, f)) continue;
        if (p->o->link && p->source.from == PULL_FOLDER) {
            TRY(link_file(p, f, err));
            continue;
        }
        part_begin(&b->parts[b->n], &p->folder, f, p->o->chunk_bytes);
        b->parts[b->n++].url = f->url;
    }
    return OK;
}

static enum status check_space(struct file_batch *b, struct err *err)
{
    char needs[PROGRESS_SIZE_TEXT], has[PROGRESS_SIZE_TEXT];
    const uint64_t free_bytes = folder_free_bytes(&b->p->folder);
    uint64_t needed = 0;
    for (size_t i = 0; i < b->n; i++) {
        const uint64_t left = b->parts[i].size - b->parts[i].done;
        needed = left > UINT64_MAX - needed ? UINT64_MAX : needed + left;
    }
    if (needed > free_bytes)
        return err_set(err, ERR_FULL,
                       "%s needs %s more, and its file system has %s left: free some, or give "
                       "another folder by --dir",
                       b->p->folder.path.data, progress_size(needed, needs),
                       progress_size(free_bytes, has));
    b->p->n_fetched += needed;
    return OK;
}

static enum status fetch_batch_parts(struct file_batch *b,
                                     enum status (*on_end)(void *, struct part *, enum status,
                                                           struct err *),
                                     struct err *err)
{
    const struct fetch_parts what = { .parts = b->parts, .n = b->n, .on_end = on_end, .arg = b };
    b->p->progress.total = 0;
    for (size_t i = 0; i < b->n; i++) b->p->progress.total += b->parts[i].size;
    enum status st = fetch_parts(b->p->fetch, &what, err);
    for (size_t i = 0; i < b->n; i++) part_close(&b->parts[i]);
    b->n = 0;
    return st;
}

static enum status run_batch(struct file_batch *b, struct err *err)
{
    TRY(find_sizes(b, err));
    TRY(look_in_place(b, err));
    TRY(fetch_batch_parts(b, end_in_place, err));
    TRY(begin_parts(b, err));
    TRY(check_space(b, err));
    return fetch_batch_parts(b, end_fetched, err);
}

static enum status pull_batch(struct pull *p, bool only_index, struct err *err)
{
    struct file_batch b = { .p = p, .only_index = only_index };
    b.parts = MEM_ARRAY(struct part, p->list.n);
    b.wrong = MEM_ARRAY(struct pull_file *, p->list.n);
    enum status st = run_batch(&b, err);
    for (size_t i = 0; i < b.n; i++) part_close(&b.parts[i]);
    mem_free(b.parts);
    mem_free(b.wrong);
    return st;
}

static enum status read_index(struct pull *p, struct err *err)
{
    struct buf path = { 0 }, text = { 0 };
    const struct pull_file *f = file_list_find(&p->list, CHOOSE_INDEX);
    if (folder_find(&p->folder, f) == FOLDER_STAGED) folder_part_of(&p->folder, f->name, &path);
    else folder_path_of(&p->folder, f->name, &path);
    enum status st = file_read(path.data, INDEX_BYTES_MAX, &text, err);
    if (st == OK) st = choose_shards(&p->list, buf_str(&text), err);
    buf_release(&path);
    buf_release(&text);
    return st;
}

enum status pull_files(struct pull *p, struct err *err)
{
    if (choose_needs_index(&p->list) && !p->o->n_include && !p->source.file[0]) {
        TRY(pull_batch(p, true, err));
        TRY(read_index(p, err));
    }
    return pull_batch(p, false, err);
}
