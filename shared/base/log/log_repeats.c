/* log_repeats.c - see log_repeats.h. Thread: the owner's. */
#include "shared/base/log/log_repeats.h"

#include <string.h>

#include "shared/base/hash/hash.h"

bool log_repeats_due(struct log_repeats *r, const char *text, uint64_t now_ms, uint32_t *n)
{
    uint64_t hash = hash_64(text, strlen(text), 0) | 1;
    size_t at = 0, oldest = 0;
    while (at < LOG_REPEATS_TEXTS && r->texts[at].text != hash) {
        if (r->texts[at].logged_ms < r->texts[oldest].logged_ms) oldest = at;
        at++;
    }
    bool known = at < LOG_REPEATS_TEXTS;
    if (!known) at = oldest;
    *n = known ? r->texts[at].n : 0;
    if (known && now_ms - r->texts[at].logged_ms < LOG_REPEATS_MS) {
        r->texts[at].n++;
        return false;
    }
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
