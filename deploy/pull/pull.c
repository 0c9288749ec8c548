/* pull.c - see pull.h. Thread: main. */
#include "deploy/pull/pull.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deploy/pull/choose.h"
#include "deploy/pull/fetch/fetch.h"
#include "deploy/pull/pull_internal.h"
#include "shared/base/log.h"
#include "shared/model/load/file_map.h"
#include "shared/model/load/model_files.h"

enum { LOCK_LOOK_MS = 200 };

/* ---- signals ---- */

/* A signal is an end in order: what came is written down first. */
static void begin_stop(struct pull_stop *s)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, &s->before);
    s->fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* Signals that came are taken: their effect was the end of the pull. */
static void end_stop(struct pull_stop *s)
{
    struct signalfd_siginfo info;
    while (s->fd >= 0 && read(s->fd, &info, sizeof info) > 0) {}
    if (s->fd >= 0) close(s->fd);
    pthread_sigmask(SIG_SETMASK, &s->before, NULL);
}

static enum status sleep_or_stop(const struct pull_stop *s, int ms, struct err *err)
{
    struct pollfd p = { .fd = s->fd, .events = POLLIN };
    if (poll(&p, 1, ms) <= 0) return OK;
    return err_set(err, ERR_CANCELED, "it was stopped");
}

/* ---- where to ---- */

/* "/" of a name become folders; of a URL's host and path too, as far as they can. */
static enum status default_dir(const struct pull_source *s, struct buf *out, struct err *err)
{
    model_cache_folder(out);
    if (s->from == PULL_FOLDER)
        return err_field(err, ERR_CONFIG, "dir", "give the folder that %s is pulled into by --dir",
                         s->folder);
    buf_printf(out, "/%s", s->repository);
    if (s->repository[0]) {
        if (s->revision[0]) buf_add_char(out, '@');
        for (const char *c = s->revision; *c; c++) buf_add_char(out, *c == '/' ? '-' : *c);
        return OK;
    }
    const char *host = strstr(s->url, "://") + 3, *end = strrchr(s->url, '/');
    buf_add_c(out, "url/");
    for (; host < end && *host != '?'; host++)
        buf_add_char(out, strchr("/:@%\\", *host) ? '-' : *host);
    return OK;
}

/* ---- waiting for another pull ---- */

static enum status take_lock(struct pull *p, struct err *err)
{
    int pid = 0;
    bool said = false;
    for (;;) {
        enum status st = folder_lock(&p->folder, &pid, err);
        if (st != ERR_BUSY) return st;
        if (!said)
            log_info("pull waits", "dir=%s for=%d another pull is at work there",
                     p->folder.path.data, pid);
        said = true;
        TRY(sleep_or_stop(&p->stop, LOCK_LOOK_MS, err));
    }
}

/* ---- what there is ---- */

/* Adds what helps to a refusal of the hub. */
static enum status explain(const struct pull *p, struct err *err)
{
    const struct answer_head *h = fetch_refusal(p->fetch);
    const struct pull_source *s = &p->source;
    const enum status st = err->code;
    struct buf page = { 0 };
    char why[ERR_TEXT_MAX];
    memcpy(why, err->text, sizeof why);
    if (s->repository[0]) hub_page_url(&p->hub, s, &page);
    const char *token = hub_token_name(&p->hub), *at = page.len ? page.data : s->url;
    if ((h->status == 401 || h->status == 403) && s->repository[0]) {
        if (strcmp(h->error_code, "GatedRepo") == 0)
            (void)err_set(err, st,
                          "%.200s has terms to accept (%s), and then a token of that user "
                          "in %s: %.160s",
                          s->repository, at, token, why);
        else if (!p->hub.auth[0])
            (void)err_set(err, st,
                          "there is no %.200s at %.100s, or it is not public: check the "
                          "name, or set %s: %.160s",
                          s->repository, p->hub.endpoint, token, why);
        else
            (void)err_set(err, st, "the token in %s is not valid or has no right to %.200s: %.160s",
                          token, at, why);
    } else if (h->status == 404) {
        (void)err_set(err, st, "%.200s has no %s: %.200s", at,
                      s->revision[0] ? s->revision : "such model or file", why);
    }
    buf_release(&page);
    return st;
}

