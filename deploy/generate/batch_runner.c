/* batch_runner.c - see batch_runner.h: the lines in progress, in the order of the input.
 *
 * Two things run at once: requests, at most `concurrency`, and one file job on a worker thread that
 * writes the answers whose turn has come and reads the next lines. batch_runner_advance starts what
 * can be started and is called after every event. A request refused as busy goes back to its place
 * and is retried a little later.
 * Thread: loop; during a file job the worker owns `file`, `writing` and `job`. */
#include "deploy/generate/batch_runner.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/generate/batch_file.h"
#include "deploy/generate/batch_format.h"
#include "deploy/generate/batch_line.h"
#include "deploy/generate/batch_tally.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/json/json.h"
#include "shared/base/list.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum {
    CONCURRENCY_DEFAULT = 32,
    BUFFERED_FACTOR = 4, /* lines in memory per running request */
    READ_BATCH = 64,     /* lines per file job */
    RETRY_MS = 200,
    RETRIES_MAX = 600,
    PROGRESS_TTY_MS = 500,
    PROGRESS_MS = 5000,
    ENTRY_ID_MAX = 64
};

enum entry_state { ENTRY_READ, ENTRY_WORKING, ENTRY_DONE };

struct batch_entry {
    struct list node;
    struct batch_runner *owner;
    enum entry_state state;
    struct batch_line line;
    char id[ENTRY_ID_MAX];
    uint64_t completion;
    uint32_t n_tries;
    uint64_t number; /* of the line in the input, from 1 */
    struct buf answer;
    char reason[BATCH_REASON_MAX]; /* why it became no request; "": it did */
};

/* Input and result of a file job. */
struct file_job {
    uint32_t n_wanted, n_read;
    struct batch_finishes finishes; /* of the lines written */
    bool plain;                     /* the lines are prompts */
    uint32_t n_judged;              /* of the two lines that decide */
    uint64_t first;                 /* number of the first line that is not blank */
    struct list lines;
    uint64_t n_lines; /* lines of the input so far */
    bool eof;
    enum status st;
    struct err err;
};

struct batch_runner {
    struct batch_runner_options o;
    uint32_t concurrency;
    struct batch_file file;
    struct file_job job;
    struct list lines; /* in the order of the input */
    uint32_t n_buffered, n_working;
    struct buf ready, writing;
    bool file_busy, eof, advancing, again, stopping;
    enum status st; /* of the run */
    struct err err;
    uint64_t t_start_ms;
    struct batch_tally tally;
    char batch[17];
    struct loop_timer *progress, *retry;
};

static void batch_entry_free(struct batch_entry *l)
{
    batch_line_release(&l->line);
    buf_release(&l->answer);
    mem_free(l);
}

static void batch_runner_advance(struct batch_runner *f);

/* ---- files, on a worker ---- */

static void take_prompt(const struct batch_runner *f, struct str text, struct batch_line *l)
{
    batch_line_from_prompt(text, f->job.n_lines, f->o.raw, l);
    buf_printf(&l->body, ",\"max_tokens\":%u,\"temperature\":%g}", f->o.max_tokens,
               f->o.temperature);
}

static void read_line(struct batch_runner *f, enum status read, struct str text)
{
    struct file_job *job = &f->job;
    struct batch_entry *l = MEM_NEW(struct batch_entry);
    struct err err = job->err;
    enum status st = read;
    if (st == OK && job->plain) st = batch_format_prompt(text, job->first, &err);
    if (st == OK && job->plain) take_prompt(f, str_trim(text), &l->line);
    else if (st == OK) st = batch_line_parse(text, f->o.ignore_model, &l->line, &err);
    l->owner = f;
    l->number = job->n_lines;
    snprintf(l->id, sizeof l->id, "batch_%s_%" PRIu64, f->batch, job->n_lines);
    if (st != OK) {
        snprintf(l->reason, sizeof l->reason, "%.*s", BATCH_REASON_MAX - 1, err.text);
        err_prefix(&err, "%s, line %" PRIu64 ": ", f->file.input, job->n_lines);
        batch_line_error(&l->answer, l->id, l->line.custom_id, err.text);
        l->state = ENTRY_DONE;
    }
    list_push(&job->lines, &l->node);
    job->n_read++;
}

/* The first line that is not blank decides what the others are. One that is too long is no prompt.
 * A second one of another kind ends the run, a later one only fails: the answers up to there are
 * right. */
