/* normalizer.h - the normalizers of tokenizer.json: a chain of steps, applied in order to the text
 * between two added tokens before it is split.
 *
 * Life cycle: { 0 } is an empty chain, add steps, then read-only, release.
 * Thread: run on any. */
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
/* A text may grow to (length + INSERT_MAX) * GROWTH_MAX bytes, far above any real chain. */
enum { NORMALIZER_STEPS_MAX = 8, NORMALIZER_INSERT_MAX = 64, NORMALIZER_GROWTH_MAX = 64 };

struct normalizer_step {
    enum normalizer_kind kind;
    struct buf from, to; /* REPLACE: every `from` becomes `to`; PREPEND: puts `to` in front */
};

struct normalizer {
    struct normalizer_step steps[NORMALIZER_STEPS_MAX];
    size_t n;
};

/* Adds a step; the arguments are copied. ERR_FULL after NORMALIZER_STEPS_MAX steps, ERR_TOO_LONG
 * when `to` has more than NORMALIZER_INSERT_MAX bytes. */
enum status normalizer_add(struct normalizer *z, enum normalizer_kind kind, struct str from,
                           struct str to) MUST_CHECK;
void normalizer_release(struct normalizer *z);
/* Normalises `text` (valid UTF-8) in place; `scratch` is overwritten. ERR_TOO_LONG when it grows
 * beyond the limit above. */
enum status normalizer_run(const struct normalizer *z, struct buf *text,
                           struct buf *scratch) MUST_CHECK;

#endif
