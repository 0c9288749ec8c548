/* test_cluster.c - links over real sockets: handshake, order, limits, loss; peers that lie, die,
 * freeze or hang. */
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "shared/base/address/unproven.h"
#include "shared/base/log.h"
#include "shared/cluster/proto/node.pb-c.h"
#include "tests/unit/cluster/cluster_rig.h"
#include "tests/unit/cluster/silence.h"
#include "tests/unit/net/net_fixture.h"

enum { LOST_MS = 600 };

static struct str bytes_of(const void *p, size_t n) { return (struct str){ p, n }; }

static enum status send_number(struct peer_node *from, uint64_t to, uint64_t i)
{
    return cluster_send(from->c, to, FRAME_CREDIT, i, (uint32_t)i + 1, bytes_of(&i, sizeof i));
}

/* Checks that the log has exactly the numbers begin .. end-1 in order. */
static void check_numbers(const struct peer_node *n, uint64_t from, uint64_t begin, uint64_t end)
{
    size_t at = 0;
    for (uint64_t i = begin; i < end; i++, at++) {
        while (at < n->n_log && n->log[at].from != from) at++;
        CHECK(at < n->n_log);
        CHECK_EQ_INT(n->log[at].type, FRAME_CREDIT);
        CHECK_EQ_INT(n->log[at].request, i);
        CHECK_EQ_INT(n->log[at].attempt, i + 1);
        CHECK_EQ_INT(n->log[at].body.len, sizeof i);
        CHECK(memcmp(n->log[at].body.data, &i, sizeof i) == 0);
    }
}

TEST(cluster_delivers_in_order_in_both_directions)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    peer_meet(a, b);
    CHECK(cluster_knows(a->c, 2) && cluster_knows(a->c, 1) && !cluster_knows(b->c, 1));
    for (uint64_t i = 0; i < 500; i++) CHECK_OK(send_number(a, 2, i));
    RIG_WAIT(&r, b->n_log == 500);
    CHECK(cluster_knows(b->c, 1)); /* it has connected, so it can be answered */
    for (uint64_t i = 0; i < 500; i++) CHECK_OK(send_number(b, 1, i));
    RIG_WAIT(&r, a->n_log == 500);
    check_numbers(b, 1, 0, 500);
    check_numbers(a, 2, 0, 500);
    CHECK_EQ_INT(a->n_lost + b->n_lost, 0);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

TEST(cluster_both_sides_dial_at_once)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    peer_meet(a, b);
    peer_meet(b, a);
    uint64_t i = 0;
    for (; i < 50; i++) {
        CHECK_OK(send_number(a, 2, i));
        CHECK_OK(send_number(b, 1, i));
    }
    /* More messages in every turn while the two handshakes run. */
    for (; i < 300; i++) {
        CHECK_OK(send_number(a, 2, i));
        CHECK_OK(send_number(b, 1, i));
        if (i % 10 == 0) uv_run(loop_uv(r.loop), UV_RUN_ONCE);
    }
    RIG_WAIT(&r, a->n_log == 300 && b->n_log == 300);
    check_numbers(a, 2, 0, 300);
    check_numbers(b, 1, 0, 300);
    rig_turn_ms(&r, 1200); /* some rounds of pings */
    CHECK_EQ_INT(a->n_lost + b->n_lost, 0);
    peer_close(a);
    RIG_WAIT(&r, b->n_lost == 1); /* once, although there may have been two links */
    rig_turn_ms(&r, 100);
    CHECK_EQ_INT(b->n_lost, 1);
    CHECK(!cluster_knows(b->c, 1));
    peer_close(b);
    cluster_rig_close(&r);
}

struct self_arg {
    struct peer_node *n;
    uint64_t next;
    bool inside;
};

static bool on_self(void *arg, const struct cluster_message *m)
{
    struct self_arg *s = arg;
    CHECK(!s->inside); /* never from inside cluster_send */
    CHECK_EQ_INT(m->request, s->next);
    CHECK_EQ_INT(m->from, s->n->id);
    s->next++;
    if (m->request >= 10 && m->request < 20) {
        s->inside = true;
        CHECK_OK(send_number(s->n, s->n->id, m->request + 10));
        s->inside = false;
    }
    return true;
}

TEST(cluster_delivers_to_itself_in_order_and_later)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    struct self_arg s = { .n = a };
    a->hook = on_self;
    a->arg = &s;
    for (uint64_t i = 0; i < 20; i++) CHECK_OK(send_number(a, 1, i));
    CHECK_EQ_INT(s.next, 0);
    RIG_WAIT(&r, s.next == 30);
    CHECK_OK(send_number(a, 1, 30)); /* pending when it is freed */
    peer_close(a);
    cluster_rig_close(&r);
}

