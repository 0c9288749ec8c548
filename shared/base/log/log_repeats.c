/* log_repeats.c - see log_repeats.h. Thread: the owner's. */
#include "shared/base/log/log_repeats.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/hash/hash.h"

static bool is_recent(uint64_t logged_ms, uint64_t now_ms)
{
    return now_ms - logged_ms < LOG_REPEATS_MS;
}

static void hold_back(struct log_repeats *r, const char *text, uint64_t now_ms)
{
    if (r->n_others++ > 0) return;
    snprintf(r->other, sizeof r->other, "%s", text);
    r->first_other_ms = now_ms;
}

static void report_others(struct log_repeats *r, uint64_t now_ms)
{
    if (r->n_others == 0) return;
    if (r->others_reported && is_recent(r->others_ms, now_ms)) return;
    log_warn("log lines held back",
             "n=%u like=\"%s\" since_s=%llu why=\"more than %d different texts in %d s\"",
             r->n_others, r->other, (unsigned long long)(now_ms - r->first_other_ms) / 1000,
             LOG_REPEATS_TEXTS, LOG_REPEATS_MS / 1000);
    r->n_others = 0;
    r->others_reported = true;
    r->others_ms = now_ms;
}

/* Returns the place of a text; else a free one; else that of the text that was not logged for the
 * longest time, if it is long; else LOG_REPEATS_TEXTS. A free place has logged_ms 0. */
static size_t find_place(const struct log_repeats *r, uint64_t hash, uint64_t now_ms)
{
    size_t oldest = 0;
    for (size_t i = 0; i < LOG_REPEATS_TEXTS; i++) {
        if (r->texts[i].text == hash) return i;
        if (r->texts[i].logged_ms < r->texts[oldest].logged_ms) oldest = i;
    }
    const bool free = !r->texts[oldest].text;
    return free || !is_recent(r->texts[oldest].logged_ms, now_ms) ? oldest : LOG_REPEATS_TEXTS;
}

bool log_repeats_due(struct log_repeats *r, const char *text, uint64_t now_ms, uint32_t *n)
{
    uint64_t hash = hash_64(text, strlen(text), 0) | 1;
    size_t at = find_place(r, hash, now_ms);
    *n = 0;
    if (at == LOG_REPEATS_TEXTS) hold_back(r, text, now_ms);
    report_others(r, now_ms);
    if (at == LOG_REPEATS_TEXTS) return false;
    bool known = r->texts[at].text == hash;
    if (known && is_recent(r->texts[at].logged_ms, now_ms)) {
        r->texts[at].n++;
        return false;
    }
    if (known) *n = r->texts[at].n;
    r->texts[at].text = hash;
    r->texts[at].logged_ms = now_ms;
    r->texts[at].n = 0;
    return true;
}

enum log_level log_repeats_level(struct log_repeats *r, const char *text, uint64_t now_ms,
                                 enum log_level level, uint32_t *n)
{
    return log_repeats_due(r, text, now_ms, n) ? level : LOG_DEBUG;
}
