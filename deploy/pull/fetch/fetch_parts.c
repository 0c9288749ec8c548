/* fetch_parts.c - which connection fetches which chunk, and what becomes of it. Thread: main. */
#include <string.h>

#include "deploy/pull/fetch/fetch_internal.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"

enum {
    OPEN_MAX = 64,                 /* files at once */
    SETTLE_EVERY_MS = 1000,        /* what a crash may cost */
    HASH_JOB_BYTES = 256 << 20,    /* so that a journal does not wait long behind it */
    PROGRESS_BYTES_MIN = 64 << 10, /* a try that brought as much was no failure */
    MISMATCHES_MAX = 2             /* a file that is wrong a third time stays wrong */
};

struct run {
    struct fetch *f;
    const struct fetch_parts *what;
    struct part *open[OPEN_MAX];
    size_t n_open, next, n_ended; /* next: the first that was not opened */
    uint64_t ended_bytes;
    bool stopping; /* nothing new begins */
};

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* ---- opening and ending parts ---- */

static enum status open_next(struct run *r, struct err *err)
{
    struct part *p = &r->what->parts[r->next];
    TRY(part_open(p, err));
    r->next++;
    p->settled_ms = clock_ms();
    r->open[r->n_open++] = p;
    return OK;
}

static void remove_open(struct run *r, size_t i)
{
    memmove(&r->open[i], &r->open[i + 1], (r->n_open - i - 1) * sizeof *r->open);
    r->n_open--;
}

static bool has_request(const struct run *r, const struct part *p)
{
    for (uint32_t i = 0; i < r->f->o.n_connections; i++)
        if (r->f->requests[i].busy && r->f->requests[i].part == p) return true;
    return false;
}

static enum status end_part(struct run *r, size_t i, struct err *err)
{
    struct part *p = r->open[i];
    struct err why = { 0 };
    enum status st = part_check(p, &why);
    if (st != OK && !p->in_place && ++p->n_mismatches <= MISMATCHES_MAX) {
        progress_end_line(r->f->o.progress);
        log_warn("pull begins a file again", "%s", why.text);
        mem_free(p->direct);
        p->direct = NULL;
        return part_restart(p, false, err);
    }
    if (err) *err = why;
    st = r->what->on_end(r->what->arg, p, st, err);
    r->ended_bytes += p->size;
    r->n_ended++;
    remove_open(r, i);
    part_close(p);
    return st;
}

/* ---- jobs of the checker ---- */

static void post_settle(struct run *r, struct part *p)
{
    struct buf journal = { 0 };
    struct check_job job = { .part = p, .kind = CHECK_SETTLE };
    part_journal(p, &journal);
    p->settled_done = p->done;
    p->settled_ms = clock_ms();
    job.journal = journal.len ? buf_take(&journal) : NULL;
    buf_release(&journal);
    checker_post(r->f->checker, &job);
}

static void post_jobs(struct run *r, struct part *p)
{
    const bool due = part_is_filled(p) || r->stopping ||
                     clock_ms() - p->settled_ms >= SETTLE_EVERY_MS;
    if (!p->in_place && !p->settling && p->settled_done != p->done && due) post_settle(r, p);
    if (p->hashing || r->stopping) return;
    const uint64_t front = part_front(p);
    if (front <= p->n_hashed) return;
    struct check_job job = { .part = p, .kind = CHECK_HASH, .to = front };
    if (front - p->n_hashed > HASH_JOB_BYTES) job.to = p->n_hashed + HASH_JOB_BYTES;
    /* Small steps while bytes come would only cost messages. */
    if (part_is_filled(p) || front - p->n_hashed >= 1 << 20) checker_post(r->f->checker, &job);
}

static bool is_ready_to_end(const struct part *p)
{
    return part_is_filled(p) && !p->hashing && !p->settling && p->n_hashed == p->size &&
           (p->in_place || p->settled_done == p->size);
}

