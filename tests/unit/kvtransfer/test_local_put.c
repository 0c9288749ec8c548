/* test_local_put.c - puts of transport mem with checksums: those that it stores are the ones of the
 * receiver's pieces, whichever threads copied them and however the copies cut them. */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "kvtransfer/local/local.h"
#include "kvtransfer/transports.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { POOL = 4 << 20, COPIES_MAX = 600 };

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    (void)arg, (void)ticket;
    return OK;
}

struct end {
    struct dev_mem mem;
    struct kvt_env env;
    struct kvt_transport *t;
};

struct pair {
    struct end from, to;
    struct kvt_conn *conn;
};

static void open_end(struct end *e, uint32_t copiers)
{
    struct err err = { 0 };
    e->mem = (struct dev_mem){ .ptr = aligned_alloc(4096, POOL), .bytes = POOL, .fd = -1 };
    for (size_t i = 0; i < POOL; i++) ((char *)e->mem.ptr)[i] = (char)(i * 2654435761u >> 11);
    e->env = (struct kvt_env){
        .mem = &e->mem,
        .tuning.copiers = copiers,
        .max_copies = COPIES_MAX,
        .max_peers = 4,
        .admit = admit,
    };
    CHECK_OK(kvt_mem_ops.open(&e->env, &e->t, &err));
}

/* Waits for an event of this kind at the sender while the receiver handles its own. */
static void wait_for(struct pair *p, enum kvt_transport_event_kind kind)
{
    struct kvt_transport_event in[4];
    for (uint64_t end = clock_ms() + 3000; clock_ms() < end;) {
        (void)kvt_mem_ops.poll(p->to.t, in, COUNT_OF(in));
        size_t n = kvt_mem_ops.poll(p->from.t, in, COUNT_OF(in));
        for (size_t i = 0; i < n; i++)
            if (in[i].kind == kind) return;
    }
    test_fail(__FILE__, __LINE__, "no event %d", (int)kind);
}

static void connect_pair(struct pair *p, uint32_t copiers)
{
    struct err err = { 0 };
    struct buf address = { 0 };
    uint8_t ticket[KVT_TICKET_BYTES] = { 1 };
    open_end(&p->from, copiers);
    open_end(&p->to, 1);
    kvt_mem_ops.export_address(p->to.t, &address);
    CHECK_OK(kvt_mem_ops.connect(p->from.t, buf_str(&address), &p->to.env.layout, ticket, &p->conn,
                                 &err));
    wait_for(p, KVT_UP);
    buf_release(&address);
}

static void close_pair(struct pair *p)
{
    kvt_mem_ops.close(p->from.t);
    kvt_mem_ops.close(p->to.t);
    free(p->from.mem.ptr);
    free(p->to.mem.ptr);
}

/* Puts n_pieces pieces, the last of which has last_bytes, in these copies; returns how many of its
 * checksums are known. Those and all bytes must be right. */
static uint32_t put(struct pair *p, uint64_t piece_bytes, uint64_t last_bytes, uint32_t n_pieces,
                    const struct kvt_copy *copies, uint32_t n_copies)
{
    static struct kvt_sums sums;
    static char sent[POOL];
    uint32_t n_known = 0;
    struct kvt_put put = {
        .head = { .kind = KVT_MSG_DATA,
                  .n = n_pieces,
                  .bytes = (n_pieces - 1) * piece_bytes + last_bytes },
        .copies = copies,
        .n_copies = n_copies,
        .tag = 7,
        .sums = &sums,
        .piece_bytes = piece_bytes,
    };
    memset(&sums, 0, sizeof sums);
    memset(p->to.mem.ptr, 0x5a, POOL);
    CHECK_OK(kvt_mem_ops.put(p->conn, &put));
    wait_for(p, KVT_PUT_DONE);
    uint64_t at = 0;
    for (uint32_t i = 0; i < n_copies; at += copies[i++].bytes) {
        memcpy(sent + at, (char *)p->from.mem.ptr + copies[i].local, copies[i].bytes);
        CHECK(memcmp((char *)p->to.mem.ptr + copies[i].remote, sent + at, copies[i].bytes) == 0);
    }
    CHECK_EQ_INT(at, put.head.bytes);
    for (uint32_t i = 0; i < KVT_BATCH_PIECES; i++) {
        if (!sums.known[i]) continue;
        CHECK(i < n_pieces);
        CHECK(sums.values[i] ==
              hash_64(sent + i * piece_bytes, i + 1 < n_pieces ? piece_bytes : last_bytes, 0));
        n_known++;
    }
    return n_known;
}

/* ---- who copies ---- */

static const struct copy_impl *real_copy;
static pthread_t putting_thread;
static uint64_t whole_piece, last_piece; /* bytes */
static atomic_uint n_own, n_of_copiers;  /* whole pieces, by the putting thread and by others */

static void count_and_copy(const struct copy_run *runs, size_t n_runs, uint64_t *sums)
{
    atomic_uint *n = pthread_equal(pthread_self(), putting_thread) ? &n_own : &n_of_copiers;
    for (size_t i = 0; i < n_runs; i++)
        if (runs[i].n == whole_piece || runs[i].n == last_piece) atomic_fetch_add(n, 1);
    real_copy->copy_and_hash(runs, n_runs, sums);
}

/* Lets the sender of a pair count the whole pieces that each thread copies. */
static void count_copies(struct pair *p, struct copy_impl *counting)
{
    struct local_transport *t = (struct local_transport *)p->from.t;
    real_copy = t->copy;
    putting_thread = pthread_self();
    *counting = *t->copy;
    counting->copy_and_hash = count_and_copy;
    t->copy = counting;
}