TEST(cluster_big_messages_arrive_whole)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    uint8_t *big = mem_calloc(1, FRAME_BODY_MAX + 1);
    for (size_t i = 0; i < FRAME_BODY_MAX; i++) big[i] = (uint8_t)(i * 7 + (i >> 12));
    peer_meet(a, b);
    CHECK_STATUS(cluster_send(a->c, 2, FRAME_GRANT, 1, 1, bytes_of(big, FRAME_BODY_MAX + 1)),
                 ERR_TOO_LONG);
    CHECK_OK(cluster_send(a->c, 2, FRAME_GRANT, 1, 1, bytes_of(big, FRAME_BODY_MAX)));
    CHECK_OK(cluster_send(a->c, 2, FRAME_GRANT, 2, 1, bytes_of(NULL, 0)));
    CHECK_OK(cluster_send(a->c, 2, FRAME_GRANT, 3, 1, bytes_of(big, 100001)));
    RIG_WAIT(&r, b->n_log == 3);
    CHECK_EQ_INT(b->log[0].body.len, FRAME_BODY_MAX);
    CHECK(memcmp(b->log[0].body.data, big, FRAME_BODY_MAX) == 0);
    CHECK_EQ_INT(b->log[1].body.len, 0);
    CHECK_EQ_INT(b->log[2].body.len, 100001);
    CHECK_OK(cluster_send(b->c, 1, FRAME_GRANT, 4, 1, bytes_of(big, FRAME_BODY_MAX)));
    RIG_WAIT(&r, a->n_log == 1);
    CHECK(memcmp(a->log[0].body.data, big, FRAME_BODY_MAX) == 0);
    mem_free(big);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

TEST(cluster_wrong_secret_is_lost_and_nothing_arrives)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ .secret = "another" });
    struct peer_node *c = peer_open(&r, 3, (struct peer_options){ .secret = "" });
    peer_meet(a, b);
    peer_meet(c, b);
    CHECK_OK(send_number(a, 2, 0));
    CHECK_OK(send_number(c, 2, 0));
    RIG_WAIT(&r, a->n_lost == 1 && c->n_lost == 1);
    CHECK(strstr(a->why, "secret") != NULL);
    CHECK_EQ_INT(b->n_log, 0);
    CHECK_EQ_INT(b->n_lost, 0); /* a stranger was never a peer */
    CHECK(!cluster_knows(b->c, 1));
    CHECK_STATUS(send_number(b, 1, 0), ERR_PEER_LOST);
    peer_close(a);
    peer_close(b);
    peer_close(c);
    cluster_rig_close(&r);
}

static const char *read_log(const struct log_file_options *o)
{
    static char log[1 << 16];
    char path[600];
    snprintf(path, sizeof path, "%s/%s", o->dir, o->name);
    FILE *f = fopen(path, "r");
    CHECK(f);
    log[fread(log, 1, sizeof log - 1, f)] = 0;
    fclose(f);
    return log;
}

static int n_times(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)) != NULL; text++) n++;
    return n;
}

/* A stranger may call itself something else each time; its address stays. */
TEST(cluster_a_stranger_with_many_names_is_logged_once)
{
    struct cluster_rig r;
    const struct log_file_options o = { .dir = test_tmpdir(), .name = "refused" };
    CHECK_OK(log_set_file(&o));
    cluster_rig_open(&r);
    struct peer_node *b = peer_open(&r, 200, (struct peer_options){ .secret = "another" });
    for (uint64_t i = 1; i <= 40; i++) {
        struct peer_node *a = peer_open(&r, i, (struct peer_options){ 0 });
        peer_meet(a, b);
        CHECK_OK(send_number(a, 200, 0));
        RIG_WAIT(&r, a->n_lost == 1);
        peer_close(a);
    }
    peer_close(b);
    cluster_rig_close(&r);
    const char *log = read_log(&o);
    /* The dialing side refuses first; the other one only sees the connection end. */
    CHECK_EQ_INT(n_times(log, " link refused peer="), 1);
    CHECK(strstr(log, "link refused peer=node-1 address=127.0.0.1 why="));
}

/* The accepting side tells which host it is, and another reason of the same host as well. */
TEST(cluster_every_reason_of_a_refused_host_is_logged)
{
    struct cluster_rig r;
    const struct log_file_options o = { .dir = test_tmpdir(), .name = "refused" };
    CHECK_OK(log_set_file(&o));
    cluster_rig_open(&r);
    struct peer_node *b = peer_open(&r, 2, (struct peer_options){ 0 });
    for (int i = 0; i < 6; i++) {
        uint8_t bytes[FRAME_HEADER_BYTES] = { (uint8_t)i };
        struct frame_header h = { .type = FRAME_CANCEL };
        struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
        if (i % 2) {
            h.incarnation = 2;
            h.type = (uint16_t)(FRAME_CANCEL - i / 2); /* the message names the type */
            frame_header_encode(&h, bytes);
        }
        at.sin_port = htons(cluster_port(b->c));
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(fd, (struct sockaddr *)&at, sizeof at) == 0);
        CHECK(write(fd, bytes, sizeof bytes) == sizeof bytes);
        rig_turn_ms(&r, 30);
        close(fd);
    }
    peer_close(b);
    cluster_rig_close(&r);
    const char *log = read_log(&o);
    CHECK_EQ_INT(n_times(log, "link refused peer=127.0.0.1 address=127.0.0.1"), 2);
    CHECK_EQ_INT(n_times(log, "does not speak Baton's node protocol"), 1);
    CHECK_EQ_INT(n_times(log, "why=\"unexpected "), 1);
}

