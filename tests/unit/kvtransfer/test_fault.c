/* test_fault.c - the syntax of fault plans, and the wrapper around a recording transport: what
 * reaches the inner transport, and which events the session layer gets. */
#include "kvtransfer/fault/fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* ---- the text ---- */

TEST(fault_plan_round_trip)
{
    static const char *const texts[] = {
        "",
        "seed=7",
        "flip=0.01",
        "seed=3,drop=1,delay=0.05:20,late=0.5:0,pause=0:7",
        "at=put:5:disconnect,at=note:1:sigstop, at=finish:1:sigkill "
        ",at=opened:1:delay:500,at=fence:2:delay",
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        struct kvt_fault_plan a, b;
        struct buf text = { 0 };
        struct err err = { 0 };
        if (*texts[i] && kvt_fault_parse(str_of(texts[i]), &a, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s: %s", texts[i], err.text);
        if (!*texts[i]) CHECK_STATUS(kvt_fault_parse(str_of(texts[i]), &a, &err), ERR_CONFIG);
        if (!*texts[i]) continue;
        kvt_fault_write(&a, &text);
        CHECK_OK(kvt_fault_parse(buf_str(&text), &b, &err));
        CHECK(memcmp(&a, &b, sizeof a) == 0);
        buf_release(&text);
    }
    struct kvt_fault_plan p;
    CHECK_OK(kvt_fault_parse(STR("seed=9,flip=0.01,delay=0.5:30,at=put:5:late:2"), &p, NULL));
    CHECK_EQ_INT(p.seed, 9);
    CHECK_EQ_INT(p.ppm[FAULT_FLIP], 10000);
    CHECK_EQ_INT(p.ms[FAULT_DELAY], 30);
    CHECK_EQ_INT(p.n_at, 1);
    CHECK_EQ_INT(p.at[0].step, FAULT_AT_PUT);
    CHECK_EQ_INT(p.at[0].nth, 5);
    CHECK_EQ_INT(p.at[0].kind, FAULT_LATE);
    CHECK_EQ_INT(p.at[0].ms, 2);
}

TEST(fault_plan_refusals_name_the_item)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        { "flip", "seed=N" },
        { "flip=", "probability" },
        { "flip=1.5", "1.5" },
        { "flip=-0.1", "-0.1" },
        { "flip=nan", "nan" },
        { "flop=0.1", "flop" },
        { "flip=0.1:5", "no milliseconds" },
        { "delay=0.1:x", "'x'" },
        { "delay=0.1:600001", "600001" },
        { "seed=-1", "-1" },
        { "seed=a", "'a'" },
        { "at=put:1", "STEP:N:ACTION" },
        { "at=putt:1:drop", "putt" },
        { "at=put:0:drop", "'0'" },
        { "at=put:1:dropp", "dropp" },
        { "at=fence:1:flip", "cannot be injected" },
        { "at=put:1:drop:5", "no milliseconds" },
        { "drop=0.1,", "''" },
        { "at=put:1:drop,at=put:2:drop,at=put:3:drop,at=put:4:drop,at=put:5:drop,at=put:6:drop,at="
          "put:7:drop,at=put:8:drop,at=put:9:drop,"
          "at=put:10:drop,at=put:11:drop,at=put:12:drop,at=put:13:drop,at=put:14:drop,at=put:15:"
          "drop,at=put:16:drop,at=put:17:drop",
          "more than 16" },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct kvt_fault_plan p;
        struct err err = { 0 };
        CHECK_STATUS(kvt_fault_parse(str_of(bad[i].text), &p, &err), ERR_CONFIG);
        if (!strstr(err.text, bad[i].says))
            test_fail(__FILE__, __LINE__, "%s: '%s' does not say '%s'", bad[i].text, err.text,
                      bad[i].says);
    }
}

/* ---- a recording transport: one incoming connection, UP from the first poll on ---- */

enum { POOL = 4096 };

