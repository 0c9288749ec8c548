/* pre_tokenizer.h - pre-tokenizers: cut text into pieces; tokens never merge across pieces.
 *
 * A pre-tokenizer is a chain of stages, each applied to every piece of the stage before. They
 * implement Split, Digits, ByteLevel's pattern, Metaspace and Sequence of tokenizer.json; GGUF
 * names whole chains (pre_tokenizer_preset_find). Patterns are Oniguruma regular expressions, run
 * by PCRE2 (regex_translate.h).
 * Life cycle: { 0 } is an empty chain (one piece), add stages, then read-only, release.
 * Thread: run on any, with its own pieces. */
#ifndef BATON_TEXT_TOKENIZER_PRE_TOKENIZER_H
#define BATON_TEXT_TOKENIZER_PRE_TOKENIZER_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { PRE_TOKENIZER_STAGES_MAX = 16, PRE_TOKENIZER_PATTERN_MAX = 16384 };

/* What happens to the matches of a pattern: each is a piece, is dropped, is joined to a neighbour,
 * or adjacent matches are joined (and adjacent non-matches). */
enum pre_tokenizer_behavior {
    PRE_TOKENIZER_ISOLATED,
    PRE_TOKENIZER_REMOVED,
    PRE_TOKENIZER_MERGED_WITH_PREVIOUS,
    PRE_TOKENIZER_MERGED_WITH_NEXT,
    PRE_TOKENIZER_CONTIGUOUS
};
/* Where Metaspace prepends its character: nowhere, to the text, to every text between added
 * tokens. */
enum pre_tokenizer_prepend { PRE_TOKENIZER_NEVER, PRE_TOKENIZER_FIRST, PRE_TOKENIZER_ALWAYS };

struct pre_tokenizer {
    struct pre_tokenizer_stage *stages[PRE_TOKENIZER_STAGES_MAX];
    size_t n;
};

struct pre_tokenizer_span {
    size_t at, n; /* offset and length in `text` of the pieces */
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

/* The pattern of GPT-2, which ByteLevel applies with use_regex. */
#define PRE_TOKENIZER_GPT2                                                                         \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* Adds a stage that splits at the matches of `regex`, or with `invert` at the text between them.
 * ERR_UNSUPPORTED with PCRE2's message when the pattern cannot be compiled. */
enum status pre_tokenizer_add_split(struct pre_tokenizer *p, struct str regex,
                                    enum pre_tokenizer_behavior behavior, bool invert,
                                    struct err *err) MUST_CHECK;
/* The same for a literal string. */
enum status pre_tokenizer_add_split_literal(struct pre_tokenizer *p, struct str text,
                                            enum pre_tokenizer_behavior behavior, bool invert,
                                            struct err *err) MUST_CHECK;
/* Adds a stage that puts a space before every piece that does not begin with one. */
enum status pre_tokenizer_add_prefix_space(struct pre_tokenizer *p, struct err *err) MUST_CHECK;
/* Adds a stage that replaces spaces by `replacement`; with `split`, each one begins a new piece. */
enum status pre_tokenizer_add_metaspace(struct pre_tokenizer *p, struct str replacement,
                                        enum pre_tokenizer_prepend prepend, bool split,
                                        struct err *err) MUST_CHECK;
void pre_tokenizer_release(struct pre_tokenizer *p);

/* Returns whether every byte of a text is in some piece. */
bool pre_tokenizer_keeps_all(const struct pre_tokenizer *p);
/* Cuts pieces->text (valid UTF-8) into pieces->spans; stages may change the text. `is_start`: it is
 * the beginning of the whole text. */
enum status pre_tokenizer_run(const struct pre_tokenizer *p, bool is_start,
                              struct pre_tokenizer_pieces *pieces, struct err *err) MUST_CHECK;
void pre_tokenizer_pieces_release(struct pre_tokenizer_pieces *pieces);

/* A chain by its GGUF name (tokenizer.ggml.pre), with the other settings that the name implies. */
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