static enum status tend_parts(struct run *r, struct err *err)
{
    struct check_result result;
    while (checker_take(r->f->checker, &result)) {
        if (result.kind == CHECK_HASH) result.part->n_checked = result.part->n_hashed;
        if (result.st != OK && result.st != ERR_CANCELED && !r->stopping) {
            *err = result.err;
            return result.st;
        }
    }
    for (size_t i = 0; i < r->n_open;) {
        struct part *p = r->open[i];
        if (p->must_restart) {
            if (!p->hashing && !p->settling && !has_request(r, p)) {
                p->must_restart = false;
                TRY(part_restart(p, p->whole, err));
            }
        } else {
            post_jobs(r, p);
        }
        const size_t n_before = r->n_open;
        if (!p->must_restart && !r->stopping && is_ready_to_end(p)) TRY(end_part(r, i, err));
        if (r->n_open == n_before) i++;
    }
    return OK;
}

/* ---- requests ---- */

/* A chunk that may be asked for now; *wait_ms becomes the time until one may, if that is sooner. */
static bool find_chunk(struct part *p, uint64_t now_ms, uint32_t *chunk, uint32_t *wait_ms)
{
    if (p->in_place || p->must_restart) return false;
    (void)part_front(p); /* brings first_open forward */
    for (uint32_t i = p->first_open; i < p->n_chunks; i++) {
        struct part_chunk *c = &p->chunks[i];
        if (c->in_flight || part_chunk_is_done(p, i)) continue;
        if (c->next_ms <= now_ms) {
            *chunk = i;
            return true;
        }
        if (c->next_ms - now_ms < *wait_ms) *wait_ms = (uint32_t)(c->next_ms - now_ms);
    }
    return false;
}

static enum status start_chunk(struct run *r, struct http_get *q, struct part *p, uint32_t i,
                               struct err *err)
{
    const uint64_t begin = part_chunk_begin(p, i) + p->chunks[i].done,
                   end = part_chunk_begin(p, i) + part_chunk_length(p, i);
    /* A file in one chunk is asked for without a range, which every server understands. */
    const bool all = begin == 0 && end == p->size;
    q->part = p;
    q->chunk = i;
    TRY(fetch_start(r->f, q, p->direct ? p->direct : p->url, p->direct != NULL, all ? 0 : begin,
                    all ? 0 : end, err));
    p->chunks[i].in_flight = true;
    return OK;
}

static enum status start_requests(struct run *r, uint32_t *wait_ms, struct err *err)
{
    const uint64_t now_ms = clock_ms();
    if (now_ms < r->f->hold_until_ms) return OK;
    for (uint32_t i = 0; i < r->f->o.n_connections; i++) {
        struct http_get *q = &r->f->requests[i];
        for (size_t k = 0; !q->busy; k++) {
            uint32_t chunk;
            if (k == r->n_open && (r->next == r->what->n || k == OPEN_MAX)) return OK;
            if (k == r->n_open) TRY(open_next(r, err));
            if (find_chunk(r->open[k], now_ms, &chunk, wait_ms))
                TRY(start_chunk(r, q, r->open[k], chunk, err));
        }
    }
    return OK;
}

/* Other chunks need not ask the hub for the address again. */
static void keep_direct(struct run *r, struct http_get *q)
{
    char *where = NULL;
    struct part *p = q->part;
    if (p->direct || !r->f->o.hub || p->whole || p->n_chunks < 2) return;
    r->f->curl.easy_getinfo(q->easy, CURLINFO_EFFECTIVE_URL, &where);
    if (where && !hub_has(r->f->o.hub, where)) p->direct = mem_strdup(where);
}

/* The address that a redirect gave has a time limit: the hub gives another. */
static bool drop_direct(struct http_get *q)
{
    struct part *p = q->part;
    const int status = q->head.status;
    if (!q->direct || status < 400 || status == 429) return false;
    if (p->direct && p->direct == q->url) {
        mem_free(p->direct);
        p->direct = NULL;
    }
    return true;
}

static enum status try_again(struct run *r, struct http_get *q, bool at_once, struct err *err)
{
    struct part *p = q->part;
    struct part_chunk *c = &p->chunks[q->chunk];
    if (q->n_bytes >= PROGRESS_BYTES_MIN && q->head.status < 300) c->n_failures = 0;
    const bool from_nothing = p->whole && c->done > 0;
    const uint32_t n = from_nothing ? ++p->n_restarts : ++c->n_failures;
    if (n > r->f->o.n_retries) return fetch_fail(r->f, q, p->file->name, err);
    TRY(fetch_note_pause(r->f, q, err));
    fetch_say_again(r->f, p->file->name, n, q->err.text);
    c->next_ms = at_once ? 0 : later(clock_ms() + fetch_backoff_ms(n), r->f->hold_until_ms);
    p->must_restart |= from_nothing;
    return OK;
}