static struct {
    struct kvt_transport t;
    struct kvt_conn conn;
    const struct kvt_env *env;
    int fd;
    uint8_t remote[POOL];
    struct kvt_message heads[64], notified[64];
    uint32_t n_puts, n_notified, n_done;
    uint64_t done[64];
    struct kvt_transport_event next[8];
    uint32_t n_next;
    enum status put_status, fence_status;
    bool open, disconnected;
} in;

static enum status in_open(const struct kvt_env *env, struct kvt_transport **out, struct err *err)
{
    (void)err;
    in.env = env;
    in.fd = eventfd(0, EFD_CLOEXEC);
    in.conn = (struct kvt_conn){ .t = &in.t, .incoming = true };
    in.next[in.n_next++] = (struct kvt_transport_event){ .kind = KVT_UP, .conn = &in.conn };
    in.open = true;
    *out = &in.t;
    return OK;
}
static void in_close(struct kvt_transport *t)
{
    (void)t;
    close(in.fd);
    in.open = false;
}
static int in_wait_fd(struct kvt_transport *t)
{
    (void)t;
    return in.fd;
}
static enum status in_put(struct kvt_conn *c, const struct kvt_put *p)
{
    (void)c;
    if (in.put_status != OK) return in.put_status;
    in.heads[in.n_puts++] = p->head;
    for (uint32_t i = 0; i < p->n_copies; i++)
        memcpy(in.remote + p->copies[i].remote, kvt_source(in.env, p->copies[i].local),
               p->copies[i].bytes);
    in.done[in.n_done++] = p->tag;
    return OK;
}
static void in_abandon(struct kvt_conn *c, uint32_t s, uint64_t g) { (void)c, (void)s, (void)g; }
static enum status in_notify(struct kvt_conn *c, const struct kvt_message *m)
{
    (void)c;
    in.notified[in.n_notified++] = *m;
    return OK;
}
static enum status in_fence(struct kvt_conn *c)
{
    (void)c;
    return in.fence_status;
}
static size_t in_poll(struct kvt_transport *t, struct kvt_transport_event *out, size_t cap)
{
    size_t n = 0;
    (void)t;
    for (uint32_t i = 0; i < in.n_next && n < cap; i++) out[n++] = in.next[i];
    in.n_next = 0;
    while (in.n_done && n < cap)
        out[n++] = (struct kvt_transport_event){
            .kind = KVT_PUT_DONE,
            .conn = &in.conn,
            .tag = in.done[--in.n_done],
        };
    return n;
}
static void in_disconnect(struct kvt_conn *c) { (void)c, in.disconnected = true; }

static struct kvt_transport_ops ops = {
    .name = "recorder",
    .open = in_open,
    .close = in_close,
    .wait_fd = in_wait_fd,
    .put = in_put,
    .abandon = in_abandon,
    .notify = in_notify,
    .fence = in_fence,
    .poll = in_poll,
    .disconnect = in_disconnect,
};

/* ---- the wrapper ---- */

static struct {
    struct kvt_env env;
    struct dev_mem mem, staging;
    struct kvt_transport *t;
    struct kvt_conn *c;
    struct metrics *m;
    struct kvt_transport_event got[64];
    uint32_t n_got;
} f;

static void poll_once(void)
{
    struct kvt_transport_event v[8];
    size_t n = f.t->ops->poll(f.t, v, COUNT_OF(v));
    for (size_t i = 0; i < n; i++) f.got[f.n_got++] = v[i];
}

static uint32_t n_got(enum kvt_transport_event_kind kind)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < f.n_got; i++) n += f.got[i].kind == kind;
    return n;
}