static enum status list_hub(struct pull *p, struct err *err)
{
    struct buf url = { 0 }, text = { 0 };
    hub_list_url(&p->hub, &p->source, &url);
    enum status st = fetch_text(p->fetch, url.data, LIST_BYTES_MAX, &text, err);
    if (st != OK) st = st == ERR_CANCELED ? st : explain(p, err);
    else if (p->hub.from == PULL_MODELSCOPE)
        st = file_list_read_modelscope(buf_str(&text), &p->list, err);
    else st = file_list_read_hugging_face(buf_str(&text), &p->list, err);
    if (st != OK && st != ERR_CANCELED && !strstr(err->text, url.data))
        err_prefix(err, "%.200s: ", url.data);
    buf_release(&url);
    buf_release(&text);
    return st;
}

/* Where the last part of an address's path begins, and how long it is. */
static size_t last_part(const char *url, size_t *n)
{
    size_t at = 0, end = strcspn(url, "?#");
    for (size_t i = 0; i < end; i++)
        if (url[i] == '/') at = i + 1;
    *n = end - at;
    return at;
}

/* The addresses of all parts of a split model follow from that of one. */
static enum status list_url(struct pull *p, struct err *err)
{
    const char *url = p->source.url;
    size_t n;
    const size_t at = last_part(url, &n);
    const uint32_t n_parts = choose_split_parts(p->source.file);
    struct buf file = { 0 }, last = { 0 }, own = { 0 }, address = { 0 };
    enum status st = OK;
    buf_add(&own, url + at, n);
    for (uint32_t i = 0; i < (n_parts ? n_parts : 1) && st == OK; i++) {
        buf_clear(&file);
        buf_clear(&last);
        buf_clear(&address);
        buf_add_c(&file, p->source.file);
        buf_add_str(&last, buf_str(&own));
        if (n_parts) choose_split_name(p->source.file, i + 1, &file);
        if (n_parts) choose_split_name(own.data, i + 1, &last);
        buf_printf(&address, "%.*s%s%s", (int)at, url, last.data, url + at + n);
        const struct pull_file f = { .name = file.data,
                                     .url = address.data,
                                     .size = FILE_SIZE_UNKNOWN };
        st = file_list_add(&p->list, &f, err);
    }
    buf_release(&file);
    buf_release(&last);
    buf_release(&own);
    buf_release(&address);
    return st == OK ? file_list_finish(&p->list, err) : st;
}

static enum status list_files(struct pull *p, struct err *err)
{
    if (p->source.from == PULL_URL) return list_url(p, err);
    if (p->source.from == PULL_FOLDER)
        return file_list_read_folder(p->source.folder, &p->list, err);
    return list_hub(p, err);
}

/* ---- the result ---- */

static void fill_result(const struct pull *p, struct pull_result *out)
{
    const struct pull_file *gguf = choose_model_file(&p->list);
    *out = (struct pull_result){ .source = p->source, .fetched = p->n_fetched };
    buf_add_str(&out->path, buf_str(&p->folder.path));
    if (gguf) buf_printf(&out->path, "/%s", gguf->name);
    for (size_t i = 0; i < p->list.n; i++) {
        if (!p->list.files[i].chosen) continue;
        out->n_files++;
        out->bytes += p->list.files[i].size;
    }
}

static bool is_there(const char *dir, const struct marker_file *k)
{
    struct buf path = { 0 };
    struct stat s;
    buf_printf(&path, "%s/%s", dir, k->name);
    bool there = stat(path.data, &s) == 0 && (uint64_t)s.st_size == k->size;
    buf_release(&path);
    return there;
}

/* The file by which a complete folder answers for this source: config.json, or a .gguf file. */
static const struct marker_file *answer_of(const struct marker *m, const struct pull_source *s)
{
    const struct marker_file *best = NULL;
    struct str name;
    void *value;
    size_t pos = 0;
    if (s->file[0]) return marker_find(m, s->file);
    if (!s->part[0] && marker_find(m, "config.json")) return marker_find(m, "config.json");
    while (map_next(&m->files, &pos, &name, &value)) {
        const struct marker_file *k = value;
        if (choose_is_gguf(k->name, s->part) && (!best || strcmp(k->name, best->name) < 0))
            best = k;
    }
    return best;
}

/* Has an earlier pull brought this source whole? Then *out is it. */
static bool was_pulled(const struct pull_source *s, const char *dir, struct pull_result *out)
{
    struct marker m;
    struct buf path = { 0 };
    struct err err;
    struct str name;
    void *value;
    size_t pos = 0;
    bool whole = true;
    marker_init(&m);
    buf_printf(&path, "%s/%s", dir, MARKER_NAME);
    const struct marker_file *k = marker_read(&m, path.data, &err) == OK ? answer_of(&m, s) : NULL;
    *out = (struct pull_result){ .source = *s };
    for (; k && map_next(&m.files, &pos, &name, &value); out->n_files++) {
        whole &= is_there(dir, value);
        out->bytes += ((struct marker_file *)value)->size;
    }
    if (k && whole) buf_add_c(&out->path, dir);
    if (k && whole && str_ends(str_of(k->name), ".gguf")) buf_printf(&out->path, "/%s", k->name);
    marker_release(&m);
    buf_release(&path);
    return k && whole;
}

