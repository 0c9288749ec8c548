/* test_ucx.c - messages over UCX's tcp between processes: they arrive where the receiver says, and
 * a process that vanishes in the middle of traffic is told to the others and ends nobody else. */
#include <poll.h>
#include <signal.h>

#include "shared/base/clock.h"
#include "shared/fabric/ucx.h"
#include "tests/conformance/ep_fixture.h"

static const char WHY[] = "the CPU is always there";

enum { PEERS = 3, BAD = 1, SOON_MS = 2000, PLACE_BYTES = FABRIC_PIECE_MAX, ADDRESS_MAX = 8 * BLOB };

/* What a message says of itself. */
struct head {
    uint32_t from, number;
    uint64_t seed;
};

struct mail {
    struct fabric *f;
    struct world *w;
    unsigned char *places[PEERS];
    uint32_t n_received[PEERS], n_dropped;
    bool lost[PEERS];
};

static unsigned char byte_of(uint64_t seed, size_t i) { return (unsigned char)(seed * 31 + i * 7); }

/* [2 PLACE_BYTES]: the bytes of a message, and what `convert` makes them of. */
static void fill(unsigned char *to, uint64_t seed, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        to[i] = byte_of(seed, i);
        to[PLACE_BYTES + i] = (unsigned char)~to[i];
    }
}

static void *place(void *arg, const void *header, size_t header_bytes, size_t n)
{
    struct mail *m = arg;
    struct head h;
    CHECK_EQ_INT(header_bytes, sizeof h);
    memcpy(&h, header, sizeof h);
    CHECK(h.from < PEERS && n <= PLACE_BYTES);
    if (h.number != UINT32_MAX) return m->places[h.from];
    m->n_dropped++;
    return NULL;
}

static void received(void *arg, const void *header, size_t header_bytes, size_t n)
{
    struct mail *m = arg;
    struct head h;
    (void)header_bytes;
    memcpy(&h, header, sizeof h);
    m->n_received[h.from]++;
    for (size_t i = 0; i < n; i += 1 + i / 16)
        CHECK_EQ_INT(m->places[h.from][i], byte_of(h.seed, i));
}

static void convert(void *arg, void *to, const void *data, size_t at, size_t n)
{
    const unsigned char *from = data;
    CHECK(((struct mail *)arg)->f != NULL);
    for (size_t i = 0; i < n; i++) ((unsigned char *)to)[i] = (unsigned char)~from[at + i];
}

static void lost(void *arg, uint32_t peer, const char *why)
{
    struct mail *m = arg;
    CHECK(!m->lost[peer] && strlen(why) > 0);
    m->lost[peer] = true;
}

