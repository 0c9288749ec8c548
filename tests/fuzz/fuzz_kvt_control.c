/* fuzz_kvt_control.c - hostile bytes for the control connection; the first byte chooses.
 *
 *   even   the frame decoder: an accepted frame must encode to the same bytes, and a prefix of the
 *          input must never decode to another frame than the whole input
 *   odd    a hub, over a real socket, from a peer with a valid ticket, in pieces sized by the first
 *          byte: the hub must report exactly the decoder's frames, in order, and then LOST */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvtransfer/connect/control.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

static void decode(struct str in)
{
    struct control_frame f, shorter;
    size_t used, less;
    enum status st;
    while ((st = control_frame_decode(in.p, in.n, &f, &used)) == OK) {
        struct buf again = { 0 };
        control_frame_encode(&again, f.kind, f.after, f.body.p, f.body.n);
        ASSERT(used <= in.n && again.len == used);
        ASSERT(memcmp(again.data, in.p, used) == 0);
        for (size_t cut = 0; cut < used; cut++)
            ASSERT(control_frame_decode(in.p, cut, &shorter, &less) == ERR_BUSY);
        buf_release(&again);
        in = str_sub(in, used, in.n);
    }
    ASSERT(st == ERR_BUSY || st == ERR_FORMAT);
    ASSERT(st == ERR_FORMAT || in.n < CONTROL_HEAD_BYTES + CONTROL_BODY_MAX);
}

struct expected_events {
    struct str rest; /* input not decoded yet */
    bool opened, lost;
};

static void on_event(void *arg, const struct control_event *ev)
{
    struct expected_events *t = arg;
    struct control_frame f;
    size_t used;
    ASSERT(!t->lost);
    if (ev->kind == CONTROL_OPENED) {
        ASSERT(!t->opened);
        t->opened = true;
    } else if (ev->kind == CONTROL_FRAME) {
        ASSERT(t->opened && control_frame_decode(t->rest.p, t->rest.n, &f, &used) == OK);
        ASSERT(f.kind == ev->frame && f.after == ev->after && f.body.n == ev->body.n);
        ASSERT(f.body.n == 0 || memcmp(f.body.p, ev->body.p, f.body.n) == 0);
        t->rest = str_sub(t->rest, used, t->rest.n);
    } else {
        ASSERT(control_frame_decode(t->rest.p, t->rest.n, &f, &used) == ev->status ||
               ev->status == ERR_PEER_LOST);
        t->lost = true;
        control_close(ev->conn);
    }
}

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    (void)arg, (void)ticket;
    return OK;
}

static void send_some(int fd, const void *p, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t sent = send(fd, (const char *)p + at, n - at, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return; /* the hub has closed the connection */
        at += (size_t)sent;
    }
}

static void converse(struct str in, size_t piece)
{
    struct kvt_env env = { .listen_host = "127.0.0.1", .max_peers = 2, .admit = admit };
    struct control_hub *h = NULL;
    struct expected_events t = { .rest = in };
    ASSERT(control_open(&env, "fuzz", 0, NULL, &h, NULL) == OK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {
        .sin_family = AF_INET,
        .sin_port = htons(control_port(h)),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    /* A different loopback address each time: one alone runs out of ports, which stay in TIME_WAIT
     * for a minute. */
    int late = 1;
    struct sockaddr_in from = {
        .sin_family = AF_INET,
        .sin_addr.s_addr = htonl(0x7f010000u | ((uint32_t)(clock_ns() >> 10) & 0xffffu)),
    };
    ASSERT(setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &late, sizeof late) == 0 &&
           bind(fd, (struct sockaddr *)&from, sizeof from) == 0);
    int st;
    do st = connect(fd, (struct sockaddr *)&a, sizeof a);
    /* interrupted by the fuzzer's SIGALRM; the connect continues */
    while (st != 0 && (errno == EINTR || errno == EALREADY));
    ASSERT(st == 0 || errno == EISCONN);
    uint8_t hello[KVT_PREAMBLE_BYTES];
    kvt_preamble_encode(&(struct kvt_preamble){ .kind = KVT_PREAMBLE_TICKET }, hello);
    send_some(fd, hello, sizeof hello);
    for (size_t at = 0; at < in.n; at += piece) {
        send_some(fd, in.p + at, in.n - at < piece ? in.n - at : piece);
        control_poll(h, on_event, &t);
    }
    shutdown(fd, SHUT_WR);
    for (int i = 0; i < 100000 && !t.lost; i++) control_poll(h, on_event, &t);
    ASSERT(t.opened && t.lost);
    close(fd);
    control_hub_free(h);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    struct str in = { (const char *)data + 1, size - 1 };
    if (data[0] % 2 == 0) decode(in);
    else converse(in, 1 + (size_t)data[0] * 8);
    return 0;
}
