/* local_put.c - puts within one host: splits them into jobs, collects completed jobs, and sends the
 * messages that wait for them. Invariants: local.h.
 * Thread: transfer; local_run_job and local_move_mapped also on copiers. */
#include <string.h>
#include <sys/epoll.h>

#include "kvtransfer/local/local.h"
#include "shared/base/mem.h"

enum { SETTLE_LOOK_MS = 10, RUNS_MAX = 256 };

/* ---- copying ---- */

/* What is left of a job. */
struct rest {
    const struct kvt_copy *copy;
    uint64_t skip, bytes, at; /* at: bytes of the put before it */
};

/* Gathers the next runs of a job: parts of copies that are cut between pieces if their checksums
 * are wanted. Returns how many, at most RUNS_MAX. */
static size_t gather(const struct local_conn *c, const struct local_put *p, struct rest *rest,
                     struct copy_run runs[RUNS_MAX])
{
    size_t n_runs = 0;
    while (rest->bytes && n_runs < RUNS_MAX) {
        const struct kvt_copy *copy = rest->copy;
        uint64_t n = copy->bytes - rest->skip;
        if (n > rest->bytes) n = rest->bytes;
        if (p->piece_bytes) {
            uint64_t left = p->piece_bytes - rest->at % p->piece_bytes;
            if (n > left) n = left;
        }
        runs[n_runs++] = (struct copy_run){
            .to = c->remote + copy->remote + rest->skip,
            .from = kvt_source(c->lt->env, copy->local) + rest->skip,
            .n = n,
        };
        rest->skip += n;
        rest->bytes -= n;
        rest->at += n;
        if (rest->skip < copy->bytes) continue;
        rest->copy++;
        rest->skip = 0;
    }
    return n_runs;
}

/* Keeps the checksums of runs that are whole pieces; the runs begin at byte `at` of the put. */
static void keep_sums(struct local_put *p, uint64_t at, const struct copy_run *runs,
                      const uint64_t *sums, size_t n_runs)
{
    for (size_t i = 0; i < n_runs; at += runs[i++].n) {
        bool whole = at % p->piece_bytes == 0 &&
                     (runs[i].n == p->piece_bytes || at + runs[i].n == p->bytes);
        if (!whole) continue;
        p->sums.values[at / p->piece_bytes] = sums[i];
        p->sums.known[at / p->piece_bytes] = true;
    }
}

bool local_move_mapped(struct local_conn *c, struct local_put *p, const struct copier_job *j)
{
    struct rest rest = { p->copies + j->i_copy, j->skip, j->bytes, j->at };
    while (rest.bytes) {
        struct copy_run runs[RUNS_MAX];
        uint64_t sums[RUNS_MAX], at = rest.at;
        size_t n_runs = gather(c, p, &rest, runs);
        if (!p->piece_bytes) {
            c->lt->copy->copy(runs, n_runs);
            continue;
        }
        c->lt->copy->copy_and_hash(runs, n_runs, sums);
        keep_sums(p, at, runs, sums, n_runs);
    }
    return true;
}

void local_run_job(const struct copier_job *j)
{
    struct local_put *p = j->put;
    if (atomic_load_explicit(&p->abandoned, memory_order_relaxed)) return;
    if (!p->conn->method->move(p->conn, p, j))
        atomic_store_explicit(&p->failed, true, memory_order_relaxed);
}

/* ---- ends of puts ---- */

static struct local_put *put_at(struct local_conn *c, uint64_t i)
{
    return &c->puts[i % LOCAL_PUTS_MAX];
}

static void report_done(struct local_conn *c, uint64_t tag)
{
    struct local_transport *t = c->lt;
    t->done[t->n_done].conn = &c->base;
    t->done[t->n_done++].tag = tag;
}

static void break_conn(struct local_conn *c, const char *why)
{
    if (!c->broken) c->lt->n_broken++;
    c->broken = why;
}

/* Puts complete in order: a completed put waits for earlier ones. */
static void advance(struct local_conn *c)
{
    while (c->n_completed < c->n_put) {
        struct local_put *p = put_at(c, c->n_completed);
        if (p->n_jobs || !p->submitted) return;
        if (atomic_load_explicit(&p->failed, memory_order_relaxed)) {
            break_conn(c, "the receiver's memory cannot be written any more");
            return; /* DOWN comes instead of PUT_DONE */
        }
        c->n_completed++;
        c->lt->n_unfinished--;
        report_done(c, p->tag);
    }
}

