/* batch_runner.c - see batch_runner.h: the lines in work, in the order of the input.
 *
 * Two things go on at once: requests, at most `concurrency`, and one file job on a worker thread
 * that writes the answers whose turn has come and reads the next lines. offline_advance looks what
 * can be started and is called after everything that happened. A request refused as busy goes back
 * to its place and is tried again a little later. Thread: loop; during a file job the worker owns
 * `file`, `writing` and `job`. */
#include "deploy/generate/batch_runner.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/generate/batch_file.h"
#include "deploy/generate/batch_line.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/list.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum {
    CONCURRENCY = 32,
    HELD_FACTOR = 4, /* lines in memory per line in work */
    READ_BATCH = 64, /* lines per file job */
    RETRY_MS = 200,
    RETRIES_MAX = 600,
    PROGRESS_TTY_MS = 500,
    PROGRESS_MS = 5000,
    LINE_ID_MAX = 64
};

enum line_state { LINE_READ, LINE_WORKING, LINE_DONE };

struct line {
    struct list node;
    struct offline *owner;
    enum line_state state;
    struct batch_line request;
    char id[LINE_ID_MAX];
    uint64_t call;
    uint32_t n_tries;
    struct buf answer;
};

/* What a file job is asked and what it found. */
struct file_job {
    uint32_t n_wanted, n_read, n_bad;
    struct list lines;
    uint64_t n_lines; /* of the input so far */
    bool eof;
    enum status st;
    struct err err;
};

struct offline {
    struct offline_options o;
    uint32_t concurrency;
    struct batch_file file;
    struct file_job job;
    struct list lines; /* in order */
    uint32_t n_held, n_working;
    struct buf ready, writing;
    bool file_busy, eof, advancing, again, stopping;
    enum status st; /* of the run */
    struct err err;
    uint64_t n_ok, n_failed, t_start_ms;
    char batch[17];
    struct loop_timer *progress, *retry;
};

static void line_free(struct line *l)
{
    batch_line_release(&l->request);
    buf_release(&l->answer);
    mem_free(l);
}

static void offline_advance(struct offline *f);

/* ---- files, on a worker ---- */

static void read_line(struct offline *f, enum status read, struct str text)
{
    struct file_job *job = &f->job;
    struct line *l = MEM_NEW(struct line);
    struct err err = job->err;
    enum status st = read == OK ? batch_line_parse(text, &l->request, &err) : read;
    l->owner = f;
    snprintf(l->id, sizeof l->id, "batch_%s_%" PRIu64, f->batch, job->n_lines);
    if (st != OK) {
        err_prefix(&err, "line %" PRIu64 ": ", job->n_lines);
        batch_line_error(&l->answer, l->id, l->request.custom_id, err.text);
        l->state = LINE_DONE;
        job->n_bad++;
    }
    list_push(&job->lines, &l->node);
    job->n_read++;
}

static enum status read_lines(struct offline *f)
{
    struct file_job *job = &f->job;
    struct buf text = { 0 };
    enum status st = OK;
    while (st == OK && job->n_read < job->n_wanted && !job->eof) {
        enum status read = batch_file_read(&f->file, &text, &job->err);
        if (read == ERR_TIMEOUT) break; /* the answers that are there come first */
        job->n_lines++;
        if (read == ERR_CANCELED) job->eof = true;
        else if (read != OK && read != ERR_TOO_LONG) st = read;
        else if (read != OK || str_trim(buf_str(&text)).n > 0) read_line(f, read, buf_str(&text));
    }
    buf_release(&text);
    return st;
}

static void file_work(void *arg)
{
    struct offline *f = arg;
    f->job.st = batch_file_write(&f->file, buf_str(&f->writing), &f->job.err);
    buf_clear(&f->writing);
    if (f->job.st == OK) f->job.st = read_lines(f);
}

static void on_file_done(void *arg)
{
    struct offline *f = arg;
    f->file_busy = false;
    LIST_FOREACH(l, &f->job.lines, struct line, node)
    {
        list_remove(&l->node);
        list_push(&f->lines, &l->node);
    }
    f->n_held += f->job.n_read;
    f->n_failed += f->job.n_bad;
    f->eof = f->job.eof;
    f->st = f->job.st;
    f->err = f->job.err;
    offline_advance(f);
}

static void start_file_job(struct offline *f)
{
    uint32_t limit = f->concurrency * HELD_FACTOR, room = f->n_held < limit ? limit - f->n_held : 0;
    if (f->file_busy || f->st != OK) return;
    f->job.n_read = f->job.n_bad = 0;
    f->job.n_wanted = f->eof || f->stopping ? 0 : room < READ_BATCH ? room : READ_BATCH;
    if (f->job.n_wanted == 0 && f->ready.len == 0) return;
    struct buf swap = f->writing;
    f->writing = f->ready;
    f->ready = swap;
    f->file_busy = true;
    if (loop_work(f->o.loop, file_work, on_file_done, f) == OK) return;
    f->file_busy = false;
    f->st = err_set(&f->err, ERR_BUSY, "the worker threads have too much to do");
}

/* ---- requests ---- */

static void on_retry(void *arg)
{
    struct offline *f = arg;
    loop_timer_free(f->retry);
    f->retry = NULL;
    offline_advance(f);
}

static void on_reply(void *arg, int status, const char *headers, struct str body)
{
    struct line *l = arg;
    struct offline *f = l->owner;
    (void)headers;
    l->call = 0;
    f->n_working--;
    if ((status == 429 || status == 503) && ++l->n_tries < RETRIES_MAX) {
        l->state = LINE_READ;
        if (!f->retry) f->retry = loop_timer_start(f->o.loop, RETRY_MS, 0, on_retry, f);
    } else {
        batch_line_answer(&l->answer, l->id, l->request.custom_id, status, body);
        l->state = LINE_DONE;
        if (status == 200) f->n_ok++;
        else f->n_failed++;
    }
    offline_advance(f);
}

