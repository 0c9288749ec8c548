/* http_backlog.c - see http_backlog.h. Thread: loop. */
#include "shared/net/http/http_backlog.h"

#include "shared/base/log.h"
#include "shared/net/http/http_conn.h"

void http_backlog_init(struct http_backlog *b, size_t max_bytes, struct metrics *m)
{
    *b = (struct http_backlog){ .max_bytes = max_bytes };
    list_init(&b->conns);
    if (!m) return;
    const char *name = "baton_http_answers_dropped_total",
               *help = "Answers dropped because too many bytes of answers waited to be read; cut: "
                       "of a client that did not read; refused: a 503 was sent instead.";
    b->m_bytes = metrics_gauge(m, "baton_http_answer_bytes", "",
                               "Bytes of answers that clients have not read yet.");
    b->m_cut = metrics_counter(m, name, "how=\"cut\"", help);
    b->m_refused = metrics_counter(m, name, "how=\"refused\"", help);
}

static void set_share(struct http_backlog *b, struct http_backlog_share *s, size_t n)
{
    b->n_bytes = b->n_bytes - s->n_bytes + n;
    s->n_bytes = n;
    if (b->m_bytes) gauge_set(b->m_bytes, (double)b->n_bytes);
}

void http_backlog_leave(struct http_conn *c)
{
    list_remove(&c->held.link);
    set_share(&c->server->backlog, &c->held, 0);
}

/* The connection goes behind all others: it has just begun to hold bytes, or kept its pace. */
static void begin_pace(struct http_conn *c)
{
    list_remove(&c->held.link);
    list_push(&c->server->backlog.conns, &c->held.link);
    c->held.t_pace = uv_now(c->tcp.loop);
    c->held.n_taken = http_conn_taken(c);
}

void http_backlog_update(struct http_conn *c)
{
    size_t n = c->next.len + (c->writing ? c->in_flight.len : 0);
    if (n == 0) {
        http_backlog_leave(c);
        return;
    }
    if (c->held.n_bytes == 0) begin_pace(c);
    set_share(&c->server->backlog, &c->held, n);
    http_trim_note(c->server);
}

/* Cuts the connection that has kept no pace for the longest; false when all keep it. */
static bool cut_one(struct http_conn *for_whom)
{
    struct http_backlog *b = &for_whom->server->backlog;
    while (!list_empty(&b->conns)) {
        struct http_conn *c = LIST_FIRST(&b->conns, struct http_conn, held.link);
        if (http_conn_taken(c) - c->held.n_taken >= HTTP_PACE_BYTES) {
            begin_pace(c);
            continue;
        }
        if (c == for_whom || uv_now(c->tcp.loop) - c->held.t_pace < HTTP_STALL_MS) return false;
        log_debug("http client does not read", "peer=%s held=%zu all=%zu", c->peer, c->held.n_bytes,
                  b->n_bytes);
        if (b->m_cut) counter_add(b->m_cut, 1);
        http_backlog_leave(c); /* its memory goes within this turn of the loop */
        http_conn_break(c);
        return true;
    }
    return false;
}

bool http_backlog_admit(struct http_conn *c, size_t n)
{
    const struct http_backlog *b = &c->server->backlog;
    while (b->n_bytes > c->held.n_bytes && b->n_bytes + n > b->max_bytes)
        if (!cut_one(c)) return false;
    return true;
}
