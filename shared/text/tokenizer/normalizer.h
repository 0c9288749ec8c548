/* normalizer.h - the normalisers of tokenizer.json: what is done to text before it is split.
 *
 * A chain of steps, applied in order to one section of text between added tokens.
 * Life cycle: { 0 } is an empty chain, add steps, then read-only; release. Thread: run on any. */
#ifndef BATON_TEXT_TOKENIZER_NORMALIZER_H
#define BATON_TEXT_TOKENIZER_NORMALIZER_H

#include "shared/base/buf.h"

enum normalizer_kind {
    NORMALIZER_NFC,
    NORMALIZER_NFD,
    NORMALIZER_NFKC,
    NORMALIZER_NFKD,
    NORMALIZER_PREPEND,
    NORMALIZER_REPLACE
};
/* A text may grow this many times over, and by a few bytes: no real chain comes near it. */
enum { NORMALIZER_STEPS_MAX = 8, NORMALIZER_INSERT_MAX = 64, NORMALIZER_GROWTH_MAX = 64 };

struct normalizer_step {
    enum normalizer_kind kind;
    struct buf from, to; /* NORMALIZER_REPLACE: every `from` becomes `to`;
                          * NORMALIZER_PREPEND puts `to` in front */
};

struct normalizer {
    struct normalizer_step steps[NORMALIZER_STEPS_MAX];
    size_t n;
};

/* Copies its arguments. ERR_FULL after NORMALIZER_STEPS_MAX steps, ERR_TOO_LONG when `to` is over
 * NORMALIZER_INSERT_MAX bytes. */
enum status normalizer_add(struct normalizer *z, enum normalizer_kind kind, struct str from,
                           struct str to) MUST_CHECK;
void normalizer_release(struct normalizer *z);
/* Replace the contents of `text` (valid UTF-8) by its normal form; `scratch` is overwritten.
 * ERR_TOO_LONG when it grows too far. */
enum status normalizer_run(const struct normalizer *z, struct buf *text,
                           struct buf *scratch) MUST_CHECK;
/* Append `s` with every `from` (not empty) replaced. */
void normalizer_replace(struct buf *out, struct str s, struct str from, struct str to);

#endif