static enum status decide(struct batch_runner *f, enum status read, struct str text)
{
    struct file_job *job = &f->job;
    if (job->n_judged == 2) return OK;
    if (job->n_judged++ == 0) job->first = job->n_lines;
    if (read != OK) return OK;
    if (job->n_judged == 1)
        return batch_format_of(text, f->file.input, job->n_lines, &job->plain, &job->err);
    enum status st = job->plain ? batch_format_prompt(text, job->first, &job->err) : OK;
    if (st != OK) err_prefix(&job->err, "%s, line %" PRIu64 ": ", f->file.input, job->n_lines);
    return st;
}

static enum status read_lines(struct batch_runner *f)
{
    struct file_job *job = &f->job;
    struct buf text = { 0 };
    enum status st = OK;
    while (st == OK && job->n_read < job->n_wanted && !job->eof) {
        enum status read = batch_file_read(&f->file, &text, &job->err);
        if (read == ERR_TIMEOUT) break; /* write the finished answers first */
        job->n_lines++;
        bool blank = read == OK && str_trim(buf_str(&text)).n == 0;
        if (read == ERR_CANCELED) job->eof = true;
        else if (read != OK && read != ERR_TOO_LONG) st = read;
        else if (!blank) st = decide(f, read, buf_str(&text));
        if (st == OK && !job->eof && !blank) read_line(f, read, buf_str(&text));
    }
    buf_release(&text);
    return st;
}

static void file_work(void *arg)
{
    struct batch_runner *f = arg;
    f->job.st = batch_file_await_reader(&f->file, &f->job.err);
    if (f->job.st == ERR_TIMEOUT) f->job.n_wanted = 0; /* nothing was read that could be written */
    else if (f->job.st != OK) return;
    f->job.finishes = (struct batch_finishes){ 0 };
    batch_finishes_count(&f->job.finishes, buf_str(&f->writing));
    f->job.st = batch_file_write(&f->file, buf_str(&f->writing), &f->job.err);
    buf_clear(&f->writing);
    if (f->job.st == OK) f->job.st = read_lines(f);
}

/* Counts an answer that is an error, by its message. */
static void count_refusal(struct batch_runner *f, const struct batch_entry *l, int status,
                          struct str body)
{
    struct buf text = { 0 };
    buf_printf(&text, "%d: ", status);
    batch_line_message(status, body, &text);
    batch_tally_failure(&f->tally, text.data, l->number);
    buf_release(&text);
}

static void on_file_done(void *arg)
{
    struct batch_runner *f = arg;
    f->file_busy = false;
    LIST_FOREACH (l, &f->job.lines, struct batch_entry, node) {
        if (l->reason[0]) batch_tally_failure(&f->tally, l->reason, l->number);
        list_remove(&l->node);
        list_push(&f->lines, &l->node);
    }
    f->n_buffered += f->job.n_read;
    batch_finishes_add(&f->tally.finishes, &f->job.finishes);
    f->eof = f->job.eof;
    f->st = f->job.st;
    f->err = f->job.err;
    batch_runner_advance(f);
}

static void start_file_job(struct batch_runner *f)
{
    uint32_t limit = f->concurrency * BUFFERED_FACTOR,
             room = f->n_buffered < limit ? limit - f->n_buffered : 0;
    if (f->file_busy || f->st != OK) return;
    f->job.n_read = 0;
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
    struct batch_runner *f = arg;
    loop_timer_free(f->retry);
    f->retry = NULL;
    batch_runner_advance(f);
}

static void on_reply(void *arg, int status, const char *headers, struct str body)
{
    struct batch_entry *l = arg;
    struct batch_runner *f = l->owner;
    (void)headers;
    l->completion = 0;
    f->n_working--;
    if ((status == 429 || status == 503) && ++l->n_tries < RETRIES_MAX) {
        l->state = ENTRY_READ;
        if (!f->retry) f->retry = loop_timer_start(f->o.loop, RETRY_MS, 0, on_retry, f);
    } else {
        if (status == 200) f->tally.n_ok++;
        else count_refusal(f, l, status, body);
        batch_line_answer(&l->answer, l->id, l->line.custom_id, status, body);
        l->state = ENTRY_DONE;
    }
    batch_runner_advance(f);
}

/* Unused: batch lines cannot ask for a stream (batch_line.c). */
static void on_begin(void *arg, const char *headers)
{
    (void)arg;
    (void)headers;
    assert_fail("a batch request was streamed", __FILE__, __LINE__, __func__);
}

static enum status on_chunk(void *arg, struct str id, struct str json)
{
    (void)arg;
    (void)id;
    (void)json;
    return ERR_CANCELED;
}

static void on_stream_end(void *arg) { (void)arg; }