static void start(const char *plan, unsigned caps)
{
    struct err err = { 0 };
    ops.caps = caps;
    in.t.ops = &ops;
    f.mem = (struct dev_mem){ .ptr = calloc(1, POOL), .bytes = POOL, .fd = -1 };
    f.staging = (struct dev_mem){ .ptr = calloc(1, POOL), .bytes = POOL, .fd = -1 };
    for (int i = 0; i < POOL; i++)
        ((uint8_t *)f.mem.ptr)[i] = (uint8_t)(i * 7 + 1),
                  ((uint8_t *)f.staging.ptr)[i] = (uint8_t)(i * 5 + 2);
    f.env =
        (struct kvt_env){ .mem = &f.mem, .staging = &f.staging, .max_copies = 4, .max_peers = 4 };
    f.m = metrics_create();
    if (kvt_fault_open(&ops, &f.env, plan, f.m, &f.t, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    poll_once();
    CHECK_EQ_INT(f.n_got, 1);
    CHECK_EQ_INT(f.got[0].kind, KVT_UP);
    f.c = f.got[0].conn;
    CHECK(f.c->incoming && f.c->t == f.t && f.c != &in.conn);
}

static uint64_t injected(const char *kind)
{
    char labels[80];
    snprintf(labels, sizeof labels, "transport=\"recorder\",kind=\"%s\"", kind);
    return counter_value(metrics_counter(f.m, "baton_kv_fault_injected_total", labels, ""));
}

static void finish(void)
{
    f.t->ops->close(f.t);
    CHECK(!in.open && in.disconnected);
    metrics_free(f.m);
    free(f.mem.ptr);
    free(f.staging.ptr);
}

/* Puts three copies, 300 bytes in all, to the same offsets; `staged`: the middle one from staging
 * memory. */
static enum status put(uint64_t tag, bool staged)
{
    struct kvt_copy copies[3] = { { 100, 100, 100 },
                                  { staged ? KVT_STAGING + 500 : 300, 300, 150 },
                                  { 600, 600, 50 } };
    struct kvt_put p = {
        .head = { .kind = KVT_MSG_DATA, .session = 1, .generation = 10, .n = 1, .bytes = 300 },
        .copies = copies,
        .n_copies = 3,
        .tag = tag
    };
    return f.c->t->ops->put(f.c, &p);
}

static uint32_t n_wrong(bool staged)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < POOL; i++) {
        bool covered = (i >= 100 && i < 200) || (i >= 300 && i < 450) || (i >= 600 && i < 650);
        uint8_t want = !covered                        ? 0
                       : staged && i >= 300 && i < 450 ? ((uint8_t *)f.staging.ptr)[500 + i - 300]
                                                       : ((uint8_t *)f.mem.ptr)[i];
        n += in.remote[i] != want;
    }
    return n;
}

static void send_message(enum kvt_message_kind kind, uint64_t generation)
{
    struct kvt_message m = { .kind = kind, .generation = generation };
    if (kind == KVT_MSG_NOTE) m.n = 2, m.sums[0] = 5, m.sums[1] = 6;
    CHECK_OK(f.c->t->ops->notify(f.c, &m));
}

static void receive_message(enum kvt_message_kind kind)
{
    in.next[in.n_next++] = (struct kvt_transport_event){
        .kind = KVT_MESSAGE,
        .conn = &in.conn,
        .message = { .kind = kind, .generation = 10 },
    };
    poll_once();
}

/* Polls until `n` events came; fails after two seconds. */
static void poll_for(uint32_t n)
{
    for (uint64_t end = clock_ms() + 2000; f.n_got < n;) {
        poll_once();
        if (clock_ms() > end) test_fail(__FILE__, __LINE__, "%u events, not %u", f.n_got, n);
        usleep(1000);
    }
}

