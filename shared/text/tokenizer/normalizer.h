/* normalizer.h - the normalisers of tokenizer.json: what is done to text before it is split.
 *
 * A chain of steps, applied in order to one section of text between added tokens.
 * Life cycle: { 0 } is an empty chain, add steps, then read-only; release. Thread: run on any. */
#ifndef BATON_TEXT_TOKENIZER_NORMALIZER_H
#define BATON_TEXT_TOKENIZER_NORMALIZER_H

#include "shared/base/buf.h"

enum normalize_kind { NORMALIZE_NFC, NORMALIZE_NFD, NORMALIZE_NFKC, NORMALIZE_NFKD, NORMALIZE_PREPEND, NORMALIZE_REPLACE };
/* A text may grow this many times over, and by a few bytes: no real chain comes near it. */
enum { NORMALIZE_STEPS_MAX = 8, NORMALIZE_INSERT_MAX = 64, NORMALIZE_GROWTH_MAX = 64 };

struct normalize_step {
    enum normalize_kind kind;
    struct buf          from, to; /* NORMALIZE_REPLACE: every `from` becomes `to`; NORMALIZE_PREPEND puts `to` in front */
};

struct normalize {
    struct normalize_step steps[NORMALIZE_STEPS_MAX];
    size_t                n;
};

/* Copies its arguments. ERR_FULL after NORMALIZE_STEPS_MAX steps, ERR_TOO_LONG when `to` is over NORMALIZE_INSERT_MAX bytes. */
enum status normalize_add(struct normalize *z, enum normalize_kind kind, struct str from, struct str to) MUST_CHECK;
void        normalize_release(struct normalize *z);
/* Replace the contents of `text` (valid UTF-8) by its normal form; `scratch` is overwritten. ERR_TOO_LONG when it grows too far. */
enum status normalize_run(const struct normalize *z, struct buf *text, struct buf *scratch) MUST_CHECK;
/* Append `s` with every `from` (not empty) replaced. */
void        normalize_replace(struct buf *out, struct str s, struct str from, struct str to);

#endif