TEST(cluster_wrong_incarnation_is_lost)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    /* An earlier process had that address. */
    cluster_learn(a->c, 77, "127.0.0.1", cluster_port(b->c));
    CHECK_OK(send_number(a, 77, 0));
    RIG_WAIT(&r, a->n_lost == 1);
    CHECK_EQ_INT(a->lost[0], 77);
    CHECK_EQ_INT(b->n_log, 0);
    CHECK(!cluster_knows(a->c, 77));
    CHECK_STATUS(send_number(a, 77, 0), ERR_PEER_LOST);
    peer_meet(a, b);
    CHECK_OK(send_number(a, 2, 0));
    RIG_WAIT(&r, b->n_log == 1);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

TEST(cluster_refused_connection_and_bad_address_are_lost)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    uint16_t port = cluster_port(b->c);
    peer_close(b);
    cluster_learn(a->c, 2, "127.0.0.1", port);
    cluster_learn(a->c, 3, "not an address", 1);
    CHECK_OK(send_number(a, 2, 0));
    CHECK_OK(send_number(a, 3, 0));
    CHECK_EQ_INT(a->n_lost, 0); /* never from inside a call */
    RIG_WAIT(&r, a->n_lost == 2);
    CHECK_STATUS(send_number(a, 2, 1), ERR_PEER_LOST);
    /* The next process at the same address. */
    b = peer_open(&r, 4, (struct peer_options){ .port = port });
    peer_meet(a, b);
    CHECK_OK(send_number(a, 4, 9));
    RIG_WAIT(&r, b->n_log == 1);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

TEST(cluster_port_taken_is_a_clear_error)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    struct cluster_options o = {
        .loop = r.loop,
        .listen_host = "127.0.0.1",
        .port = cluster_port(a->c),
        .name = "b",
        .node = 2,
        .metrics = r.metrics,
    };
    struct cluster *c = NULL;
    struct err err = { 0 };
    CHECK_STATUS(cluster_create(&o, &c, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "127.0.0.1") != NULL);
    o.listen_host = "nonsense";
    CHECK_STATUS(cluster_create(&o, &c, &err), ERR_CONFIG);
    peer_close(a);
    cluster_rig_close(&r);
}

TEST(cluster_queue_is_bounded_before_and_after_the_link_is_up)
{
    enum { LIMIT = 100000, BODY = 1000 };
    struct cluster_rig r;
    uint8_t body[BODY] = { 0 };
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ .queue_bytes = LIMIT }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    peer_meet(a, b);
    size_t n = 0;
    while (cluster_send(a->c, 2, FRAME_GRANT, n, 1, bytes_of(body, BODY)) == OK) n++;
    CHECK(n > 90 && n <= LIMIT / BODY);
    CHECK_STATUS(cluster_send(a->c, 2, FRAME_GRANT, n, 1, bytes_of(body, BODY)), ERR_FULL);
    RIG_WAIT(&r, b->n_log == n); /* every message accepted while waiting arrives */
    CHECK_EQ_INT(a->n_lost, 0);
    for (size_t i = 0;
         i < 100000 && cluster_send(a->c, 2, FRAME_GRANT, n, 1, bytes_of(body, BODY)) == OK; i++)
        n++;
    CHECK_STATUS(cluster_send(a->c, 2, FRAME_GRANT, n, 1, bytes_of(body, BODY)), ERR_FULL);
    RIG_WAIT(&r, b->n_log == n);
    CHECK_OK(cluster_send(a->c, 2, FRAME_GRANT, n, 1, bytes_of(body, BODY)));
    RIG_WAIT(&r, b->n_log == n + 1);
    for (size_t i = 0; i < b->n_log; i++) CHECK_EQ_INT(b->log[i].request, i);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

TEST(cluster_disconnect_is_a_loss_on_both_sides)
{
    enum { LIMIT = 100000 };
    struct cluster_rig r;
    uint8_t body[1000] = { 0 };
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ .queue_bytes = LIMIT }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    peer_meet(a, b);
    CHECK_OK(cluster_send(a->c, 2, FRAME_GRANT, 0, 1, bytes_of(body, 1)));
    RIG_WAIT(&r, b->n_log == 1);
    for (size_t i = 1; cluster_send(a->c, 2, FRAME_GRANT, i, 1, bytes_of(body, sizeof body)) == OK;)
        i++;
    cluster_disconnect(a->c, 2, "its queue is full");
    cluster_disconnect(a->c, 2, "once is enough");
    CHECK_EQ_INT(a->n_lost, 0); /* never inside the call */
    CHECK_STATUS(cluster_send(a->c, 2, FRAME_GRANT, 0, 1, bytes_of(body, 1)), ERR_PEER_LOST);
    RIG_WAIT(&r, a->n_lost == 1 && b->n_lost == 1);
    CHECK_EQ_STR(a->why, "its queue is full");
    peer_meet(a, b);
    size_t n = b->n_log;
    CHECK_OK(cluster_send(a->c, 2, FRAME_GRANT, 9, 1, bytes_of(body, 1)));
    RIG_WAIT(&r, b->n_log == n + 1);
    CHECK_EQ_INT(b->log[n].request, 9);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