/* One scattered copy per piece; the last piece is `short_by` bytes shorter. */
static uint32_t put_scattered(struct pair *p, uint64_t bytes, uint32_t n, uint64_t short_by)
{
    struct kvt_copy copies[KVT_BATCH_PIECES];
    for (uint32_t i = 0; i < n; i++)
        copies[i] = (struct kvt_copy){ (i * 7 % n) * bytes, (i * 5 % n) * bytes, bytes };
    copies[n - 1].bytes -= short_by;
    return put(p, bytes, bytes - short_by, n, copies, n);
}

static void check_puts(uint32_t copiers)
{
    static const struct {
        uint64_t bytes;
        uint32_t n;
    } sizes[] = { { 4096, 256 }, { 4000, 3 },        { 100, 256 },      { 65536, 16 },
                  { 1, 1 },      { 256 * 1024, 13 }, { 200 * 1024, 6 }, { 1 << 20, 3 } };
    struct pair p;
    struct copy_impl counting;
    uint64_t n_by_copiers = 0, deadline = clock_ms() + 20000;
    connect_pair(&p, copiers);
    count_copies(&p, &counting);
    /* ten rounds, and more on a machine that gives the copiers no time */
    for (int round = 0; round < 10 || (copiers > 1 && !n_by_copiers); round++) {
        CHECK(round < 10 || clock_ms() < deadline);
        for (size_t i = 0; i < COUNT_OF(sizes); i++) {
            uint64_t short_by = round % 2 ? sizes[i].bytes / 3 : 0;
            whole_piece = sizes[i].bytes;
            last_piece = sizes[i].bytes - short_by;
            atomic_store(&n_own, 0);
            atomic_store(&n_of_copiers, 0);
            uint32_t n_known = put_scattered(&p, sizes[i].bytes, sizes[i].n, short_by);
            uint32_t own = atomic_load(&n_own), others = atomic_load(&n_of_copiers);
            CHECK(n_known >= own && n_known <= own + others);
            n_by_copiers += n_known - own;
            if (copiers == 1) CHECK_EQ_INT(n_known, sizes[i].n);
        }
    }
    close_pair(&p);
}

TEST(local_put_stores_every_checksum_if_one_thread_copies) { check_puts(1); }
TEST(local_put_stores_right_checksums_if_several_threads_copy) { check_puts(4); }

/* Pieces 0 and 1 are one copy; piece 2 is two copies, so it has no checksum; piece 3 is whole. */
TEST(local_put_cuts_copies_at_pieces)
{
    const struct kvt_copy copies[] = {
        { 0, 8192, 2 * 5000 }, { 70000, 30000, 3000 }, { 90000, 50000, 2000 }, { 20003, 65, 5000 }
    };
    struct pair p;
    connect_pair(&p, 1);
    CHECK_EQ_INT(put(&p, 5000, 5000, 4, copies, COUNT_OF(copies)), 3);
    close_pair(&p);
}

TEST(local_put_without_checksums_wanted)
{
    const struct kvt_copy copies[] = { { 0, 8192, 10000 }, { 70000, 30000, 3000 } };
    const struct kvt_put put = { .head = { .kind = KVT_MSG_DATA, .n = 2, .bytes = 13000 },
                                 .copies = copies,
                                 .n_copies = 2 };
    struct pair p;
    connect_pair(&p, 1);
    CHECK_OK(kvt_mem_ops.put(p.conn, &put));
    wait_for(&p, KVT_PUT_DONE);
    for (size_t i = 0; i < COUNT_OF(copies); i++)
        CHECK(memcmp((char *)p.to.mem.ptr + copies[i].remote,
                     (char *)p.from.mem.ptr + copies[i].local, copies[i].bytes) == 0);
    close_pair(&p);
}

TEST(local_half_open_connections_keep_no_sender_out)
{
    enum { STRANGERS = 12 };
    struct pair p;
    struct kvt_transport_event in[4];
    struct err err = { 0 };
    struct buf address = { 0 };
    uint8_t ticket[KVT_TICKET_BYTES] = { 1 };
    int fds[STRANGERS];
    connect_pair(&p, 1);
    const struct local_transport *to = (const struct local_transport *)p.to.t;
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "%s%s",
                     to->address_method->prefix, to->address + LOCAL_BOOT_CHARS);
    for (int i = 0; i < STRANGERS; i++) {
        fds[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        CHECK_OK(connect(fds[i], (struct sockaddr *)&name,
                         (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)));
        CHECK_EQ_INT(kvt_mem_ops.poll(p.to.t, in, COUNT_OF(in)), 0);
    }
    CHECK(to->strangers.n > 0 && to->strangers.n <= 4);
    CHECK_EQ_INT(to->n_conns, 1);
    kvt_mem_ops.export_address(p.to.t, &address);
    CHECK_OK(
        kvt_mem_ops.connect(p.from.t, buf_str(&address), &p.to.env.layout, ticket, &p.conn, &err));
    uint64_t t = clock_ms();
    wait_for(&p, KVT_UP);
    CHECK(clock_ms() - t < 1000); /* the strangers' deadline is later */
    CHECK_EQ_INT(to->n_conns, 2);
    for (int i = 0; i < STRANGERS; i++) close(fds[i]);
    buf_release(&address);
    close_pair(&p);
}

TEST_MAIN(CASE(local_put_stores_every_checksum_if_one_thread_copies),
          CASE(local_put_stores_right_checksums_if_several_threads_copy),
          CASE(local_put_cuts_copies_at_pieces), CASE(local_put_without_checksums_wanted),
          CASE(local_half_open_connections_keep_no_sender_out))
