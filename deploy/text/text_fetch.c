/* text_fetch.c - see text_fetch.h. Thread: loop, except unpack. */
#include "deploy/text/text_fetch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler/directory/wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"

enum { ASK_MS = 60000 };

#define TEXT_PATH DIRECTORY_PATH "text"

struct text_fetch {
    struct text_fetch_options o;
    struct http_client *client;
    char at[HOST_PORT_TEXT_MAX];
    struct buf bytes;
    struct text_fetched got;
    bool on_worker, canceled;
    struct loop_timer *end; /* tells the outcome in a turn of its own */
    enum status st;
    struct err err;
};

static void fetch_free(struct text_fetch *f)
{
    loop_timer_free(f->end);
    http_client_free(f->client);
    buf_release(&f->bytes);
    text_fetched_release(&f->got);
    mem_free(f);
}

/* The client must not be freed inside its own callback. */
static void on_end(void *arg)
{
    struct text_fetch *f = arg, was = *f;
    f->got = (struct text_fetched){ 0 };
    fetch_free(f);
    was.o.done(was.o.arg, was.st, &was.err, &was.got);
}

static void finish(struct text_fetch *f) { f->end = loop_timer_start(f->o.loop, 0, 0, on_end, f); }

/* ---- files ---- */

static enum status make_folder(struct buf *out, struct err *err)
{
    const char *tmp = getenv("TMPDIR");
    buf_printf(out, "%s/baton-text-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (mkdtemp(out->data)) return OK;
    const enum status st = err_set(err, ERR_IO, "no folder can be made at %s: %s", out->data,
                                   strerror(errno));
    buf_clear(out);
    return st;
}

static enum status unpack_bundle(struct text_fetch *f)
{
    struct text_bundle b;
    struct text_fetched *got = &f->got;
    TRY(text_bundle_read(buf_str(&f->bytes), f->o.secret, &b, &f->err));
    enum status st = make_folder(&got->folder, &f->err);
    if (st == OK)
        st = text_bundle_unpack(&b, got->folder.data, &got->model_path, &got->chat_template,
                                &f->err);
    for (size_t i = 0; i < b.n_names; i++) got->names[got->n_names++] = mem_strdup(b.names[i]);
    got->reasoning_parser = mem_strdup(b.reasoning_parser);
    got->tool_parser = mem_strdup(b.tool_parser);
    got->max_model_len = b.max_model_len;
    got->model = b.model;
    got->dummy = b.dummy;
    text_bundle_release(&b);
    return st;
}

/* Thread: a worker. */
static void unpack(void *arg)
{
    struct text_fetch *f = arg;
    f->st = unpack_bundle(f);
    if (f->st != OK) err_prefix(&f->err, "the text that %s sent: ", f->at);
    buf_release(&f->bytes);
}

static void on_unpacked(void *arg)
{
    struct text_fetch *f = arg;
    f->on_worker = false;
    if (f->canceled) fetch_free(f);
    else finish(f);
}

/* ---- the answer ---- */

static enum status refusal(struct text_fetch *f, int http_status, struct str body)
{
    const enum status st = directory_read_refusal(http_status, body,
                                                  "it is no node of this version", &f->err);
    err_prefix(&f->err, "%s gives no text: ", f->at);
    return st;
}

/* f->st and f->err are the worker's from the moment it has the work. */
static void give_to_worker(struct text_fetch *f, struct str body)
{
    buf_add_str(&f->bytes, body);
    f->on_worker = true;
    const enum status st = loop_work(f->o.loop, unpack, on_unpacked, f);
    if (st == OK) return;
    f->on_worker = false;
    f->st = err_set(&f->err, st, "all worker threads are busy");
}

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct text_fetch *f = arg;
    if (f->canceled) return; /* the client is being freed */
    if (st != OK) f->st = err_set(&f->err, st, "%s does not answer: %s", f->at, status_text(st));
    else if (http_status != 200) f->st = refusal(f, http_status, body);
    else give_to_worker(f, body);
    if (!f->on_worker) finish(f);
}

struct text_fetch *text_fetch_start(const struct text_fetch_options *o)
{
    struct text_fetch *f = MEM_NEW(struct text_fetch);
    const struct http_client_options c = { .loop = o->loop, .body_max = TEXT_BUNDLE_MAX };
    char headers[DIRECTORY_PROOF_HEADER_MAX];
    f->o = *o;
    f->o.host = NULL;
    host_port_text(o->host, o->port, f->at);
    f->client = http_client_create(&c);
    directory_prove_header(o->secret, "GET", STR(TEXT_PATH), STR(""), headers);
    f->st = http_client_request(f->client, "GET", o->host, o->port, TEXT_PATH, headers, STR(""),
                                ASK_MS, on_answer, f);
    if (f->st != OK) {
        (void)err_set(&f->err, f->st, "%s cannot be asked: %s", f->at, status_text(f->st));
        finish(f);
    }
    return f;
}

void text_fetch_cancel(struct text_fetch *f)
{
    if (!f) return;
    f->canceled = true;
    if (!f->on_worker) fetch_free(f);
}

void text_fetched_release(struct text_fetched *t)
{
    if (t->folder.len) text_bundle_remove(t->folder.data);
    buf_release(&t->folder);
    buf_release(&t->model_path);
    buf_release(&t->chat_template);
    mem_free(t->reasoning_parser);
    mem_free(t->tool_parser);
    for (size_t i = 0; i < t->n_names; i++) mem_free(t->names[i]);
    *t = (struct text_fetched){ 0 };
}