TEST(cluster_forgets_addresses_that_nobody_uses)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ .forget_ms = 700 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    peer_meet(a, b);
    CHECK_OK(send_number(a, 2, 0));
    for (uint64_t node = 100; node < 1100; node++) cluster_learn(a->c, node, "127.0.0.1", 9);
    RIG_WAIT(&r, b->n_log == 1);
    for (int i = 0; i < 20; i++) {
        rig_turn_ms(&r, 100);
        cluster_learn(a->c, 100, "127.0.0.1", 9); /* still mentioned */
    }
    CHECK(cluster_knows(a->c, 2)); /* has a link */
    CHECK(cluster_knows(a->c, 100));
    for (uint64_t node = 101; node < 1100; node++) CHECK(!cluster_knows(a->c, node));
    CHECK_EQ_INT(a->n_lost, 0);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

TEST(cluster_headers_count_against_the_queue)
{
    enum { LIMIT = 10 << 20 };
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ .queue_bytes = LIMIT }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    peer_meet(a, b);
    size_t n = 0;
    /* First more than the socket takes at once, then messages that are mostly header. */
    uint8_t *big = mem_calloc(1, LIMIT - (1 << 20));
    CHECK_OK(cluster_send(a->c, 2, FRAME_GRANT, n++, 1, bytes_of(big, LIMIT - (1 << 20))));
    while (cluster_send(a->c, 2, FRAME_GRANT, n, 1, bytes_of(big, 8)) == OK) n++;
    RIG_WAIT(&r, b->n_log == n);
    CHECK_EQ_INT(a->n_lost, 0);
    mem_free(big);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

TEST(cluster_no_progress_with_work_is_lost)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ .lost_ms = 1500 }),
                     *b = peer_open(&r, 2, (struct peer_options){ .lost_ms = 1500 });
    peer_meet(a, b);
    b->has_work = true;
    CHECK_OK(send_number(a, 2, 0));
    for (int i = 0; i < 25; i++) { /* busy, and moving */
        rig_turn_ms(&r, 100);
        b->progress++;
    }
    b->has_work = false; /* idle: the counter may stand still */
    rig_turn_ms(&r, 2500);
    CHECK_EQ_INT(a->n_lost + b->n_lost, 0);
    b->has_work = true;
    uint64_t t = clock_ms();
    RIG_WAIT_MS(&r, a->n_lost == 1, 1500 + 1500);
    CHECK(clock_ms() - t >= 1000);
    CHECK(strstr(a->why, "progress") != NULL);
    RIG_WAIT_MS(&r, b->n_lost == 1, 2000); /* the link is gone for both */
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

/* It stands still for nearly as long as it may, again and again, and always goes on in time. */
TEST(cluster_progress_just_in_time_is_no_hang)
{
    enum { QUICK_MS = 1000, STILL_MS = 900, N = 6 };
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ .lost_ms = QUICK_MS }),
                     *b = peer_open(&r, 2, (struct peer_options){ .lost_ms = QUICK_MS });
    peer_meet(a, b);
    b->has_work = true;
    CHECK_OK(send_number(a, 2, 0));
    for (int i = 0; i < N; i++) {
        rig_turn_ms(&r, STILL_MS);
        b->progress++;
    }
    CHECK_EQ_INT(a->n_lost + b->n_lost, 0);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

/* Whenever between two pings the engine stands still, it is noticed lost_ms later, and soon after. */
TEST(cluster_hang_between_two_pings_is_noticed_in_time)
{
    enum { QUICK_MS = 1000, LATE_MS = 700, N = 5 };
    for (int i = 0; i < N; i++) {
        struct cluster_rig r;
        cluster_rig_open(&r);
        struct peer_node *a = peer_open(&r, 1, (struct peer_options){ .lost_ms = QUICK_MS }),
                         *b = peer_open(&r, 2, (struct peer_options){ .lost_ms = QUICK_MS });
        peer_meet(a, b);
        b->has_work = true;
        CHECK_OK(send_number(a, 2, 0));
        for (int ms = 0; ms < 600 + 100 * i; ms += 20) {
            rig_turn_ms(&r, 20);
            b->progress++;
        }
        const uint64_t t = clock_ms();
        RIG_WAIT_MS(&r, a->n_lost == 1, 4 * QUICK_MS);
        const uint64_t took = clock_ms() - t;
        CHECK(took >= QUICK_MS - 50 && took <= QUICK_MS + LATE_MS);
        peer_close(a);
        peer_close(b);
        cluster_rig_close(&r);
    }
}

/* ---- other processes ---- */

struct child {
    pid_t pid;
    uint16_t port;
};

