/* bpe.h - byte pair merging over token ids.
 *
 * A table says for a pair of neighbouring tokens which token replaces them and how early (rank).
 * Merging takes the pair of lowest rank again and again, the leftmost of equals, until none is
 * left. Time grows as n log n: texts without any split point are one piece.
 *
 * A token may be watched: bpe_work remembers the last pair that merged into it, so that a caller
 * that must not emit the token can split it again. Life cycle: init, put all pairs,
 * then read-only; release. Thread: merge on any, with a bpe_work of its own. */
#ifndef BATON_TEXT_TOKENIZER_BPE_H
#define BATON_TEXT_TOKENIZER_BPE_H

#include <stddef.h>
#include <stdint.h>

struct bpe {
    struct bpe_pair *pairs; /* open addressing, at most half full */
    size_t mask;
    size_t n, n_max;
    size_t n_watched; /* highest watched token + 1 */
};

/* Scratch memory of one merging thread; { 0 } is valid. */
struct bpe_work {
    struct bpe_node *nodes;
    uint64_t *first; /* the pairs there are before anything merges, in order of rank */
    uint64_t *heap;  /* pairs that came later */
    size_t cap, n_heap;
    struct bpe_pair *recent; /* results of lookups, of pairs that merge and of others */
    uint64_t *origins;       /* per watched token the last pair that makes it; allocated when the
                              * first one is seen */
};

/* Added to `merged` of bpe_put. */
enum { BPE_WATCHED = 1 << 30 };

/* Create a table for at most n_pairs pairs. */
void bpe_init(struct bpe *b, size_t n_pairs);
void bpe_release(struct bpe *b);
/* Ids are not negative and below BPE_WATCHED. A pair put again gets the later rank. */
void bpe_put(struct bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t merged);
/* Merge ids[n] in place; returns how many are left. n is below 2^31. Ids below -1 stand for what
 * merges with nothing. */
size_t bpe_merge(const struct bpe *b, int32_t *ids, size_t n, struct bpe_work *w);
/* The pair that a watched token in the last result was made of; only for such tokens. */
void bpe_origin(const struct bpe_work *w, int32_t id, int32_t *left, int32_t *right);
void bpe_work_release(struct bpe_work *w);

#endif
