/* fetch.c - the connections of a fetch, and answers that go into memory. Thread: main. */
#include <stdlib.h>
#include <string.h>

#include "deploy/pull/fetch/fetch_internal.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"

enum {
    BACKOFF_FIRST_MS = 250,
    BACKOFF_MAX_MS = 15000,
    PAUSE_MAX_S = 300, /* a server that wants longer ones is left alone */
    LOOK_EVERY_MS = 200,
    SAID_FROM = 3 /* failures in a row: one or two are nothing to look at */
};

/* ---- requests ---- */

enum status fetch_start(struct fetch *f, struct http_get *r, const char *url, bool direct,
                        uint64_t begin, uint64_t end, struct err *err)
{
    const bool is_hub = f->o.hub && hub_has(f->o.hub, url);
    const struct http_get_options o = { .url = url,
                                        .auth = is_hub ? f->o.hub->auth : "",
                                        .is_file = f->o.is_file,
                                        .direct = direct,
                                        .is_ranged = end > begin,
                                        .begin = begin,
                                        .end = end,
                                        .connect_ms = f->o.stall_ms,
                                        .ca_file = f->ca_file,
                                        .ca_dir = f->ca_dir };
    http_get_begin(r, &o, clock_ms());
    if (f->curl.multi_add_handle(f->multi, r->easy) == CURLM_OK) return OK;
    http_get_clear(r);
    return err_set(err, ERR_INTERNAL, "libcurl takes no more transfers");
}

void fetch_stop(struct fetch *f, struct http_get *r)
{
    if (r->busy) f->curl.multi_remove_handle(f->multi, r->easy);
    http_get_clear(r);
}

enum status fetch_wait(struct fetch *f, uint32_t at_most_ms, struct err *err)
{
    struct curl_waitfd stop = { .fd = f->o.stop_fd, .events = CURL_WAIT_POLLIN };
    const uint32_t timeout = at_most_ms < LOOK_EVERY_MS ? at_most_ms : LOOK_EVERY_MS;
    int n;
    f->curl.multi_poll(f->multi, &stop, f->o.stop_fd >= 0, (int)timeout, &n);
    if (stop.revents) return err_set(err, ERR_CANCELED, "it was stopped");
    if (f->curl.multi_perform(f->multi, &n) == CURLM_OK) return OK;
    return err_set(err, ERR_INTERNAL, "libcurl failed");
}

/* The request stays with its libcurl handle until the caller has seen it and stops it. */
struct http_get *fetch_take_ended(struct fetch *f, enum get_end *end)
{
    const uint64_t now_ms = clock_ms();
    void *r = NULL;
    int n;
    for (CURLMsg *m; (m = f->curl.multi_info_read(f->multi, &n)) != NULL;) {
        if (m->msg != CURLMSG_DONE) continue;
        f->curl.easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &r);
        *end = http_get_end(r, m->data.result);
        return r;
    }
    for (uint32_t i = 0; i < f->o.n_connections; i++) {
        struct http_get *one = &f->requests[i];
        if (!one->busy || !http_get_is_stalled(one, f->o.stall_ms, now_ms)) continue;
        *end = one->verdict;
        return one;
    }
    return NULL;
}

uint32_t fetch_backoff_ms(uint32_t n_failures)
{
    uint32_t ms = BACKOFF_FIRST_MS, chance;
    for (uint32_t i = 1; i < n_failures && ms < BACKOFF_MAX_MS; i++) ms *= 2;
    if (ms > BACKOFF_MAX_MS) ms = BACKOFF_MAX_MS;
    random_bytes(&chance, sizeof chance);
    return ms / 2 + chance % (ms / 2 + 1);
}

enum status fetch_note_pause(struct fetch *f, const struct http_get *r, struct err *err)
{
    const uint32_t s = r->head.retry_after_s;
    if ((r->head.status != 429 && r->head.status != 503) || s == 0) return OK;
    if (s > PAUSE_MAX_S) {
        f->refusal = r->head;
        return err_set(
            err, ERR_UNAVAILABLE,
            "the server answers %d and asks to come back in %u s; what came is kept, the "
            "same command goes on",
            r->head.status, s);
    }
    const uint64_t until = clock_ms() + 1000ull * s;
    if (until > f->hold_until_ms) f->hold_until_ms = until;
    progress_end_line(f->o.progress);
    log_warn("pull pauses", "status=%d seconds=%u", r->head.status, s);
    return OK;
}