/* Opens this process's fabric and connects it to all others. */
static void open_mail(struct mail *m, struct world *w)
{
    const struct fabric_events events = { place, received, lost, convert, m };
    struct err err = { 0 };
    size_t n;
    static unsigned char all[PEERS][ADDRESS_MAX];
    *m = (struct mail){ .w = w };
    for (int i = 0; i < PEERS; i++) m->places[i] = mem_calloc(PLACE_BYTES, 1);
    if (fabric_open("tcp", PEERS, &events, &m->f, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    const unsigned char *mine = fabric_address(m->f, &n);
    CHECK(n <= ADDRESS_MAX);
    for (size_t at = 0; at < ADDRESS_MAX; at += BLOB) {
        unsigned char part[BLOB] = { 0 }, parts[PEERS][BLOB];
        if (at < n) memcpy(part, mine + at, n - at < BLOB ? n - at : BLOB);
        CHECK_OK(world_exchange(w, part, BLOB, parts, NULL));
        for (int r = 0; r < w->size; r++) memcpy(all[r] + at, parts[r], BLOB);
    }
    for (uint32_t r = 0; r < (uint32_t)w->size; r++)
        if (r != (uint32_t)w->rank) CHECK_OK(fabric_connect(m->f, r, all[r], NULL));
}

static void close_mail(struct mail *m, uint64_t flush_ms)
{
    fabric_close(m->f, flush_ms);
    for (int i = 0; i < PEERS; i++) mem_free(m->places[i]);
}

/* Sleeps until there is something to do, at most 10 ms. */
static void turn(struct mail *m)
{
    struct pollfd p = { .fd = fabric_fd(m->f), .events = POLLIN };
    if (!fabric_progress(m->f) && fabric_arm(m->f)) CHECK(poll(&p, 1, 10) >= 0);
}

static bool is_sending(const struct mail *m)
{
    for (uint32_t r = 0; r < PEERS; r++)
        if (r != (uint32_t)m->w->rank && fabric_n_sending(m->f, r)) return true;
    return false;
}

/* In as many parts as the number says, some of which are converted. */
static enum status send_in_parts(struct mail *m, uint32_t to, const struct head *h,
                                 const unsigned char *data, size_t n)
{
    struct fabric_part parts[FABRIC_PARTS_MAX];
    const size_t n_parts = n ? 1 + h->number % FABRIC_PARTS_MAX : 0;
    for (size_t i = 0; i < n_parts; i++) {
        const size_t begin = n * i / n_parts, end = n * (i + 1) / n_parts;
        const bool converts = (i + h->number) % 3 == 1;
        parts[i] = (struct fabric_part){ data + (converts ? PLACE_BYTES : 0), begin, end - begin,
                                         converts };
    }
    return fabric_send(m->f, to, h, sizeof *h, parts, n_parts);
}

static enum status send_one(struct mail *m, uint32_t to, uint32_t number, const unsigned char *data,
                            uint64_t seed, size_t n)
{
    const struct head h = { (uint32_t)m->w->rank, number, seed };
    for (;;) {
        const enum status st = send_in_parts(m, to, &h, data, n);
        if (st != ERR_BUSY) return st;
        turn(m);
    }
}

static const size_t SIZES[] = { 0, 1, 1000, 8 << 10, 8200, 20000, FABRIC_PIECE_MAX };

static void rank_of_letters(struct world *w)
{
    enum { EACH = 30, DROPPED = 3 };
    struct mail m;
    unsigned char *data[COUNT_OF(SIZES)];
    open_mail(&m, w);
    for (uint32_t i = 0; i < COUNT_OF(SIZES); i++) {
        data[i] = mem_calloc(2 * (size_t)PLACE_BYTES, 1);
        fill(data[i], i + 100 * (uint64_t)w->rank, SIZES[i]);
    }
    for (uint32_t k = 0; k < EACH; k++)
        for (uint32_t i = 0; i < COUNT_OF(SIZES); i++)
            for (uint32_t to = 0; to < PEERS; to++) {
                if (to == (uint32_t)w->rank) continue;
                CHECK_OK(send_one(&m, to, k, data[i], i + 100 * (uint64_t)w->rank, SIZES[i]));
                if (k < DROPPED) CHECK_OK(send_one(&m, to, UINT32_MAX, data[i], 0, SIZES[i]));
            }
    const uint32_t want = EACH * COUNT_OF(SIZES);
    const long long until = now_ms() + LINK_MS;
    for (uint32_t r = 0; r < PEERS; r++)
        while (r != (uint32_t)w->rank && m.n_received[r] < want && now_ms() < until) turn(&m);
    while (is_sending(&m) && now_ms() < until) turn(&m);
    for (uint32_t r = 0; r < PEERS; r++)
        if (r != (uint32_t)w->rank) CHECK_EQ_INT(m.n_received[r], want);
    CHECK(!is_sending(&m));
    CHECK_EQ_INT(m.n_dropped, DROPPED * COUNT_OF(SIZES) * (PEERS - 1));
    close_mail(&m, 1000);
    for (uint32_t i = 0; i < COUNT_OF(SIZES); i++) mem_free(data[i]);
}
TEST(messages_arrive_where_the_receiver_says) { run_ranks(PEERS, rank_of_letters, 0, WHY); }

/* ---- a peer vanishes ---- */

static int the_signal;
static uint64_t the_round;
static atomic_int *the_pid, *the_done; /* in memory of all processes */

/* Waits until messages go from all to all. */
static void meet(struct mail *m)
{
    const struct head h = { .from = (uint32_t)m->w->rank };
    const long long until = now_ms() + LINK_MS;
    for (uint32_t r = 0; r < PEERS; r++)
        if (r != (uint32_t)m->w->rank) CHECK_OK(fabric_send(m->f, r, &h, sizeof h, NULL, 0));
    for (uint32_t r = 0; r < PEERS; r++)
        while (r != (uint32_t)m->w->rank && !m->n_received[r] && now_ms() < until) turn(m);
    while (is_sending(m) && now_ms() < until) turn(m);
    unsigned char here = 1, all[PEERS];
    CHECK_OK(world_exchange(m->w, &here, 1, all, NULL));
}

/* All send to all without a pause, until BAD kills or stops itself at a random moment. The others
 * learn of a dead one, still reach each other, and close in time. */
static void rank_of_a_loss(struct world *w)
{
    struct mail m;
    unsigned char *data = mem_calloc(2 * (size_t)PLACE_BYTES, 1);
    open_mail(&m, w);
    fill(data, 5, PLACE_BYTES);
    meet(&m);
    if (w->rank == BAD) atomic_store(the_pid, getpid());
    const long long begin = now_ms(),
                    end_us = 2000 + (long long)(draw(20, the_round, 0, 0) % 150000);
    const long long begin_us = now_ns() / 1000;
    uint32_t after = 0;
    for (uint32_t k = 0; after < 50 && now_ms() - begin < LINK_MS; k++) {
        const size_t n = SIZES[draw(21, the_round, (uint64_t)w->rank, k) % COUNT_OF(SIZES)];
        for (uint32_t to = 0; to < PEERS; to++) {
            const struct head h = { (uint32_t)w->rank, k, 5 };
            if (to == (uint32_t)w->rank) continue;
            const enum status st = send_in_parts(&m, to, &h, data, n);
            CHECK(st == OK || st == ERR_BUSY || (to == BAD && st == ERR_PEER_LOST));
            if (st == OK && to != BAD && w->rank != BAD && (m.lost[BAD] || the_signal != SIGKILL))
                after += now_ns() / 1000 - begin_us > end_us;
        }
        fabric_progress(m.f);
        if (w->rank == BAD && now_ns() / 1000 - begin_us > end_us) kill(getpid(), the_signal);
    }
    CHECK(after >= 50);
    CHECK(m.lost[BAD] == (the_signal == SIGKILL));
    CHECK(now_ms() - begin < SOON_MS + 1000);
    const int n_done = atomic_fetch_add(the_done, 1) + 1;
    while (atomic_load(the_done) < PEERS - 1 && now_ms() - begin < LINK_MS) turn(&m);
    const long long before = now_ms();
    close_mail(&m, 300);
    CHECK(now_ms() - before < SOON_MS);
    mem_free(data);
    if (the_signal == SIGSTOP && n_done == PEERS - 1)
        CHECK(kill(atomic_load(the_pid), SIGKILL) == 0);
}

static void losses(int signal, int rounds)
{
    the_signal = signal;
    for (int i = 0; i < rounds; i++) {
        atomic_int *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                                  -1, 0);
        CHECK(shared != MAP_FAILED);
        the_pid = shared;
        the_done = shared + 1;
        the_round = (uint64_t)i + 1000 * (uint64_t)signal;
        run_ranks(PEERS, rank_of_a_loss, 1u << BAD, WHY);
        munmap(shared, 4096);
    }
}

/* BATON_TEST_FABRIC_ROUNDS: how many. */
static int rounds(int usual)
{
    const char *n = getenv("BATON_TEST_FABRIC_ROUNDS");
    return n ? atoi(n) : usual;
}
TEST(a_killed_peer_is_told_and_ends_nobody_else) { losses(SIGKILL, rounds(20)); }
TEST(a_stopped_peer_holds_nobody_up) { losses(SIGSTOP, rounds(4)); }

TEST(transports_that_there_are_not_are_named)
{
    const struct fabric_events events = { place, received, lost, NULL, NULL };
    struct fabric *f = NULL;
    struct err err = { 0 };
    CHECK_STATUS(fabric_open("abacus", PEERS, &events, &f, &err), ERR_NODEV);
    CHECK(f == NULL && strstr(err.text, "abacus") != NULL);
    fabric_close(NULL, 0);
}

TEST_MAIN(CASE(messages_arrive_where_the_receiver_says),
          CASE_T(a_killed_peer_is_told_and_ends_nobody_else, 600),
          CASE_T(a_stopped_peer_holds_nobody_up, 120),
          CASE(transports_that_there_are_not_are_named))