/* Passes on the checksums of pieces that a job has copied, which has returned. */
static void take_sums(struct local_put *p, const struct copier_job *j)
{
    if (!p->known || !p->piece_bytes) return;
    uint64_t first = j->at / p->piece_bytes,
             end = (j->at + j->bytes + p->piece_bytes - 1) / p->piece_bytes;
    for (uint64_t i = first; i < end; i++) {
        p->known->values[i] = p->sums.values[i];
        p->known->known[i] = p->sums.known[i];
    }
}

void local_collect(struct local_transport *t)
{
    struct copier_job j;
    if (!t->copier) return;
    while (copier_take(t->copier, &j)) {
        struct local_put *p = j.put;
        p->n_jobs--;
        p->conn->n_jobs--;
        take_sums(p, &j);
        advance(p->conn);
        if (p->conn->state == LOCAL_UP && p->conn->out.len) local_write_out(p->conn);
    }
}

void local_quiesce(struct local_conn *c)
{
    for (uint64_t i = c->n_completed; i < c->n_put; i++)
        atomic_store_explicit(&put_at(c, i)->abandoned, true, memory_order_relaxed);
    if (c->n_jobs && !c->method->wait(c)) {
        for (uint64_t i = c->n_completed; i < c->n_put; i++) put_at(c, i)->n_jobs = 0;
        c->n_jobs = 0;
    }
    while (c->n_jobs) {
        copier_wait(c->lt->copier, SETTLE_LOOK_MS);
        local_collect(c->lt);
    }
    c->lt->n_unfinished -= (uint32_t)(c->n_put - c->n_completed); /* those of a broken connection */
    c->n_completed = c->n_put;
}

/* ---- beginning puts ---- */

/* A free slot for a put of this connection, or NULL. */
static struct local_put *new_put(struct local_conn *c, const struct kvt_put *p)
{
    if (c->n_put - c->n_completed == LOCAL_PUTS_MAX) return NULL;
    if (!c->puts) c->puts = MEM_ARRAY(struct local_put, LOCAL_PUTS_MAX);
    struct local_put *slot = put_at(c, c->n_put);
    if (!slot->copies) slot->copies = MEM_ARRAY(struct kvt_copy, c->lt->env->max_copies);
    slot->conn = c;
    slot->tag = p->tag;
    slot->event = p->event;
    slot->session = p->head.session;
    slot->generation = p->head.generation;
    slot->layer = p->head.layer;
    slot->first = p->head.first;
    slot->n_copies = p->n_copies;
    slot->n_jobs = 0;
    slot->on_device = p->on_device;
    slot->bytes = p->head.bytes;
    slot->known = p->sums;
    slot->piece_bytes = p->sums ? p->piece_bytes : 0;
    memset(slot->sums.known, 0, sizeof slot->sums.known);
    slot->submitted = false;
    atomic_store_explicit(&slot->abandoned, false, memory_order_relaxed);
    atomic_store_explicit(&slot->failed, false, memory_order_relaxed);
    for (uint32_t i = 0; i < p->n_copies; i++) slot->copies[i] = p->copies[i];
    c->n_put++;
    c->lt->n_unfinished++;
    return slot;
}

bool local_wait_none(struct local_conn *c)
{
    (void)c;
    return true;
}

/* Bytes of a job: whole pieces if their checksums are wanted and others can copy meanwhile. A
 * larger piece is copied by several threads and hashed afterwards. */
static uint64_t job_bytes(const struct local_conn *c, const struct local_put *p)
{
    if (copier_alone(c->lt->copier)) return p->bytes;
    if (!p->piece_bytes || p->piece_bytes > COPIER_QUEUED_BYTES) return COPIER_CHUNK;
    if (p->piece_bytes > COPIER_CHUNK) return p->piece_bytes;
    return COPIER_CHUNK - COPIER_CHUNK % p->piece_bytes;
}

