/* pre_tokenizer.h - pre-tokenisers: cut a section of text into the pieces within which tokens are
 * merged.
 *
 * A chain of stages, each applied to every piece the stage before left. What tokenizer.json calls
 * Split, Digits, ByteLevel's own pattern, Metaspace and Sequence is built from these; GGUF names
 * whole chains (pre_tokenizer_preset_find). Patterns are regular expressions of the Oniguruma kind
 * run by PCRE2: no fancier than the two have in common. Life cycle: { 0 } is an empty chain (one
 * piece), add stages, then read-only; release. Thread: run on any, with its own pieces. */
#ifndef BATON_TEXT_TOKENIZER_PRE_TOKENIZER_H
#define BATON_TEXT_TOKENIZER_PRE_TOKENIZER_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { PRE_TOKENIZER_STAGES_MAX = 16, PRE_TOKENIZER_PATTERN_MAX = 16384 };

/* What happens to the matches of a pattern: pieces of their own, dropped, joined to a neighbour, or
 * to each other. */
enum pre_tokenizer_behavior {
    PRE_TOKENIZER_ISOLATED,
    PRE_TOKENIZER_REMOVED,
    PRE_TOKENIZER_MERGED_WITH_PREVIOUS,
    PRE_TOKENIZER_MERGED_WITH_NEXT,
    PRE_TOKENIZER_CONTIGUOUS
};
/* Where Metaspace puts its character in front: nowhere, at the start of the text, at the start of
 * every section. */
enum pre_tokenizer_prepend { PRE_TOKENIZER_NEVER, PRE_TOKENIZER_FIRST, PRE_TOKENIZER_ALWAYS };

struct pre_tokenizer {
    struct pre_tokenizer_stage *stages[PRE_TOKENIZER_STAGES_MAX];
    size_t n;
};

struct pre_tokenizer_span {
    size_t at, n; /* in the text of the pieces */
};

/* Text and the pieces it was cut into; one per encoding thread, { 0 } is valid. */
struct pre_tokenizer_pieces {
    struct buf text;
    struct pre_tokenizer_span *spans;
    size_t n, cap;
    struct buf scratch; /* private: the next stage's text and spans */
    struct pre_tokenizer_span *next;
    size_t n_next, cap_next;
};

/* The pattern of GPT-2, which ByteLevel applies when asked to. */
#define PRE_TOKENIZER_GPT2                                                                         \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* `invert`: what the pattern does not match counts as the match. ERR_UNSUPPORTED says what PCRE2
 * makes of the pattern. */
enum status pre_tokenizer_add_split(struct pre_tokenizer *p, struct str regex,
                                    enum pre_tokenizer_behavior behavior, bool invert,
                                    struct err *err) MUST_CHECK;
/* The same for a string that is searched as it is. */
enum status pre_tokenizer_add_split_literal(struct pre_tokenizer *p, struct str text,
                                            enum pre_tokenizer_behavior behavior, bool invert,
                                            struct err *err) MUST_CHECK;
/* Put a space before every piece that does not begin with one. */
enum status pre_tokenizer_add_prefix_space(struct pre_tokenizer *p, struct err *err) MUST_CHECK;
/* Spaces become `replacement`, which also begins a new piece when `split`. */
enum status pre_tokenizer_add_metaspace(struct pre_tokenizer *p, struct str replacement,
                                        enum pre_tokenizer_prepend prepend, bool split,
                                        struct err *err) MUST_CHECK;
void pre_tokenizer_release(struct pre_tokenizer *p);

/* Cut pieces->text (valid UTF-8). `is_start`: it is the beginning of the whole text. Stages may
 * change the text. */
enum status pre_tokenizer_run(const struct pre_tokenizer *p, bool is_start,
                              struct pre_tokenizer_pieces *pieces, struct err *err) MUST_CHECK;
void pre_tokenizer_pieces_release(struct pre_tokenizer_pieces *pieces);

/* A chain under a GGUF name (tokenizer.ggml.pre), with what else the name says. */
struct pre_tokenizer_preset {
    const char *name;
    const char *patterns[6]; /* all isolated */
    bool nfc, ignore_merges;
    bool add_bos; /* unless the file says otherwise */
};
const struct pre_tokenizer_preset *pre_tokenizer_preset_find(const char *name); /* NULL: unknown */
enum status pre_tokenizer_add_preset(struct pre_tokenizer *p,
                                     const struct pre_tokenizer_preset *preset,
                                     struct err *err) MUST_CHECK;

#endif