void fetch_say_again(struct fetch *f, const char *what, uint32_t n_failures, const char *why)
{
    const bool said = n_failures >= SAID_FROM;
    if (said) progress_end_line(f->o.progress);
    log_line(said ? LOG_INFO : LOG_DEBUG, "pull tries again", "of=%s failures=%u why=\"%s\"", what,
             n_failures, why);
}

enum status fetch_fail(struct fetch *f, const struct http_get *r, const char *what, struct err *err)
{
    f->refusal = r->head;
    return err_set(err, r->err.code ? r->err.code : ERR_PEER_LOST, "%.160s: %.300s", what,
                   r->err.text);
}

/* ---- answers into memory ---- */

/* One request, tried again until it ends well or for good; its answer's head is in requests[0]. */
static enum status get(struct fetch *f, const char *url, struct buf *text, size_t max,
                       struct err *err)
{
    struct http_get *r = &f->requests[0];
    uint32_t n_failures = 0;
    f->refusal = (struct answer_head){ 0 };
    for (;;) {
        enum get_end end = GET_AGAIN;
        r->text = text;
        r->text_max = max;
        r->only_head = !text;
        if (text) buf_clear(text);
        TRY(fetch_start(f, r, url, false, 0, text ? 0 : 1, err));
        struct http_get *ended = NULL;
        enum status st = OK;
        while (st == OK && !(ended = fetch_take_ended(f, &end)))
            st = fetch_wait(f, LOOK_EVERY_MS, err);
        fetch_stop(f, r);
        TRY(st);
        if (end == GET_DONE) return OK;
        if (end != GET_AGAIN || ++n_failures > f->o.n_retries) return fetch_fail(f, r, url, err);
        TRY(fetch_note_pause(f, r, err));
        fetch_say_again(f, url, n_failures, r->err.text);
        const uint64_t again_ms = clock_ms() + fetch_backoff_ms(n_failures);
        for (uint64_t now; (now = clock_ms()) < again_ms || now < f->hold_until_ms;)
            TRY(fetch_wait(f, LOOK_EVERY_MS, err));
    }
}

enum status fetch_text(struct fetch *f, const char *url, size_t max, struct buf *out,
                       struct err *err)
{
    return get(f, url, out, max, err);
}

enum status fetch_head(struct fetch *f, const char *url, struct answer_head *out, struct err *err)
{
    TRY(get(f, url, NULL, 0, err));
    *out = f->requests[0].head;
    return OK;
}

const struct answer_head *fetch_refusal(const struct fetch *f) { return &f->refusal; }

/* ---- life cycle ---- */

/* The variables that OpenSSL's and curl's programs read; the library reads none. */
static char *first_variable(const char *const *names)
{
    for (; *names; names++) {
        const char *value = getenv(*names);
        if (value && *value) return mem_strdup(value);
    }
    return NULL;
}

static void wake(void *arg)
{
    struct fetch *f = arg;
    f->curl.multi_wakeup(f->multi);
}

enum status fetch_create(const struct fetch_options *o, struct fetch **out, struct err *err)
{
    static const char *const CA_FILES[] = { "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE",
                                            NULL },
                             *const CA_DIRS[] = { "SSL_CERT_DIR", NULL };
    struct fetch *f = MEM_NEW(struct fetch);
    f->o = *o;
    f->ca_file = first_variable(CA_FILES);
    f->ca_dir = first_variable(CA_DIRS);
    enum status st = curl_library_load(&f->curl, err);
    if (st == OK) f->multi = f->curl.multi_init();
    for (uint32_t i = 0; st == OK && i < o->n_connections; i++) {
        f->requests[i].curl = &f->curl;
        f->requests[i].easy = f->curl.easy_init();
        if (!f->requests[i].easy) st = err_set(err, ERR_NOMEM, "libcurl has no memory");
    }
    if (st == OK && (!f->multi || !(f->checker = checker_create(wake, f))))
        st = err_set(err, ERR_NOMEM, "no thread can be started that checks files");
    if (st == OK) *out = f;
    else fetch_free(f);
    return st;
}

void fetch_free(struct fetch *f)
{
    if (!f) return;
    for (uint32_t i = 0; i < f->o.n_connections; i++) {
        struct http_get *r = &f->requests[i];
        if (!r->easy) continue;
        fetch_stop(f, r);
        f->curl.easy_cleanup(r->easy);
        buf_release(&r->body);
    }
    checker_free(f->checker);
    if (f->multi) f->curl.multi_cleanup(f->multi);
    mem_free(f->ca_file);
    mem_free(f->ca_dir);
    mem_free(f);
}
