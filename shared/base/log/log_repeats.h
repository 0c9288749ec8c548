/* log_repeats.h - lets a line be logged when it is new, and counts it while it repeats.
 *
 *     uint32_t n;
 *     if (log_repeats_due(&r, why, clock_ms(), &n))
 *         log_warn("link refused", "peer=%s why=\"%s\" repeats=%u", peer, why, n);
 *
 * A text is due when it was not logged within LOG_REPEATS_MS and fewer than LOG_REPEATS_TEXTS
 * others were: who chooses parts of a text could else fill the log. Those that find no place are
 * counted; "log lines held back" says how many they were, when the first one comes and then once
 * per LOG_REPEATS_MS. Texts are known by their hash. A zeroed struct is ready for use.
 * Thread: the owner's. */
#ifndef BATON_BASE_LOG_REPEATS_H
#define BATON_BASE_LOG_REPEATS_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/log.h"

enum { LOG_REPEATS_TEXTS = 64, LOG_REPEATS_MS = 60000, LOG_REPEATS_SAMPLE = 160 };

struct log_repeats {
    struct {
        uint64_t text;      /* hash; 0: free */
        uint64_t logged_ms; /* when it was logged last */
        uint32_t n;         /* since then not logged */
    } texts[LOG_REPEATS_TEXTS];
    uint32_t n_others; /* texts without a place, since that was reported last */
    bool others_reported;
    uint64_t others_ms, first_other_ms; /* when it was; when the first of n_others came */
    char other[LOG_REPEATS_SAMPLE];     /* the first of n_others */
};

/* Returns whether `text` is to be logged at now_ms. Then *n is how often it came unlogged since the
 * last time. */
bool log_repeats_due(struct log_repeats *r, const char *text, uint64_t now_ms, uint32_t *n);
/* For lines of single requests, which somebody may look for: `level` when `text` is due, else
 * LOG_DEBUG. */
enum log_level log_repeats_level(struct log_repeats *r, const char *text, uint64_t now_ms,
                                 enum log_level level, uint32_t *n);

#endif
