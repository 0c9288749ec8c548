/* encoder.h - the state of one tokenizer_encode call, shared by tokenizer.c and spm_encode.c.
 * Thread: the caller's. */
#ifndef BATON_TEXT_TOKENIZER_ENCODER_H
#define BATON_TEXT_TOKENIZER_ENCODER_H

#include "shared/text/tokenizer/tokenizer_internal.h"

struct encoder {
    const struct tokenizer *t;
    int32_t *ids; /* the caller's array, grown */
    size_t n, cap;
    size_t n_max; /* limit of n */
    struct pre_tokenizer_pieces pieces;
    struct buf section, scratch; /* normalised text between two added tokens */
    int32_t *symbols;            /* ids of one piece before they merge */
    size_t cap_symbols;
    int32_t *resegment; /* spm_encode.c: pieces still to be split */
    size_t n_resegment, cap_resegment;
    bool after_unk; /* the last symbol was unknown (spm_encode.c) */
    struct bpe_work work;
    struct err *err;
};

/* Appends ids to the result; ERR_TOO_LONG beyond n_max. */
enum status encoder_push(struct encoder *e, const int32_t *ids, size_t n) MUST_CHECK;
/* Fails like encoder_push if a normalised text of n bytes, which has at least n / piece_max tokens,
 * exceeds the limit. Called before splitting and merging allocate memory for it. */
enum status encoder_expect(const struct encoder *e, struct str text) MUST_CHECK;
/* Grows `symbols` to n entries. */
void encoder_reserve(struct encoder *e, size_t n);
/* Can this character fall back on byte tokens? */
bool encoder_has_bytes(const struct tokenizer *t, struct str c);

/* Encodes text between two added tokens as SentencePiece does. */
enum status spm_encode(struct encoder *e, struct str text, bool is_start) MUST_CHECK;

#endif