/* A node in its own process that sends every message back until it is killed. */
static struct child child_start(uint64_t id, uint32_t lost_ms)
{
    int fd[2];
    CHECK(pipe(fd) == 0);
    struct child c = { .pid = fork() };
    CHECK(c.pid >= 0);
    if (c.pid == 0) {
        struct cluster_rig r;
        cluster_rig_open(&r);
        struct peer_node *n = peer_open(&r, id, (struct peer_options){ .lost_ms = lost_ms });
        c.port = cluster_port(n->c);
        if (write(fd[1], &c.port, sizeof c.port) != sizeof c.port) _exit(1);
        for (size_t at = 0;;) {
            uv_run(loop_uv(r.loop), UV_RUN_ONCE);
            for (; at < n->n_log; at++)
                if (cluster_send(n->c, n->log[at].from, FRAME_CREDIT, n->log[at].request,
                                 n->log[at].attempt, buf_str(&n->log[at].body)) != OK)
                    break;
        }
    }
    CHECK(read(fd[0], &c.port, sizeof c.port) == sizeof c.port);
    close(fd[0]);
    close(fd[1]);
    return c;
}

static void child_end(struct child *c)
{
    int st;
    kill(c->pid, SIGKILL);
    CHECK_EQ_INT(waitpid(c->pid, &st, 0), c->pid);
}

TEST(cluster_killed_peer_is_lost_at_once)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct child c = child_start(2, 0);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    cluster_learn(a->c, 2, "127.0.0.1", c.port);
    CHECK_OK(send_number(a, 2, 0));
    RIG_WAIT(&r, a->n_log == 1);
    CHECK_EQ_INT(a->n_lost, 0);
    uint64_t t = clock_ms();
    child_end(&c);
    RIG_WAIT_MS(&r, a->n_lost == 1, 1000);
    CHECK(clock_ms() - t < 1000);
    CHECK_STATUS(send_number(a, 2, 1), ERR_PEER_LOST);
    peer_close(a);
    cluster_rig_close(&r);
}

/* Not so when its process ends in order, which is no reason to be warned. */
TEST(cluster_peer_that_ends_in_order_says_so)
{
    struct cluster_rig r;
    const struct log_file_options o = { .dir = test_tmpdir(), .name = "ends" };
    CHECK_OK(log_set_file(&o));
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    peer_meet(a, b);
    CHECK_OK(send_number(a, 2, 0));
    RIG_WAIT(&r, b->n_log == 1);
    peer_close(b);
    RIG_WAIT(&r, a->n_lost == 1);
    CHECK_EQ_STR(a->why, "its process has ended in order");
    peer_close(a);
    cluster_rig_close(&r);
    const char *log = read_log(&o);
    CHECK(strstr(log, "peer lost peer=node-2") && !strstr(log, " warn "));
}

TEST(cluster_frozen_peer_is_lost_within_three_seconds)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct child c = child_start(2, 0);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    cluster_learn(a->c, 2, "127.0.0.1", c.port);
    CHECK_OK(send_number(a, 2, 0));
    RIG_WAIT(&r, a->n_log == 1);
    kill(c.pid, SIGSTOP);
    uint64_t t = clock_ms();
    RIG_WAIT_MS(&r, a->n_lost == 1, 3200);
    CHECK(clock_ms() - t >= 1500);
    CHECK(strstr(a->why, "nothing heard") != NULL);
    /* A node frozen before the handshake: the kernel accepts connections for it. */
    cluster_learn(a->c, 2, "127.0.0.1", c.port);
    CHECK_OK(send_number(a, 2, 1));
    RIG_WAIT_MS(&r, a->n_lost == 2, 4000);
    CHECK(strstr(a->why, "handshake") != NULL);
    child_end(&c);
    peer_close(a);
    cluster_rig_close(&r);
}

/* A host that is cut off: its kernel answers nothing. Who comes later to the same port is found by
 * the next try, while the kernel would repeat the first after 1, 3 and 7 s. */
TEST(cluster_connections_that_nobody_answers_are_given_up)
{
    struct cluster_rig r;
    struct silence silent;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    const uint16_t port = cluster_port(b->c);
    peer_close(b);
    be_silent(&silent, port);
    cluster_learn(a->c, 2, "127.0.0.1", port);
    const uint64_t t = clock_ms();
    CHECK_OK(send_number(a, 2, 0));
    CHECK(cluster_meet(a->c, 0, "127.0.0.1", port));
    CHECK(!cluster_meet(a->c, 0, "127.0.0.1", port));
    CHECK(cluster_meet(a->c, 1, "127.0.0.1", port)); /* for another purpose */
    RIG_WAIT_MS(&r, cluster_meet(a->c, 0, "127.0.0.1", port), 1000);
    CHECK(clock_ms() - t > 450);
    RIG_WAIT_MS(&r, a->n_lost == 1, 2000);
    CHECK(clock_ms() - t > 900);
    CHECK_EQ_STR(a->why, "no connection within 1000 ms");
    be_heard(&silent);
    b = peer_open(&r, 3, (struct peer_options){ .port = port });
    RIG_WAIT_MS(&r, cluster_meet(a->c, 0, "127.0.0.1", port) && cluster_knows(a->c, 3), 1500);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

/* As group_reach does, and what watches over ports. */
TEST(cluster_who_comes_and_goes_without_a_word_is_not_refused)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    struct counter *refused = metrics_counter(r.metrics, "baton_cluster_links_refused_total", "",
                                              "");
    const struct sockaddr_in at = { .sin_family = AF_INET,
                                    .sin_port = htons(cluster_port(a->c)),
                                    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    for (int words = 0; words < 2; words++) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(fd, (const struct sockaddr *)&at, sizeof at) == 0);
        if (words) CHECK(write(fd, "GET", 3) == 3);
        close(fd);
        rig_turn_ms(&r, 100);
        CHECK_EQ_INT(counter_value(refused), words);
    }
    peer_close(a);
    cluster_rig_close(&r);
}