TEST(fault_nothing_is_changed_without_a_fault)
{
    start("seed=1", 0);
    for (int staged = 0; staged < 2; staged++) {
        CHECK_OK(put(77, staged));
        CHECK_EQ_INT(n_wrong(staged), 0);
        poll_once();
        CHECK_EQ_INT(f.got[f.n_got - 1].kind, KVT_PUT_DONE);
        CHECK_EQ_INT(f.got[f.n_got - 1].tag, 77);
        CHECK(f.got[f.n_got - 1].conn == f.c);
    }
    send_message(KVT_MSG_NOTE, 10);
    CHECK_EQ_INT(in.n_notified, 1);
    CHECK(in.notified[0].generation == 10 && in.notified[0].sums[0] == 5 &&
          in.notified[0].sums[1] == 6);
    receive_message(KVT_MSG_OPENED);
    CHECK_EQ_INT(f.got[f.n_got - 1].message.kind, KVT_MSG_OPENED);
    in.put_status = ERR_BUSY;
    CHECK_STATUS(put(1, false), ERR_BUSY);
    in.put_status = OK;
    in.next[in.n_next++] = (struct kvt_transport_event){
        .kind = KVT_DOWN, .conn = &in.conn, .status = ERR_IO, .text = "why"
    };
    poll_once();
    CHECK_STATUS(f.got[f.n_got - 1].status, ERR_IO);
    CHECK_EQ_STR(f.got[f.n_got - 1].text, "why");
    CHECK_STATUS(put(2, false), ERR_PEER_LOST);
    CHECK_EQ_INT(in.n_puts, 2);
    finish();
}

TEST(fault_flip_changes_one_bit_of_what_is_written)
{
    start("seed=4,flip=1", 0);
    for (int i = 0; i < 200; i++) {
        memset(in.remote, 0, sizeof in.remote);
        CHECK_OK(put(1, i % 2));
        CHECK_EQ_INT(n_wrong(i % 2), 1);
        CHECK_EQ_INT(in.heads[0].bytes, 300);
        in.n_puts = 0;
        poll_once();
        f.n_got = 0;
    }
    send_message(KVT_MSG_NOTE, 10);
    CHECK(__builtin_popcountll((in.notified[0].sums[0] ^ 5) | (in.notified[0].sums[1] ^ 6)) == 1);
    send_message(KVT_MSG_STOPPED, 10); /* no field that could be flipped */
    CHECK_EQ_INT(in.notified[1].generation, 10);
    CHECK_EQ_INT(injected("flip"), 201);
    /* the source is unchanged */
    for (int i = 0; i < POOL; i++) CHECK_EQ_INT(((uint8_t *)f.mem.ptr)[i], (uint8_t)(i * 7 + 1));
    finish();
}

TEST(fault_truncate_writes_fewer_bytes)
{
    for (unsigned caps = 0; caps <= KVT_CAP_RECEIVER_SCATTERS; caps += KVT_CAP_RECEIVER_SCATTERS) {
        memset(&in, 0, sizeof in);
        memset(&f, 0, sizeof f);
        start("seed=4,truncate=1", caps);
        for (int i = 0; i < 100; i++) {
            memset(in.remote, 0, sizeof in.remote);
            CHECK_OK(put(1, false));
            CHECK(n_wrong(false) > 0 && in.remote[100] == ((uint8_t *)f.mem.ptr)[100]);
            if (!caps) CHECK_EQ_INT(in.heads[0].bytes, 300);
            else
                CHECK(in.heads[0].bytes >= 1 && in.heads[0].bytes < 300 &&
                      n_wrong(false) >= 299 - in.heads[0].bytes);
            in.n_puts = 0;
            poll_once();
            f.n_got = 0;
        }
        CHECK_EQ_INT(injected("truncate"), 100);
        finish();
    }
}