/* Batch lines cannot ask for a stream (batch_line.c), so these have nothing to do. */
static void on_begin(void *arg, const char *headers)
{
    (void)arg;
    (void)headers;
    assert_fail("a batch request was streamed", __FILE__, __LINE__, __func__);
}

static enum status on_chunk(void *arg, struct str json)
{
    (void)arg;
    (void)json;
    return ERR_CANCELED;
}

static void on_stream_end(void *arg) { (void)arg; }

static void start_line(struct offline *f, struct line *l)
{
    struct serve_reply reply = {
        .reply = on_reply, .begin = on_begin, .chunk = on_chunk, .end = on_stream_end, .arg = l
    };
    l->state = LINE_WORKING;
    f->n_working++;
    uint64_t call = serve_submit(f->o.serve, l->request.url, buf_str(&l->request.body), l->id,
                                 &reply);
    if (call) l->call = call; /* 0: answered already */
}

static void start_lines(struct offline *f)
{
    if (f->retry || f->stopping || f->st != OK) return; /* not more while the server is full */
    LIST_FOREACH(l, &f->lines, struct line, node)
    {
        if (f->n_working >= f->concurrency || f->retry) return;
        if (l->state == LINE_READ) start_line(f, l);
    }
}

static void take_answers(struct offline *f)
{
    while (!list_empty(&f->lines)) {
        struct line *l = LIST_FIRST(&f->lines, struct line, node);
        if (l->state != LINE_DONE) return;
        list_remove(&l->node);
        buf_add_str(&f->ready, buf_str(&l->answer));
        line_free(l);
        f->n_held--;
    }
}

/* ---- progress and the end ---- */

static void show_progress(void *arg)
{
    struct offline *f = arg;
    double s = (double)(clock_ms() - f->t_start_ms) * 1e-3;
    bool tty = isatty(STDERR_FILENO);
    fprintf(stderr,
            "%s%" PRIu64 " answered, %" PRIu64 " failed, %u in work, %.1f s, %.1f requests/s%s",
            tty ? "\r\x1b[K" : "", f->n_ok, f->n_failed, f->n_working, s,
            s > 0 ? (double)(f->n_ok + f->n_failed) / s : 0, tty ? "" : "\n");
    fflush(stderr);
}

static enum status stopped(const struct offline *f, struct err *err)
{
    const struct batch_file *b = &f->file;
    return err_set(err, ERR_CANCELED, "interrupted; the answers up to here are in %s",
                   b->partial  ? b->partial
                   : b->output ? b->output
                               : "standard output");
}

static void finish(struct offline *f)
{
    char text[ERR_TEXT_MAX];
    struct err err = f->err;
    enum status st = f->st;
    if (st == OK && f->stopping) st = stopped(f, &err);
    enum status closed = batch_file_close(&f->file, st == OK, st == OK ? &err : &(struct err){ 0 });
    if (st == OK) st = closed;
    if (f->o.progress) {
        show_progress(f);
        if (isatty(STDERR_FILENO)) fputc('\n', stderr);
    }
    loop_timer_free(f->progress);
    loop_timer_free(f->retry);
    LIST_FOREACH(l, &f->lines, struct line, node)
    {
        if (l->call) serve_cancel(f->o.serve, l->call);
        line_free(l);
    }
    buf_release(&f->ready);
    buf_release(&f->writing);
    if (st == OK)
        snprintf(text, sizeof text, "%" PRIu64 " answered, %" PRIu64 " failed", f->n_ok,
                 f->n_failed);
    else snprintf(text, sizeof text, "%s", err.text);
    struct offline_options o = f->o;
    uint64_t n_ok = f->n_ok, n_failed = f->n_failed;
    mem_free(f);
    o.done(o.arg, st, n_ok, n_failed, text);
}

/* What happens inside (an answer given at once) asks for another round instead of a nested one. */
static void offline_advance(struct offline *f)
{
    f->again = true;
    if (f->advancing) return;
    f->advancing = true;
    while (f->again) {
        f->again = false;
        start_lines(f);
        take_answers(f);
        start_file_job(f);
    }
    f->advancing = false;
    if (f->file_busy) return;
    if (f->st != OK || ((f->stopping || (f->eof && list_empty(&f->lines))) && f->ready.len == 0))
        finish(f);
}

void offline_stop(struct offline *f)
{
    ASSERT_THREAD(THREAD_LOOP);
    f->stopping = true;
    offline_advance(f);
}

enum status offline_start(const struct offline_options *o, struct offline **out, struct err *err)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct offline *f = MEM_NEW(struct offline);
    uint64_t batch;
    enum status st = batch_file_open(&f->file, o->input, o->output, err);
    if (st != OK) {
        mem_free(f);
        return st;
    }
    f->o = *o;
    f->concurrency = o->concurrency ? o->concurrency : CONCURRENCY;
    f->t_start_ms = clock_ms();
    list_init(&f->lines);
    list_init(&f->job.lines);
    random_bytes(&batch, sizeof batch);
    snprintf(f->batch, sizeof f->batch, "%016" PRIx64, batch);
    if (o->progress) {
        uint64_t every = isatty(STDERR_FILENO) ? PROGRESS_TTY_MS : PROGRESS_MS;
        f->progress = loop_timer_start(o->loop, every, every, show_progress, f);
    }
    *out = f;
    offline_advance(f);
    return OK;
}