TEST(cluster_own_stop_loses_nobody)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    /* The peer has a long lost_ms, so that only this side can report a loss. */
    struct child c = child_start(2, 60000);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    cluster_learn(a->c, 2, "127.0.0.1", c.port);
    CHECK_OK(send_number(a, 2, 0));
    RIG_WAIT(&r, a->n_log == 1);
    rig_turn_ms(&r, 700);
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork(); /* stops this process, lets it go on 4 s later */
        if (pid == 0) {
            kill(getppid(), SIGSTOP);
            usleep(4000000);
            kill(getppid(), SIGCONT);
            _exit(0);
        }
        uint64_t t = clock_ms();
        RIG_WAIT(&r, clock_ms() - t > 4300);
        CHECK_EQ_INT(a->n_lost, 0);
    }
    rig_turn_ms(&r, 2800); /* it is still watched: no time was shifted into the future */
    CHECK_EQ_INT(a->n_lost, 0);
    CHECK_OK(send_number(a, 2, 1));
    RIG_WAIT(&r, a->n_log == 2);
    kill(c.pid, SIGSTOP);
    RIG_WAIT_MS(&r, a->n_lost == 1, 3300);
    child_end(&c);
    peer_close(a);
    cluster_rig_close(&r);
}

/* ---- strangers ---- */

/* One frame read from a socket while the loop turns. */
static void read_frame(struct cluster_rig *r, int fd, struct frame_header *h, uint8_t *body,
                       size_t cap)
{
    uint8_t head[FRAME_HEADER_BYTES];
    size_t have = 0, want = sizeof head;
    bool got_head = false;
    for (uint64_t end = clock_ms() + RIG_LONG_MS; have < want;) {
        ssize_t n = recv(fd, got_head ? body + have : head + have, want - have, MSG_DONTWAIT);
        CHECK(n != 0);
        if (n > 0) have += (size_t)n;
        if (have == want && !got_head) {
            CHECK_OK(frame_header_decode(head, h, NULL));
            CHECK(h->length <= cap);
            got_head = true;
            have = 0;
            want = h->length;
        }
        CHECK(clock_ms() < end);
        uv_run(loop_uv(r->loop), UV_RUN_NOWAIT);
    }
}

static void send_frame(int fd, enum frame_type type, uint64_t incarnation, const void *body,
                       size_t n)
{
    struct frame_header h = {
        .type = (uint16_t)type,
        .length = (uint32_t)n,
        .incarnation = incarnation,
    };
    uint8_t head[FRAME_HEADER_BYTES];
    frame_header_encode(&h, head);
    fixture_send(fd, head, sizeof head);
    fixture_send(fd, body, n);
}

TEST(cluster_acceptor_that_skips_its_proof_stays_a_stranger)
{
    struct cluster_rig r;
    struct frame_header h;
    uint8_t body[4096];
    uint16_t port;
    cluster_rig_open(&r);
    int listener = fixture_listen(&port);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    cluster_learn(a->c, 2, "127.0.0.1", port);
    CHECK_OK(send_number(a, 2, 0)); /* must not reach the stranger */
    rig_turn_ms(&r, 50);
    int fd = accept(listener, NULL, NULL);
    read_frame(&r, fd, &h, body, sizeof body);
    CHECK_EQ_INT(h.type, FRAME_LINK_HELLO);
    send_frame(fd, FRAME_LINK_READY, 1, "", 0);
    send_frame(fd, FRAME_CREDIT, 1, "x", 1);
    RIG_WAIT(&r, a->n_lost == 1);
    CHECK_EQ_INT(a->n_log, 0);
    CHECK(recv(fd, body, sizeof body, 0) <= 0); /* nothing more was sent to it */
    close(fd);
    close(listener);
    peer_close(a);
    cluster_rig_close(&r);
}

TEST(cluster_acceptor_with_a_wrong_proof_stays_a_stranger)
{
    struct cluster_rig r;
    struct frame_header h;
    uint8_t body[4096], mac[32] = { 1 }, nonce[16] = { 2 };
    uint16_t port;
    cluster_rig_open(&r);
    int listener = fixture_listen(&port);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    cluster_learn(a->c, 2, "127.0.0.1", port);
    CHECK_OK(send_number(a, 2, 0));
    rig_turn_ms(&r, 50);
    int fd = accept(listener, NULL, NULL);
    read_frame(&r, fd, &h, body, sizeof body);
    Baton__LinkProof p = BATON__LINK_PROOF__INIT;
    p.node = 2;
    p.nonce = (ProtobufCBinaryData){ sizeof nonce, nonce };
    p.mac = (ProtobufCBinaryData){ sizeof mac, mac };
    send_frame(fd, FRAME_LINK_PROOF, 1, body, baton__link_proof__pack(&p, body));
    RIG_WAIT(&r, a->n_lost == 1);
    CHECK(strstr(a->why, "secret") != NULL);
    close(fd);
    close(listener);
    peer_close(a);
    cluster_rig_close(&r);
}

