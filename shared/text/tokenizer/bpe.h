/* bpe.h - byte pair merging over token ids.
 *
 * A table gives for a pair of adjacent tokens the token that replaces them and its rank. Merging
 * takes the pair of lowest rank (the leftmost of equals) until no pair merges. It takes O(n log n),
 * because a text without any split point is one piece.
 * A token may be watched: bpe_work remembers the last pair looked up that makes it, so that a
 * caller that must not emit the token can split it again.
 * Life cycle: init, put all pairs, then read-only, release.
 * Thread: merge on any, with a bpe_work of its own. */
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
    uint64_t *first; /* the pairs before any merge, in order of rank */
    uint64_t *heap;  /* the pairs that merging makes */
    size_t cap, n_heap;
    struct bpe_pair *recent; /* cache of lookups, also of pairs that do not merge */
    uint64_t *origins;       /* [n_watched] last pair that makes the token; allocated when needed */
};

/* Added to `merged` of bpe_put. */
enum { BPE_WATCHED = 1 << 30 };

/* Makes an empty table for at most n_pairs pairs. */
void bpe_init(struct bpe *b, size_t n_pairs);
void bpe_release(struct bpe *b);
/* Adds a pair. Ids are in 0 .. BPE_WATCHED - 1; a pair put twice gets the later rank. */
void bpe_put(struct bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t merged);
/* Merges ids[n] (n < 2^31) in place; returns how many are left. Ids below -1 never merge. */
size_t bpe_merge(const struct bpe *b, int32_t *ids, size_t n, struct bpe_work *w);
/* Gets the pair that a watched token of the last result was made of. */
void bpe_origin(const struct bpe_work *w, int32_t id, int32_t *left, int32_t *right);
void bpe_work_release(struct bpe_work *w);

#endif
