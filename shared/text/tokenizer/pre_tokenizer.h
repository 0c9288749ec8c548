/* pre_tokenizer.h - pre-tokenisers: cut a section of text into the pieces within which tokens are merged.
 *
 * A chain of stages, each applied to every piece the stage before left. What tokenizer.json calls Split, Digits, ByteLevel's own
 * pattern, Metaspace and Sequence is built from these; GGUF names whole chains (pretok_preset_find). Patterns are regular
 * expressions of the Oniguruma kind run by PCRE2: no fancier than the two have in common.
 * Life cycle: { 0 } is an empty chain (one piece), add stages, then read-only; release. Thread: run on any, with its own pieces. */
#ifndef BATON_TEXT_TOKENIZER_PRE_TOKENIZER_H
#define BATON_TEXT_TOKENIZER_PRE_TOKENIZER_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { PRETOK_STAGES_MAX = 16, PRETOK_PATTERN_MAX = 16384 };

/* What happens to the matches of a pattern: pieces of their own, dropped, joined to a neighbour, or to each other. */
enum pretok_behavior { PRETOK_ISOLATED, PRETOK_REMOVED, PRETOK_MERGED_WITH_PREVIOUS, PRETOK_MERGED_WITH_NEXT, PRETOK_CONTIGUOUS };
/* Where Metaspace puts its character in front: nowhere, at the start of the text, at the start of every section. */
enum pretok_prepend { PRETOK_NEVER, PRETOK_FIRST, PRETOK_ALWAYS };

struct pretok {
    struct pretok_stage *stages[PRETOK_STAGES_MAX];
    size_t               n;
};

struct pretok_span {
    size_t at, n; /* in the text of the pieces */
};

/* Text and the pieces it was cut into; one per encoding thread, { 0 } is valid. */
struct pretok_pieces {
    struct buf          text;
    struct pretok_span *spans;
    size_t              n, cap;
    struct buf          scratch; /* private: the next stage's text and spans */
    struct pretok_span *next;
    size_t              n_next, cap_next;
};

/* The pattern of GPT-2, which ByteLevel applies when asked to. */
#define PRETOK_GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* `invert`: what the pattern does not match counts as the match. ERR_UNSUPPORTED says what PCRE2 makes of the pattern. */
enum status pretok_add_split(struct pretok *p, struct str regex, enum pretok_behavior behavior, bool invert, struct err *err) MUST_CHECK;
/* The same for a string that is searched as it is. */
enum status pretok_add_split_literal(struct pretok *p, struct str text, enum pretok_behavior behavior, bool invert, struct err *err) MUST_CHECK;
/* Put a space before every piece that does not begin with one. */
enum status pretok_add_prefix_space(struct pretok *p, struct err *err) MUST_CHECK;
/* Spaces become `mark`, which also begins a new piece when `split`. */
enum status pretok_add_metaspace(struct pretok *p, struct str mark, enum pretok_prepend prepend, bool split, struct err *err) MUST_CHECK;
void        pretok_release(struct pretok *p);

/* Cut pieces->text (valid UTF-8). `is_start`: it is the beginning of the whole text. Stages may change the text. */
enum status pretok_run(const struct pretok *p, bool is_start, struct pretok_pieces *pieces, struct err *err) MUST_CHECK;
void        pretok_pieces_release(struct pretok_pieces *pieces);

/* A chain under a GGUF name (tokenizer.ggml.pre), with what else the name says. */
struct pretok_preset {
    const char *name;
    const char *patterns[6]; /* all isolated */
    bool        nfc, ignore_merges;
    bool        add_bos;     /* unless the file says otherwise */
};
const struct pretok_preset *pretok_preset_find(const char *name); /* NULL: unknown */
enum status                 pretok_add_preset(struct pretok *p, const struct pretok_preset *preset, struct err *err) MUST_CHECK;

#endif
