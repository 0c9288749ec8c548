/* text_server.c - see text_server.h.
 *
 *     MAKING (a worker) ─▶ SENDING ─▶ the end of the exchange
 *
 * A client that leaves ends an answer in any state; while a worker has it, it is freed when the
 * worker is done. Thread: loop, except make. */
#include "deploy/text/text_server.h"

#include "shared/base/mem.h"

enum { PIECE_BYTES = 256 << 10 };

struct text_answer {
    struct text_server *server;
    struct http_exchange *x; /* NULL: its client has left */
    struct text_source from;
    struct str secret;
    bool on_worker;
    enum status st;
    struct err err;
    struct buf bytes;
    size_t n_sent;
};

static void answer_free(struct text_answer *a)
{
    a->server->n_answers--;
    buf_release(&a->bytes);
    mem_free(a);
}

static void refuse(struct http_exchange *x, enum status st, const char *why)
{
    http_reply_error(x, status_http(st), "Retry-After: 1\r\n", "error", why);
}

static void on_end(void *arg, bool gone)
{
    struct text_answer *a = arg;
    (void)gone;
    a->x = NULL;
    if (!a->on_worker) answer_free(a);
}

/* Keeps little more than a piece in the connection's queue. */
static void send_more(void *arg)
{
    struct text_answer *a = arg;
    while (a->n_sent < a->bytes.len && http_stream_queue(a->x) < PIECE_BYTES) {
        const struct str piece = str_sub(buf_str(&a->bytes), a->n_sent, PIECE_BYTES);
        if (http_stream_write(a->x, piece) != OK) return; /* on_end follows */
        a->n_sent += piece.n;
    }
    if (a->n_sent < a->bytes.len) return;
    http_on_drain(a->x, NULL, NULL);
    http_stream_end(a->x);
}

/* Thread: a worker. */
static void make(void *arg)
{
    struct text_answer *a = arg;
    a->st = text_bundle_write(&a->from, a->secret, &a->bytes, &a->err);
}

static void on_made(void *arg)
{
    struct text_answer *a = arg;
    a->on_worker = false;
    if (!a->x) {
        answer_free(a);
    } else if (a->st != OK) {
        refuse(a->x, a->st, a->err.text);
    } else {
        http_stream_begin(a->x, 200, "application/octet-stream", NULL);
        http_on_drain(a->x, send_more, a);
        send_more(a);
    }
}

void text_server_answer(struct text_server *s, const struct text_source *from, struct str secret,
                        struct http_exchange *x)
{
    if (s->n_answers >= TEXT_ANSWERS_MAX) {
        refuse(x, ERR_UNAVAILABLE, "others are being given the text just now; ask again");
        return;
    }
    struct text_answer *a = MEM_NEW(struct text_answer);
    *a = (struct text_answer){ .server = s, .x = x, .from = *from, .secret = secret };
    s->n_answers++;
    if (loop_work(s->loop, make, on_made, a) != OK) {
        answer_free(a);
        refuse(x, ERR_UNAVAILABLE, "all worker threads are busy; ask again");
        return;
    }
    a->on_worker = true;
    http_on_end(x, on_end, a);
}
