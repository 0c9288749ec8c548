/* recent.c - see recent.h. Thread: loop. */
#include "scheduler/recent.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/json/json.h"

enum { SLOTS = RECENT_SECONDS + 1 }; /* the running second, and the whole ones */

void recent_add_token(struct recent *r, uint64_t now_ms)
{
    uint64_t second = now_ms / 1000;
    if (second - r->second >= SLOTS) memset(r->n_tokens, 0, sizeof r->n_tokens);
    else
        for (uint64_t s = r->second + 1; s <= second; s++) r->n_tokens[s % SLOTS] = 0;
    r->second = second;
    r->n_tokens[second % SLOTS]++;
}

double recent_tokens_per_s(const struct recent *r, uint64_t now_ms)
{
    uint64_t second = now_ms / 1000, sum = 0;
    /* Seconds after the last token have none, and their slots may hold older ones. */
    for (uint64_t s = second < RECENT_SECONDS ? 0 : second - RECENT_SECONDS; s < second; s++)
        if (s <= r->second && r->second - s < SLOTS) sum += r->n_tokens[s % SLOTS];
    return (double)sum / RECENT_SECONDS;
}

void recent_add_failure(struct recent *r, uint64_t now_ms, enum status st, const char *text)
{
    struct recent_failure *last =
        &r->failures[(r->n_failures + RECENT_FAILURES - 1) % RECENT_FAILURES];
    if (r->n_failures == 0 || strcmp(last->text, text) != 0)
        last = &r->failures[r->n_failures++ % RECENT_FAILURES];
    *last = (struct recent_failure){ .t_ms = now_ms, .st = st };
    snprintf(last->text, sizeof last->text, "%s", text);
}

void recent_write_failures(const struct recent *r, uint64_t now_ms, struct buf *out)
{
    uint32_t n = r->n_failures < RECENT_FAILURES ? r->n_failures : RECENT_FAILURES;
    buf_add_char(out, '[');
    for (uint32_t i = 0; i < n; i++) {
        const struct recent_failure *f = &r->failures[(r->n_failures - 1 - i) % RECENT_FAILURES];
        buf_printf(out, "%s{\"ago_s\":%" PRIu64 ",\"status\":\"%s\",\"text\":", i ? "," : "",
                   (now_ms - f->t_ms) / 1000, status_name(f->st));
        json_add_string(out, str_of(f->text));
        buf_add_char(out, '}');
    }
    buf_add_char(out, ']');
}
