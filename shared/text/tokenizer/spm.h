/* spm.h - SentencePiece: normalises a text and decides where it may be cut.
 *
 * SentencePiece has no pre-tokenizer. A text is normalised (a table of replacements; spaces are
 * added in front, removed, and written as U+2581), user-defined pieces are cut out, and the text
 * between them merges. Two characters that are adjacent in no piece never merge, so the text may be
 * cut between them, which keeps the runs short.
 * Life cycle: init, set the fields, put, then read-only, release.
 * Thread: use on any. */
#ifndef BATON_TEXT_TOKENIZER_SPM_H
#define BATON_TEXT_TOKENIZER_SPM_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/text/codepoint_map.h"
#include "shared/text/tokenizer/added_tokens.h"

#define SPM_SPACE "\xE2\x96\x81"

struct spm {
    bool enabled;           /* the tokenizer is SentencePiece */
    bool dummy_prefix;      /* put a space in front */
    bool prefix_first_only; /* only in front of the whole text, not after every added token */
    bool remove_extra;      /* strip both ends and collapse repeated spaces */
    bool escape;            /* spaces become U+2581 */
    bool as_suffix;         /* put the dummy space at the end instead */
    bool can_split;         /* the text may be cut where `pairs` allow it */
    struct buf charsmap;    /* table of replacements as in the file; empty: none */
    size_t n_units;         /* units of its search tree; the texts follow */
    struct added_tokens user_defined;
    struct codepoint_map symbols; /* characters that may merge: piece id, or n_pieces and up */
    int32_t *extra_chars;         /* [n_extra_chars] characters inside pieces that are no piece */
    size_t n_extra_chars, cap_extra_chars;
    size_t n_pieces;
    uint64_t *pairs; /* adjacent characters of pieces: open addressing, 0 is free */
    size_t n_pairs, cap_pairs;
};

void spm_init(struct spm *s);
void spm_release(struct spm *s);
/* Sets the table of replacements (copied). ERR_FORMAT when it is damaged. */
enum status spm_set_charsmap(struct spm *s, struct str table, struct err *err) MUST_CHECK;
/* Gets the symbol of a character; one without a piece gets a new number. */
int32_t spm_symbol(struct spm *s, int32_t cp);
void spm_put_pair(struct spm *s, int32_t left, int32_t right);
/* Are these two characters adjacent in some piece? */
bool spm_has_pair(const struct spm *s, int32_t left, int32_t right);

/* Appends the normal form of `text` (valid UTF-8). ERR_TOO_LONG beyond normalizer.h's limit. */
enum status spm_normalize(const struct spm *s, struct str text, bool is_start,
                          struct buf *out) MUST_CHECK;

#endif
