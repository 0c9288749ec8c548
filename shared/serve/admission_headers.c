/* admission_headers.c - see admission_headers.h. */
#include "shared/serve/admission_headers.h"

#include <stdio.h>

enum {
    WANTED_MS_MAX = 24 * 3600 * 1000,
    HEDGE_MS_MAX = 60000,
    SHOWN_MAX = 40, /* of a header, in an error */
    OPENAI_WAIT_S_MAX = 60
};

static enum status read_ms(const struct http_exchange *x, const char *name, int64_t max,
                           uint32_t *out, struct err *err)
{
    struct str text = http_header(x, name);
    int64_t v = 0;
    if (!text.p) return OK;
    if (str_to_i64(text, &v) != OK || v < 1 || v > max)
        return err_field(err, ERR_INVALID, name,
                         "%s is '%.*s', but must be a whole number of milliseconds from 1 to %lld",
                         name, (int)(text.n < SHOWN_MAX ? text.n : SHOWN_MAX), text.p,
                         (long long)max);
    *out = (uint32_t)v;
    return OK;
}

enum status admission_read_headers(const struct http_exchange *x, struct gen_admission *out,
                                   struct err *err)
{
    struct str retry = http_header(x, "x-baton-retry"),
               count = http_header(x, "x-stainless-retry-count");
    int64_t n = 0;
    *out = (struct gen_admission){ 0 };
    TRY(read_ms(x, "x-baton-ttft-ms", WANTED_MS_MAX, &out->ttft_ms, err));
    TRY(read_ms(x, "x-baton-deadline-ms", WANTED_MS_MAX, &out->deadline_ms, err));
    TRY(read_ms(x, "x-baton-hedge-ms", HEDGE_MS_MAX, &out->hedge_ms, err));
    /* A text that is no such promise is one that has lapsed: the request is a new one. */
    if (retry.n < sizeof out->retry)
        snprintf(out->retry, sizeof out->retry, "%.*s", STR_ARG(retry));
    out->is_retry = count.n && str_to_i64(count, &n) == OK && n > 0;
    return OK;
}

/* OpenAI's client libraries read retry-after-ms before Retry-After, and take more than a minute for
 * nothing: they would come again at once, and give up within seconds. */
void admission_add_retry(int http, uint32_t retry_after_s, const char *retry, struct buf *out)
{
    if (http == 504) buf_add_c(out, "x-should-retry: false\r\n");
    if (http != 429 && http != 503) return;
    if (retry_after_s == 0) retry_after_s = 1;
    buf_printf(out, "Retry-After: %u\r\nretry-after-ms: %u000\r\n", retry_after_s,
               retry_after_s < OPENAI_WAIT_S_MAX ? retry_after_s : OPENAI_WAIT_S_MAX);
    if (retry && retry[0]) buf_printf(out, "x-baton-retry: %s\r\n", retry);
}

static void add_limit(const char *what, uint64_t limit, uint64_t left, uint32_t reset_s,
                      struct buf *out)
{
    if (!limit) return;
    buf_printf(out,
               "x-ratelimit-limit-%s: %llu\r\nx-ratelimit-remaining-%s: %llu\r\n"
               "x-ratelimit-reset-%s: %us\r\n",
               what, (unsigned long long)limit, what, (unsigned long long)left, what, reset_s);
}

void admission_add_limits(const struct serve_backend *b, uint32_t tenant, struct buf *out)
{
    struct gen_limits l = { 0 };
    if (!b->limits) return;
    b->limits(b->self, tenant, &l);
    add_limit("requests", l.requests, l.requests_left, l.requests_reset_s, out);
    add_limit("tokens", l.tokens, l.tokens_left, l.tokens_reset_s, out);
}