/* From now on the file comes in one piece, on one connection. */
static enum status give_up_ranges(struct run *r, struct http_get *q, struct err *err)
{
    struct part *p = q->part;
    if (!p->whole) {
        progress_end_line(r->f->o.progress);
        log_warn("pull without ranges",
                 "file=%s the server sends whole files only: what breaks off begins again",
                 p->file->name);
    } else if (++p->n_restarts > r->f->o.n_retries) {
        return fetch_fail(r->f, q, p->file->name, err);
    }
    p->whole = p->must_restart = true;
    for (uint32_t i = 0; i < r->f->o.n_connections; i++) {
        struct http_get *other = &r->f->requests[i];
        if (other != q && other->busy && other->part == p) fetch_stop(r->f, other);
    }
    return OK;
}

static enum status end_request(struct run *r, struct http_get *q, enum get_end end, struct err *err)
{
    struct part *p = q->part;
    p->chunks[q->chunk].in_flight = false;
    switch (end) {
    case GET_DONE:
        p->chunks[q->chunk].n_failures = 0;
        keep_direct(r, q);
        return OK;
    case GET_AGAIN: return try_again(r, q, drop_direct(q), err);
    case GET_NO_RANGE: return give_up_ranges(r, q, err);
    case GET_REFUSED:
        if (drop_direct(q)) return try_again(r, q, true, err);
        return fetch_fail(r->f, q, p->file->name, err);
    case GET_CHANGED:
    case GET_BROKEN: return fetch_fail(r->f, q, p->file->name, err);
    }
    return OK;
}

static enum status take_ended(struct run *r, struct err *err)
{
    enum get_end end;
    for (struct http_get *q; (q = fetch_take_ended(r->f, &end)) != NULL;) {
        enum status st = end_request(r, q, end, err);
        fetch_stop(r->f, q);
        if (st != OK) return st;
    }
    return OK;
}

/* ---- the loop ---- */

static void show(const struct run *r)
{
    uint64_t done = r->ended_bytes, checked = r->ended_bytes;
    for (size_t i = 0; i < r->n_open; i++) {
        done += r->open[i]->done;
        checked += r->open[i]->n_checked;
    }
    for (size_t i = r->next; i < r->what->n; i++) done += r->what->parts[i].done;
    progress_show(r->f->o.progress, done, checked, r->n_open ? r->open[0]->file->name : "");
}

static enum status step(struct run *r, struct err *err)
{
    uint32_t wait_ms = UINT32_MAX;
    TRY(take_ended(r, err));
    TRY(tend_parts(r, err));
    TRY(start_requests(r, &wait_ms, err));
    if (r->n_ended == r->what->n) return OK;
    show(r);
    return fetch_wait(r->f, wait_ms, err);
}

/* Brings what came to the disk, so that the next pull goes on there. */
static void settle_all(struct run *r)
{
    struct check_result result;
    bool busy = true;
    r->stopping = true;
    for (uint32_t i = 0; i < r->f->o.n_connections; i++) fetch_stop(r->f, &r->f->requests[i]);
    for (size_t i = 0; i < r->n_open; i++)
        if (!r->open[i]->must_restart) post_jobs(r, r->open[i]);
    while (busy) {
        busy = false;
        for (size_t i = 0; i < r->n_open; i++) busy |= r->open[i]->hashing | r->open[i]->settling;
        if (busy && !checker_take(r->f->checker, &result)) checker_wait(r->f->checker);
    }
}

enum status fetch_parts(struct fetch *f, const struct fetch_parts *what, struct err *err)
{
    struct run r = { .f = f, .what = what };
    enum status st = OK;
    f->refusal = (struct answer_head){ 0 };
    while (st == OK && r.n_ended < what->n) st = step(&r, err);
    progress_end_line(f->o.progress);
    if (st != OK) settle_all(&r);
    return st;
}