static void start_line(struct batch_runner *f, struct batch_entry *l)
{
    const struct serve_call call = {
        .path = l->line.url,
        .body = buf_str(&l->line.body),
        .request_id = l->id,
        .reply = { .reply = on_reply,
                   .begin = on_begin,
                   .chunk = on_chunk,
                   .end = on_stream_end,
                   .arg = l, },
    };
    l->state = ENTRY_WORKING;
    f->n_working++;
    uint64_t id = serve_submit(f->o.serve, &call);
    if (id) l->completion = id; /* 0: answered during the call */
}

static void start_lines(struct batch_runner *f)
{
    if (f->retry || f->stopping || f->st != OK) return; /* start no more while the server is full */
    LIST_FOREACH (l, &f->lines, struct batch_entry, node) {
        if (f->n_working >= f->concurrency || f->retry) return;
        if (l->state == ENTRY_READ) start_line(f, l);
    }
}

static void take_answers(struct batch_runner *f)
{
    while (!list_empty(&f->lines)) {
        struct batch_entry *l = LIST_FIRST(&f->lines, struct batch_entry, node);
        if (l->state != ENTRY_DONE) return;
        list_remove(&l->node);
        buf_add_str(&f->ready, buf_str(&l->answer));
        batch_entry_free(l);
        f->n_buffered--;
    }
}

/* ---- progress and the end ---- */

static void show_progress(void *arg)
{
    struct batch_runner *f = arg;
    double s = (double)(clock_ms() - f->t_start_ms) * 1e-3;
    bool tty = isatty(STDERR_FILENO);
    fprintf(stderr,
            "%s%" PRIu64 " answered, %" PRIu64 " failed, %u in work, %.1f s, %.1f answers/s%s",
            tty ? "\r\x1b[K" : "", f->tally.n_ok, f->tally.n_failed, f->n_working, s,
            s > 0 ? (double)f->tally.n_ok / s : 0, tty ? "" : "\n");
    fflush(stderr);
}

static enum status stopped(const struct batch_runner *f, struct err *err)
{
    const struct batch_file *b = &f->file;
    static const char answers[] = "interrupted; the answers up to here are in";
    if (b->partial)
        return err_set(
            err, ERR_CANCELED,
            "%s %s; move it away, or remove it, before you begin anew with this --output", answers,
            b->partial);
    return err_set(err, ERR_CANCELED, "%s %s", answers, b->output ? b->output : "standard output");
}

static void show_summary(struct batch_runner *f, const char *summary)
{
    show_progress(f);
    const char *rest = strchr(summary, '\n'); /* the progress line has the first line's figures */
    if (isatty(STDERR_FILENO)) fputc('\n', stderr);
    if (rest) fprintf(stderr, "%s\n", rest + 1);
}

static void finish(struct batch_runner *f)
{
    struct buf summary = { 0 };
    struct err err = f->err;
    enum status st = f->st;
    if (st == OK && f->stopping) st = stopped(f, &err);
    enum status closed = batch_file_close(&f->file, st == OK, st == OK ? &err : &(struct err){ 0 });
    if (st == OK) st = closed;
    batch_tally_summary(&f->tally, &summary);
    if (f->o.progress) show_summary(f, summary.data);
    loop_timer_free(f->progress);
    loop_timer_free(f->retry);
    LIST_FOREACH (l, &f->lines, struct batch_entry, node) {
        if (l->completion) serve_cancel(f->o.serve, l->completion);
        batch_entry_free(l);
    }
    buf_release(&f->ready);
    buf_release(&f->writing);
    struct batch_runner_options o = f->o;
    uint64_t n_ok = f->tally.n_ok, n_failed = f->tally.n_failed;
    mem_free(f);
    o.done(o.arg, st, n_ok, n_failed, st == OK ? summary.data : err.text);
    buf_release(&summary);
}

/* An event inside a round (an immediate answer) requests another round instead of a nested one. */
static void batch_runner_advance(struct batch_runner *f)
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

void batch_runner_stop(struct batch_runner *f)
{
    ASSERT_THREAD(THREAD_LOOP);
    f->stopping = true;
    batch_runner_advance(f);
}

enum status batch_runner_start(const struct batch_runner_options *o, struct batch_runner **out,
                               struct err *err)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct batch_runner *f = MEM_NEW(struct batch_runner);
    uint64_t batch;
    enum status st = batch_file_open(&f->file, o->input, o->output, err);
    if (st != OK) {
        mem_free(f);
        return st;
    }
    f->o = *o;
    f->concurrency = o->concurrency ? o->concurrency : CONCURRENCY_DEFAULT;
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
    batch_runner_advance(f);
    return OK;
}