/* A stranger sends bytes to a node's port: the connection must end and nothing be delivered. */
static void check_stranger(struct cluster_rig *r, struct peer_node *a, const void *p, size_t n)
{
    int fd = fixture_dial(cluster_port(a->c));
    uint8_t back[4096];
    fixture_send(fd, p, n);
    ssize_t got = -1;
    for (uint64_t end = clock_ms() + RIG_LONG_MS; got != 0;) {
        got = recv(fd, back, sizeof back, MSG_DONTWAIT);
        if (got < 0 && errno == ECONNRESET) break;
        CHECK(clock_ms() < end);
        uv_run(loop_uv(r->loop), UV_RUN_ONCE);
    }
    close(fd);
    CHECK_EQ_INT(a->n_log, 0);
    CHECK_EQ_INT(a->n_lost, 0);
}

TEST(cluster_strangers_bytes_end_their_connection)
{
    struct cluster_rig r;
    uint8_t bytes[FRAME_HEADER_BYTES + 64] = { 0 };
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    check_stranger(&r, a, http, sizeof http - 1);
    frame_header_encode(&(struct frame_header){ .type = FRAME_RUN, .length = 4, .incarnation = 1 },
                        bytes);
    check_stranger(&r, a, bytes, FRAME_HEADER_BYTES + 4);
    frame_header_encode(&(struct frame_header){ .type = FRAME_LINK_HELLO, .length = 100000 },
                        bytes);
    check_stranger(&r, a, bytes, FRAME_HEADER_BYTES); /* a hello is small */
    frame_header_encode(&(struct frame_header){ .type = FRAME_LINK_HELLO, .length = 4 }, bytes);
    memset(bytes + FRAME_HEADER_BYTES, 0xff, 4);
    check_stranger(&r, a, bytes, FRAME_HEADER_BYTES + 4);
    frame_header_encode(&(struct frame_header){ .type = FRAME_LINK_READY, .incarnation = 1 },
                        bytes);
    check_stranger(&r, a, bytes, FRAME_HEADER_BYTES);
    /* A good hello, then a message instead of the proof. */
    uint8_t nonce[16] = { 0 };
    Baton__LinkHello m = BATON__LINK_HELLO__INIT;
    m.protocol = FRAME_VERSION;
    m.node = 9;
    m.want = 1;
    m.nonce = (ProtobufCBinaryData){ sizeof nonce, nonce };
    struct buf b = { 0 };
    size_t n = baton__link_hello__pack(&m, (uint8_t *)buf_reserve(&b, 256) + FRAME_HEADER_BYTES);
    frame_header_encode(
        &(struct frame_header){ .type = FRAME_LINK_HELLO, .length = (uint32_t)n, .incarnation = 1 },
        (uint8_t *)b.data);
    b.len = FRAME_HEADER_BYTES + n;
    frame_header_encode(&(struct frame_header){ .type = FRAME_CANCEL, .incarnation = 1 }, bytes);
    buf_add(&b, bytes, FRAME_HEADER_BYTES);
    check_stranger(&r, a, b.data, b.len);
    buf_release(&b);
    CHECK(!cluster_knows(a->c, 9));
    peer_close(a);
    cluster_rig_close(&r);
}

TEST(cluster_silent_strangers_are_cut_off)
{
    struct cluster_rig r;
    char byte;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 });
    int fd = fixture_dial(cluster_port(a->c));
    uint64_t t = clock_ms();
    RIG_WAIT_MS(&r, recv(fd, &byte, 1, MSG_DONTWAIT) == 0, 5000);
    CHECK(clock_ms() - t < 4500);
    CHECK_EQ_INT(a->n_lost, 0);
    close(fd);
    peer_close(a);
    cluster_rig_close(&r);
}

/* Opens connections that say nothing, and lets the node accept them. */
static void dial_strangers(struct cluster_rig *r, const struct peer_node *to, int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fds[i] = fixture_dial(cluster_port(to->c));
        if (i % 64 == 63) uv_run(loop_uv(r->loop), UV_RUN_NOWAIT);
    }
    rig_turn_ms(r, 20);
}

TEST(cluster_half_open_connections_do_not_keep_a_peer_out)
{
    enum { STRANGERS = 600 };
    struct rlimit files;
    struct cluster_rig r;
    int fds[STRANGERS], n_open = 0;
    char byte;
    CHECK_OK(getrlimit(RLIMIT_NOFILE, &files));
    files.rlim_cur = files.rlim_max;
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &files));
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    dial_strangers(&r, a, fds, STRANGERS);
    peer_meet(b, a);
    CHECK_OK(send_number(b, 1, 0));
    RIG_WAIT_MS(&r, a->n_log == 1, 1000); /* the strangers' deadline is later */
    CHECK_EQ_INT(a->n_lost + b->n_lost, 0);
    /* The oldest strangers were closed, and a bounded number waits. */
    for (int i = 0; i < STRANGERS; i++) n_open += recv(fds[i], &byte, 1, MSG_DONTWAIT) < 0;
    CHECK(n_open > 0 && n_open <= UNPROVEN_MAX);
    CHECK_EQ_INT(recv(fds[0], &byte, 1, MSG_DONTWAIT), 0);
    for (int i = 0; i < STRANGERS; i++) close(fds[i]);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