/* ---- all ---- */

/* A folder is of one source, or of .gguf files alone, which do not get into each other's way. */
static enum status check_folder(const struct pull *p, struct err *err)
{
    const struct marker *known = &p->folder.known;
    struct str name;
    void *value;
    size_t pos = 0;
    bool only_gguf = choose_model_file(&p->list) != NULL;
    while (only_gguf && map_next(&known->files, &pos, &name, &value))
        only_gguf = str_ends(name, ".gguf");
    if (!known->source[0] || strcmp(known->source, p->source_name.data) == 0 || only_gguf)
        return OK;
    return err_field(err, ERR_CONFIG, "dir", "%s has %.200s in it: give another folder by --dir",
                     p->folder.path.data, known->source);
}

static enum status run_locked(struct pull *p, struct pull_result *out, struct err *err)
{
    const struct pull_options *o = p->o;
    const struct choose_options c = { .include = o->include,
                                      .exclude = o->exclude,
                                      .n_include = o->n_include,
                                      .n_exclude = o->n_exclude,
                                      .file = p->source.file,
                                      .part = p->source.part };
    if (o->only_if_absent && was_pulled(&p->source, p->folder.path.data, out)) return OK;
    TRY(list_files(p, err));
    if (choose_files(&p->list, &c, err) != OK)
        return err_prefix(err, "%.200s: ", p->source_name.data);
    TRY(check_folder(p, err));
    enum status st = pull_files(p, err);
    if (st == ERR_PEER_REFUSED) return explain(p, err);
    TRY(st);
    TRY(folder_publish(&p->folder, &p->list, p->source_name.data, err));
    fill_result(p, out);
    return OK;
}

static enum status prepare(struct pull *p, struct err *err)
{
    const struct pull_options *o = p->o;
    const struct fetch_options f = { .n_connections = o->n_connections,
                                     .n_retries = o->n_retries,
                                     .stall_ms = o->stall_ms,
                                     .hub = p->source.repository[0] ? &p->hub : NULL,
                                     .is_file = p->source.from == PULL_FOLDER,
                                     .stop_fd = p->stop.fd,
                                     .progress = &p->progress };
    const char *offline = getenv("HF_HUB_OFFLINE");
    if (p->source.from != PULL_FOLDER && offline && *offline && strcmp(offline, "0") != 0)
        return err_set(err, ERR_CONFIG, "HF_HUB_OFFLINE is set: nothing is fetched");
    if (p->source.repository[0])
        TRY(hub_init(&p->hub, p->source.from,
                     p->source.from == PULL_MODELSCOPE ? o->modelscope_endpoint : o->hf_endpoint,
                     err));
    progress_init(&p->progress, o->quiet);
    return fetch_create(&f, &p->fetch, err);
}

static enum status run_in(struct pull *p, const char *dir, struct pull_result *out, struct err *err)
{
    enum status st = prepare(p, err);
    if (st == OK) st = folder_open(dir, &p->folder, err);
    if (st == OK) {
        st = take_lock(p, err);
        if (st == OK) st = run_locked(p, out, err);
        if (st != OK && p->n_fetched)
            log_info("pull keeps what came", "dir=%s the same command goes on", dir);
        folder_close(&p->folder);
    }
    fetch_free(p->fetch);
    file_list_release(&p->list);
    return st;
}

enum status pull_run(const struct pull_options *o, struct pull_result *out, struct err *err)
{
    const struct source_options names = { o->hub, o->hf_endpoint, o->modelscope_endpoint,
                                          o->revision };
    struct pull p = { .o = o };
    struct buf dir = { 0 };
    enum status st = source_parse(o->what, &names, &p.source, err);
    if (st == OK && p.source.repository[0]) buf_add_c(&p.source_name, p.source.repository);
    else if (st == OK) source_print(&p.source, &p.source_name);
    if (st == OK && o->dir) buf_add_c(&dir, o->dir);
    else if (st == OK) st = default_dir(&p.source, &dir, err);
    if (st == OK && !(o->only_if_absent && was_pulled(&p.source, dir.data, out))) {
        begin_stop(&p.stop);
        st = run_in(&p, dir.data, out, err);
        end_stop(&p.stop);
    }
    buf_release(&dir);
    buf_release(&p.source_name);
    return st;
}