TEST(fault_drop_duplicate_stale)
{
    start("at=put:1:drop,at=put:2:duplicate,at=put:3:stale,at=note:1:drop,at=note:2:duplicate,at="
          "finish:1:stale,at=opened:1:drop,"
          "at=opened:2:duplicate,at=done:1:stale,at=put_done:3:drop",
          KVT_CAP_RECEIVER_SCATTERS);
    f.n_got = 0;
    CHECK_OK(put(1, false));
    CHECK_EQ_INT(in.n_puts, 0);
    poll_once();
    CHECK_EQ_INT(n_got(KVT_PUT_DONE), 1);
    CHECK_OK(put(2, false));
    CHECK_EQ_INT(in.n_puts, 2);
    poll_once();
    CHECK_EQ_INT(n_got(KVT_PUT_DONE), 2); /* the repetition is not reported */
    CHECK_OK(put(3, false));
    CHECK_EQ_INT(in.heads[2].generation, 9);
    poll_once();
    CHECK_OK(put(4, false));
    poll_once();
    poll_once();
    CHECK_EQ_INT(n_got(KVT_PUT_DONE), 3); /* inner ones: 2, 3, 4; the third is lost */
    send_message(KVT_MSG_NOTE, 10);
    CHECK_EQ_INT(in.n_notified, 0);
    send_message(KVT_MSG_NOTE, 10);
    CHECK_EQ_INT(in.n_notified, 2);
    send_message(KVT_MSG_FINISH, 10);
    CHECK_EQ_INT(in.notified[2].generation, 9);
    f.n_got = 0;
    receive_message(KVT_MSG_OPENED);
    CHECK_EQ_INT(f.n_got, 0);
    receive_message(KVT_MSG_OPENED);
    CHECK_EQ_INT(f.n_got, 2);
    receive_message(KVT_MSG_DONE);
    CHECK_EQ_INT(f.got[2].message.generation, 9);
    CHECK_EQ_INT(injected("drop"), 4);
    CHECK_EQ_INT(injected("duplicate"), 3);
    CHECK_EQ_INT(injected("stale"), 3);
    finish();
}

TEST(fault_delay_keeps_the_order)
{
    start("at=put:1:delay:60,at=opened:1:delay:60,at=put_done:2:delay:60,at=fence:1:delay:60", 0);
    f.n_got = 0;
    uint64_t t0 = clock_ms();
    CHECK_OK(put(1, false));
    send_message(KVT_MSG_NOTE, 10);
    CHECK_OK(put(2, false));
    CHECK_EQ_INT(in.n_puts + in.n_notified, 0);
    receive_message(KVT_MSG_OPENED);
    receive_message(KVT_MSG_STOP);
    CHECK_EQ_INT(f.n_got, 0);
    poll_for(3); /* OPENED, STOP, the first PUT_DONE */
    CHECK(clock_ms() >= t0 + 60);
    CHECK_EQ_INT(in.n_puts, 2);
    CHECK_EQ_INT(in.n_notified, 1);
    uint32_t opened = 0, stop = 0;
    poll_for(4);
    CHECK(clock_ms() >= t0 + 120);
    for (uint32_t i = 0; i < f.n_got; i++) {
        if (f.got[i].message.kind == KVT_MSG_OPENED) opened = i;
        if (f.got[i].message.kind == KVT_MSG_STOP) stop = i;
    }
    CHECK(opened < stop);
    t0 = clock_ms();
    CHECK_STATUS(f.c->t->ops->fence(f.c), ERR_BUSY);
    while (f.c->t->ops->fence(f.c) == ERR_BUSY) usleep(1000);
    CHECK(clock_ms() >= t0 + 60);
    CHECK_EQ_INT(injected("delay"), 4);
    finish();
}

TEST(fault_reorder_lets_the_next_pass)
{
    start("at=put:1:reorder,at=note:3:reorder,at=opened:1:reorder", 0);
    CHECK_OK(put(1, false));
    CHECK_EQ_INT(in.n_puts, 0);
    send_message(KVT_MSG_NOTE, 10);
    CHECK(in.n_puts == 1 && in.n_notified == 1);
    send_message(KVT_MSG_NOTE, 11);
    send_message(KVT_MSG_NOTE, 12);
    CHECK_EQ_INT(in.n_notified, 2);
    send_message(KVT_MSG_FINISH, 12);
    CHECK(in.n_notified == 4 && in.notified[2].kind == KVT_MSG_FINISH &&
          in.notified[3].kind == KVT_MSG_NOTE);
    f.n_got = 0;
    receive_message(KVT_MSG_OPENED);
    receive_message(KVT_MSG_STOP);
    poll_for(3);
    CHECK(f.got[f.n_got - 2].message.kind == KVT_MSG_STOP &&
          f.got[f.n_got - 1].message.kind == KVT_MSG_OPENED);
    CHECK_EQ_INT(injected("reorder"), 3);
    finish();
}

