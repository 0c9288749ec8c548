/* batch_tally.h - what became of the lines of a batch, for the summary: how answers ended, and why
 * lines failed; for deploy/generate only.
 *
 * Failures with the same sentence are one reason; of more than BATCH_REASONS_MAX different ones the
 * rest are counted together.
 * Life cycle: zeroes are an empty tally. Thread: its owner's. */
#ifndef BATON_DEPLOY_GENERATE_BATCH_TALLY_H
#define BATON_DEPLOY_GENERATE_BATCH_TALLY_H

#include <stdint.h>

#include "shared/base/buf.h"

enum {
    BATCH_REASON_MAX = 240, /* bytes of a sentence, with its 0; longer ones are cut */
    BATCH_REASONS_MAX = 16,
    BATCH_FINISHES_MAX = 3
};

struct batch_reason {
    char text[BATCH_REASON_MAX];
    uint64_t n, first_line; /* the lowest number of a line */
};

/* Choices of answers by their finish_reason; a request with n > 1 has several. */
struct batch_finishes {
    uint64_t n[BATCH_FINISHES_MAX];
};

struct batch_tally {
    uint64_t n_ok, n_failed;
    struct batch_finishes finishes;
    struct batch_reason reasons[BATCH_REASONS_MAX];
    size_t n_reasons;
    uint64_t n_other; /* failures with other reasons */
};

/* Counts the answers' ends in whole output lines. */
void batch_finishes_count(struct batch_finishes *f, struct str lines);
void batch_finishes_add(struct batch_finishes *to, const struct batch_finishes *from);
/* Counts line `number` as failed. */
void batch_tally_failure(struct batch_tally *t, const char *sentence, uint64_t number);
/* Appends "N answered, N failed" and a line for each way in which answers ended and lines failed,
 * the most frequent first. */
void batch_tally_summary(const struct batch_tally *t, struct buf *out);

#endif
