/* encoder.h - one call of tokenizer_encode, for the files that do its work: tokenizer.c and
 * spm_encode.c.
 *
 * Everything here belongs to the call; the tokenizer is only read. Thread: the caller's. */
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
    bool after_unk;
    struct bpe_work work;
    struct err *err;
};

enum status encoder_push(struct encoder *e, const int32_t *ids, size_t n) MUST_CHECK;
/* Fail like encoder_push if n bytes of one piece, at least n / piece_max tokens, exceed the limit.
 * Called before merging allocates memory for them. */
enum status encoder_expect(const struct encoder *e, size_t n) MUST_CHECK;
/* Grow `symbols` to n entries. */
void encoder_reserve(struct encoder *e, size_t n);
/* Has every byte of this character a token of its own to fall back on? */
bool encoder_has_bytes(const struct tokenizer *t, struct str c);

/* Ids of text between two added tokens, as SentencePiece finds them. */
enum status spm_encode(struct encoder *e, struct str text, bool is_start) MUST_CHECK;

#endif