TEST(fault_late_writes_again)
{
    start("at=put:1:late:30", 0);
    CHECK_OK(put(1, false));
    CHECK_EQ_INT(in.n_puts, 1);
    poll_for(2);
    memset(in.remote, 0, sizeof in.remote);
    memset(f.mem.ptr, 0x11, POOL); /* the source is reused: a late put has the old bytes */
    for (uint64_t end = clock_ms() + 2000; in.n_puts < 2 && clock_ms() < end; usleep(1000))
        poll_once();
    CHECK_EQ_INT(in.n_puts, 2);
    CHECK_EQ_INT(in.remote[100], (uint8_t)(100 * 7 + 1));
    CHECK_EQ_INT(in.remote[649], (uint8_t)(649 * 7 + 1));
    poll_once();
    CHECK_EQ_INT(n_got(KVT_PUT_DONE), 1);
    finish();
}

TEST(fault_disconnect_is_down_once)
{
    start("at=note:1:disconnect", 0);
    f.n_got = 0;
    CHECK_OK(put(1, false));
    CHECK_STATUS(f.c->t->ops->notify(f.c, &(struct kvt_message){ .kind = KVT_MSG_NOTE, .n = 1 }),
                 ERR_PEER_LOST);
    CHECK_STATUS(put(2, false), ERR_PEER_LOST);
    poll_once();
    poll_once();
    CHECK_EQ_INT(n_got(KVT_DOWN), 1);
    receive_message(KVT_MSG_OPEN);
    CHECK_EQ_INT(n_got(KVT_MESSAGE), 0);
    in.fence_status = ERR_BUSY;
    CHECK_STATUS(f.c->t->ops->fence(f.c), ERR_BUSY);
    in.fence_status = OK;
    CHECK_OK(f.c->t->ops->fence(f.c));
    f.c->t->ops->disconnect(f.c);
    CHECK(in.disconnected);
    CHECK_EQ_INT(injected("disconnect"), 1);
    finish();
}

/* The same seed gives the same faults, and the rates are close to the probabilities. */
TEST(fault_is_deterministic)
{
    static uint8_t first[4000];
    for (int round = 0; round < 2; round++) {
        memset(&in, 0, sizeof in);
        memset(&f, 0, sizeof f);
        start("seed=21,flip=0.1,truncate=0.05,drop=0.05", 0);
        for (int i = 0; i < 4000; i++) {
            memset(in.remote, 0, sizeof in.remote);
            in.n_puts = 0;
            CHECK_OK(put(1, false));
            uint8_t what = (uint8_t)(n_wrong(false) + in.n_puts);
            if (round) CHECK_EQ_INT(first[i], what);
            first[i] = what;
            poll_once();
            poll_once();
            f.n_got = 0;
        }
        CHECK(injected("flip") > 300 && injected("flip") < 500);
        CHECK(injected("truncate") > 120 && injected("drop") > 120 &&
              injected("drop") + injected("truncate") < 520);
        finish();
    }
}

TEST_MAIN(CASE(fault_plan_round_trip), CASE(fault_plan_refusals_name_the_item),
          CASE(fault_nothing_is_changed_without_a_fault),
          CASE(fault_flip_changes_one_bit_of_what_is_written),
          CASE(fault_truncate_writes_fewer_bytes), CASE(fault_drop_duplicate_stale),
          CASE(fault_delay_keeps_the_order), CASE(fault_reorder_lets_the_next_pass),
          CASE(fault_late_writes_again), CASE(fault_disconnect_is_down_once),
          CASE(fault_is_deterministic))