/* A claim to be a known node must not harm that node's link. */
TEST(cluster_stranger_cannot_cut_a_peers_link)
{
    struct cluster_rig r;
    uint8_t nonce[16] = { 0 }, bytes[512];
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    peer_meet(a, b);
    CHECK_OK(send_number(a, 2, 0));
    RIG_WAIT(&r, b->n_log == 1);
    Baton__LinkHello m = BATON__LINK_HELLO__INIT;
    m.protocol = FRAME_VERSION;
    m.node = 2;
    m.nonce = (ProtobufCBinaryData){ sizeof nonce, nonce };
    size_t n = baton__link_hello__pack(&m, bytes + FRAME_HEADER_BYTES);
    frame_header_encode(&(struct frame_header){ .type = FRAME_LINK_HELLO, .length = (uint32_t)n },
                        bytes);
    int fd = fixture_dial(cluster_port(a->c));
    fixture_send(fd, bytes, FRAME_HEADER_BYTES + n);
    rig_turn_ms(&r, 100);
    close(fd);
    rig_turn_ms(&r, 200);
    CHECK_EQ_INT(a->n_lost + b->n_lost, 0);
    CHECK_OK(send_number(a, 2, 1));
    RIG_WAIT(&r, b->n_log == 2);
    peer_close(a);
    peer_close(b);
    cluster_rig_close(&r);
}

/* ---- the end ---- */

TEST(cluster_free_with_everything_pending)
{
    struct cluster_rig r;
    cluster_rig_open(&r);
    struct peer_node *a = peer_open(&r, 1, (struct peer_options){ 0 }),
                     *b = peer_open(&r, 2, (struct peer_options){ 0 });
    struct peer_node *c = peer_open(&r, 3, (struct peer_options){ 0 });
    uint8_t *big = mem_calloc(1, 8 << 20);
    peer_meet(a, b);
    CHECK_OK(send_number(a, 2, 0));
    RIG_WAIT(&r, b->n_log == 1);
    CHECK_OK(cluster_send(a->c, 2, FRAME_GRANT, 1, 1, bytes_of(big, 8 << 20))); /* half written */
    peer_meet(a, c);
    CHECK_OK(send_number(a, 3, 0)); /* dialing */
    cluster_learn(a->c, 4, "bad", 1);
    CHECK_OK(send_number(a, 4, 0)); /* dead, not reaped */
    CHECK_OK(send_number(a, 1, 0)); /* to itself */
    peer_close(a);
    RIG_WAIT(&r, b->n_lost == 1);
    CHECK_EQ_INT(c->n_lost, 0);
    mem_free(big);
    peer_close(b);
    peer_close(c);
    cluster_rig_close(&r);
}

TEST_MAIN(
    CASE(cluster_delivers_in_order_in_both_directions), CASE(cluster_both_sides_dial_at_once),
    CASE(cluster_delivers_to_itself_in_order_and_later), CASE(cluster_big_messages_arrive_whole),
    CASE(cluster_wrong_secret_is_lost_and_nothing_arrives),
    CASE(cluster_a_stranger_with_many_names_is_logged_once),
    CASE(cluster_every_reason_of_a_refused_host_is_logged), CASE(cluster_wrong_incarnation_is_lost),
    CASE(cluster_refused_connection_and_bad_address_are_lost),
    CASE(cluster_port_taken_is_a_clear_error),
    CASE(cluster_queue_is_bounded_before_and_after_the_link_is_up),
    CASE(cluster_disconnect_is_a_loss_on_both_sides),
    CASE(cluster_forgets_addresses_that_nobody_uses), CASE(cluster_headers_count_against_the_queue),
    CASE(cluster_no_progress_with_work_is_lost),
    CASE(cluster_hang_between_two_pings_is_noticed_in_time),
    CASE(cluster_progress_just_in_time_is_no_hang), CASE(cluster_killed_peer_is_lost_at_once),
    CASE(cluster_peer_that_ends_in_order_says_so),
    CASE(cluster_frozen_peer_is_lost_within_three_seconds),
    CASE(cluster_connections_that_nobody_answers_are_given_up),
    CASE(cluster_who_comes_and_goes_without_a_word_is_not_refused),
    CASE(cluster_own_stop_loses_nobody),
    CASE(cluster_acceptor_that_skips_its_proof_stays_a_stranger),
    CASE(cluster_acceptor_with_a_wrong_proof_stays_a_stranger),
    CASE(cluster_strangers_bytes_end_their_connection), CASE(cluster_silent_strangers_are_cut_off),
    CASE(cluster_half_open_connections_do_not_keep_a_peer_out),
    CASE(cluster_stranger_cannot_cut_a_peers_link), CASE(cluster_free_with_everything_pending))
