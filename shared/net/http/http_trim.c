/* http_trim.c - gives the memory of a burst of requests back to the system once the burst is over.
 *
 * Buffers below a megabyte come from malloc's heaps, which shrink from their end only: one block
 * that stays keeps all free ones before it resident. So when many bodies, answers or requests were
 * held at once and few of them are left for two looks in a row, a worker gives the free pages back.
 * While a burst goes on nothing is given back, since it would be needed again at once.
 * Thread: loop. */
#include "shared/base/mem.h"
#include "shared/net/http/http_conn.h"

enum {
    TRIM_BURST = 16 << 20,   /* bytes that make a burst */
    TRIM_REQUEST = 32 << 10, /* bytes that a running request counts for, beside its body */
    TRIM_LOOK_MS = 1000,
    TRIM_LOOKS = 2
};

static size_t held(const struct http_server *s)
{
    return http_bodies_bytes(s->bodies) + s->backlog.n_bytes + (size_t)s->n_open * TRIM_REQUEST;
}

static void trim_work(void *arg)
{
    (void)arg;
    mem_return_free_pages();
}

static void on_look(uv_timer_t *t)
{
    struct http_server *s = t->data;
    size_t n = held(s);
    if (n > s->burst / 4) {
        s->n_quiet = 0;
        return;
    }
    if (++s->n_quiet < TRIM_LOOKS) return;
    if (loop_work(s->o.loop, trim_work, NULL, NULL) != OK) return; /* looks again */
    s->burst = 0;
    uv_timer_stop(t);
}

void http_trim_note(struct http_server *s)
{
    size_t n = held(s);
    if (n <= s->burst || n < TRIM_BURST) return;
    if (s->burst == 0 && !s->stopping)
        uv_timer_start(&s->trim, on_look, TRIM_LOOK_MS, TRIM_LOOK_MS);
    s->burst = n;
    s->n_quiet = 0;
}
