/* fuzz_grpc.c - arbitrary bytes for a connection of the gRPC server.
 *
 * The first byte chooses the size of the pieces, and whether the preface and settings of HTTP/2
 * come before the other bytes. The client reads nothing and then leaves: whatever it sent, each call has
 * ended once, and nothing is left of it in the server. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/mem.h"
#include "shared/net/grpc/grpc_conn.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char BEGINNING[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";

struct site {
    struct loop *loop;
    struct grpc_server *server;
    int n_begun, n_ended;
};

static void on_end(void *arg, bool gone)
{
    struct site *s = arg;
    (void)gone;
    s->n_ended++;
}

static void on_begin(void *arg, struct grpc_call *c)
{
    struct site *s = arg;
    s->n_begun++;
    grpc_on_end(c, on_end, s);
}

static void on_one(void *arg, struct grpc_call *c, struct str message)
{
    (void)arg;
    if (grpc_send(c, message) == OK) grpc_finish(c, GRPC_OK, "one");
}

/* Admits some, and is done with some. */
static void on_each(void *arg, struct grpc_call *c, struct str message)
{
    (void)arg;
    if (!grpc_admit(c)) return;
    const enum status st = grpc_send(c, message);
    (void)st;
    if (message.n % 2) grpc_done(c);
}

static void on_half_close(void *arg, struct grpc_call *c)
{
    (void)arg;
    grpc_finish(c, GRPC_ABORTED, NULL);
}

static const struct grpc_method METHODS[] = {
    { .path = "/t.T/One", .begin = on_begin, .message = on_one },
    { .path = "/t.T/Each",
      .streams = true,
      .begin = on_begin,
      .message = on_each,
      .half_close = on_half_close },
    { .path = NULL },
};

static struct site *make_site(void)
{
    struct site *s = MEM_NEW(struct site);
    struct err err;
    if (loop_create(&s->loop, &err) != OK) abort();
    const struct grpc_server_options o = {
        .loop = s->loop,
        .host = "127.0.0.1",
        .limits = { .message_bytes = 5000, .n_calls = 20, .n_requests = 3 },
        .methods = METHODS,
        .arg = s,
    };
    if (grpc_server_start(&o, &s->server, &err) != OK) abort();
    return s;
}

static void turn(struct site *s) { uv_run(loop_uv(s->loop), UV_RUN_NOWAIT); }

/* False: the server has closed the connection. */
static bool send_all(struct site *s, int fd, struct str bytes, size_t piece)
{
    while (bytes.n > 0) {
        const struct str part = str_sub(bytes, 0, piece);
        const ssize_t n = send(fd, part.p, part.n, MSG_NOSIGNAL);
        if (n <= 0) return false;
        bytes = str_sub(bytes, (size_t)n, SIZE_MAX);
        turn(s);
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct site *s;
    int fds[2];
    if (!s) s = make_site();
    if (size < 1) return 0;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) abort();
    const struct str bytes = { (const char *)data + 1, size - 1 };
    const size_t piece = data[0] & 0x7F ? (size_t)data[0] & 0x7F : 4096;
    grpc_conn_open(s->server, fds[0]);
    if (data[0] & 0x80 ||
        send_all(s, fds[1], (struct str){ BEGINNING, sizeof BEGINNING - 1 }, SIZE_MAX))
        (void)send_all(s, fds[1], bytes, piece);
    for (int i = 0; i < 3; i++) turn(s);
    close(fds[1]);
    for (int i = 0; i < 1000 && s->server->n_conns; i++) turn(s);
    if (s->server->n_conns || s->n_begun != s->n_ended || s->server->n_backlog ||
        s->server->n_calls || s->server->n_unparsed || http_bodies_bytes(s->server->bodies) ||
        s->server->clients.len)
        abort();
    return 0;
}
