/* spm.h - SentencePiece's own part of tokenising: the normal form of a text, its cutting, and the
 * text of the symbols.
 *
 * SentencePiece knows no pre-tokeniser. A text gets its normal form (a table of replacements,
 * spaces put in front, taken away and spelled U+2581), the user-defined pieces are cut out of it,
 * and everything between them merges. Two characters that stand side by side in no piece never
 * merge, so the text may be cut between them: that keeps the runs short. Life cycle: init, set the
 * fields, put, then read-only; release. Thread: use on any. */
#ifndef BATON_TEXT_TOKENIZER_SPM_H
#define BATON_TEXT_TOKENIZER_SPM_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/text/codepoint_map.h"
#include "shared/text/tokenizer/added_tokens.h"

#define SPM_SPACE "\xE2\x96\x81"

struct spm {
    bool enabled;           /* this tokenizer works so */
    bool dummy_prefix;      /* a space in front */
    bool prefix_first_only; /* only in front of the whole text, not behind every added
                             * token */
    bool remove_extra;      /* spaces at both ends go, and of several in a row all but
                             * one */
    bool escape;            /* spaces become U+2581 */
    bool as_suffix;         /* the dummy space goes behind the text */
    bool can_split;         /* pairs may be used: see above */
    struct buf charsmap;    /* the table of replacements as it is in the file; empty:
                             * none */
    size_t n_units;         /* of its search tree; the texts follow */
    struct added_tokens user_defined;
    struct codepoint_map symbols; /* characters that may merge: their piece, or a number
                                   * from n_pieces on */
    int32_t *extra_chars;         /* [n_extra_chars] characters that are part of pieces
                                   * but none themselves */
    size_t n_extra_chars, cap_extra_chars;
    size_t n_pieces;
    uint64_t *pairs; /* characters side by side in a piece: open addressing, 0 is
                      * free */
    size_t n_pairs, cap_pairs;
};

void spm_init(struct spm *s);
void spm_release(struct spm *s);
/* The table of replacements of a model file, copied. ERR_FORMAT when it is damaged. */
enum status spm_set_charsmap(struct spm *s, struct str table, struct err *err) MUST_CHECK;
/* The symbol of a character; one without a piece gets a number of its own. */
int32_t spm_symbol(struct spm *s, int32_t cp);
void spm_put_pair(struct spm *s, int32_t left, int32_t right);
/* May a piece hold these two characters side by side? */
bool spm_has_pair(const struct spm *s, int32_t left, int32_t right);

/* The normal form of valid UTF-8, appended. ERR_TOO_LONG when it grows too far. */
enum status spm_normalize(const struct spm *s, struct str text, bool is_start,
                          struct buf *out) MUST_CHECK;

#endif