bool local_begin_jobs(struct local_conn *c, struct local_put *p)
{
    struct copier_job j = { .put = p };
    const uint64_t most = job_bytes(c, p);
    while (j.i_copy < p->n_copies) {
        uint64_t next_skip = j.skip;
        uint32_t next = j.i_copy;
        for (j.bytes = 0; next < p->n_copies && j.bytes < most;) {
            uint64_t left = p->copies[next].bytes - next_skip, room = most - j.bytes;
            j.bytes += left < room ? left : room;
            next_skip = left <= room ? 0 : next_skip + room;
            next += left <= room;
        }
        local_collect(c->lt);
        if (copier_offer(c->lt->copier, j)) {
            p->n_jobs++;
            c->n_jobs++;
        } else {
            local_run_job(&j);
            take_sums(p, &j);
        }
        j.at += j.bytes;
        j.i_copy = next;
        j.skip = next_skip;
    }
    local_collect(c->lt); /* jobs that ended meanwhile have checksums */
    return true;          /* a job that fails marks its put */
}

enum status local_put(struct kvt_conn *base, const struct kvt_put *p)
{
    struct local_conn *c = (struct local_conn *)base;
    struct local_transport *t = c->lt;
    if (c->state != LOCAL_UP || c->broken) return ERR_PEER_LOST;
    local_collect(t);
    if (t->n_done + t->n_unfinished >= LOCAL_DONE_MAX) return ERR_BUSY;
    struct local_put *slot = new_put(c, p);
    if (!slot) return ERR_BUSY;
    if (!c->method->begin(c, slot))
        atomic_store_explicit(&slot->failed, true, memory_order_relaxed);
    slot->known = NULL;
    slot->submitted = true;
    advance(c);
    return OK;
}

void local_abandon(struct kvt_conn *base, uint32_t session, uint64_t generation)
{
    struct local_conn *c = (struct local_conn *)base;
    for (uint64_t i = c->n_completed; i < c->n_put; i++) {
        struct local_put *p = put_at(c, i);
        if (p->session == session && p->generation == generation)
            atomic_store_explicit(&p->abandoned, true, memory_order_relaxed);
    }
}

/* ---- messages ---- */

static void want_write(struct local_conn *c, bool yes)
{
    if (c->wants_write == yes) return;
    c->wants_write = yes;
    local_watch(c->lt, EPOLL_CTL_MOD, c->fd, c, EPOLLIN | (yes ? EPOLLOUT : 0u));
}

void local_write_out(struct local_conn *c)
{
    size_t sent = 0;
    bool full = false;
    while (sent < c->out.len) {
        struct local_packet head;
        memcpy(&head, c->out.data + sent, sizeof head);
        if (head.after > c->n_completed) break;
        enum status st = local_send_packet(c->fd, c->out.data + sent + sizeof head, head.bytes);
        full = st == ERR_BUSY;
        if (full) break;
        sent = st == OK ? sent + sizeof head + head.bytes : c->out.len; /* lost: reading tells */
    }
    buf_consume(&c->out, sent);
    want_write(c, full);
}

/* How many puts must be complete before the message leaves: all, or those up to its own for a NOTE,
 * so that the receiver verifies it while later ones are copied. */
static uint64_t must_be_complete(struct local_conn *c, const struct kvt_message *m)
{
    if (m->kind != KVT_MSG_NOTE) return c->n_put;
    for (uint64_t i = c->n_put; i > c->n_completed; i--) {
        const struct local_put *p = put_at(c, i - 1);
        if (p->session == m->session && p->generation == m->generation && p->layer == m->layer &&
            p->first == m->first)
            return i;
    }
    return c->n_completed;
}

enum status local_notify(struct kvt_conn *base, const struct kvt_message *m)
{
    struct local_conn *c = (struct local_conn *)base;
    uint8_t bytes[KVT_MESSAGE_MAX];
    if (c->state != LOCAL_UP) return ERR_PEER_LOST;
    if (m->kind == KVT_MSG_NOTE && c->out.len > KVT_QUEUE_BYTES) return ERR_BUSY;
    if (c->out.len > KVT_QUEUE_LIMIT) return ERR_FULL;
    struct local_packet head = { .after = must_be_complete(c, m),
                                 .bytes = kvt_message_encode(m, bytes) };
    bool now = c->out.len == 0 && head.after <= c->n_completed;
    enum status st = now ? local_send_packet(c->fd, bytes, head.bytes) : ERR_BUSY;
    if (st != ERR_BUSY) return st;
    buf_add(&c->out, &head, sizeof head);
    buf_add(&c->out, bytes, head.bytes);
    if (now) want_write(c, true);
    return OK;
}
