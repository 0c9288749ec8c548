/* tokenizer_internal.h - struct tokenizer, for the files that build one (tokenizer_*.c) and those
 * that use it (tokenizer.c, encoder.h). Only those and tests include this.
 *
 * Life cycle: tokenizer_new; put tokens, added tokens and merges, set the fields; tokenizer_finish;
 * then read-only.
 * Thread: the builder's until finished, then any. */
#ifndef BATON_TEXT_TOKENIZER_TOKENIZER_INTERNAL_H
#define BATON_TEXT_TOKENIZER_TOKENIZER_INTERNAL_H

#include "shared/base/json/json.h"
#include "shared/base/map.h"
#include "shared/base/mem.h"
#include "shared/text/codepoint_map.h"
#include "shared/text/tokenizer/added_tokens.h"
#include "shared/text/tokenizer/bpe.h"
#include "shared/text/tokenizer/normalizer.h"
#include "shared/text/tokenizer/pre_tokenizer.h"
#include "shared/text/tokenizer/spm.h"
#include "shared/text/tokenizer/tokenizer.h"

enum {
    TOKENIZER_IDS_MAX = 1 << 21,   /* far above any model: bounds what a damaged file allocates */
    TOKENIZER_TEXT_MAX = 64 << 20, /* bytes, as JINJA_OUTPUT_MAX */
    TOKENIZER_WORD_MAX = 4 << 20,  /* bytes that merge together, which takes 40 bytes for each */
    TOKENIZER_AFFIX_MAX = 16,
    TOKENIZER_PIECE_MAX = 1024
};

struct vocab_token {
    struct str piece, bytes; /* as the vocabulary writes it, and its bytes in text */
    enum token_kind kind;
    bool used, is_added;
    bool in_model;       /* takes part in merging; an added token may do so too */
    bool resegment;      /* spm: never emitted, but as the pair it was merged from */
    bool normalized;     /* added tokens: searched in the normalised text */
    unsigned char flags; /* added tokens: ADDED_TOKEN_* */
};

/* Ids put before or after a text. */
struct tokenizer_affix {
    int32_t ids[TOKENIZER_AFFIX_MAX];
    size_t n;
};

struct tokenizer {
    struct arena arena;
    struct vocab_token *tokens;
    size_t n_tokens, cap_tokens;
    struct map by_piece; /* id + 1 as a pointer */
    struct added_tokens added_raw, added_normalized;
    struct normalizer normalizer;
    struct pre_tokenizer pre_tokenizer;
    struct spm spm;
    struct codepoint_map chars; /* tokens of one character */
    struct bpe bpe;
    bool byte_level;    /* merging starts from bytes, else from characters */
    bool byte_fallback; /* characters without a token become <0xHH> tokens */
    bool fuse_unk, ignore_merges;
    int32_t unk;               /* -1: characters without a token are left out */
    int32_t byte_ids[256];     /* byte_level: the byte's token; byte_fallback: <0xHH>; -1: none */
    size_t piece_max;          /* bytes of the longest token that merging may make */
    bool drops_nothing;        /* every byte of a text ends up in some token */
    struct normalizer decoder; /* replacements inside a token's text */
    bool decode_bytes;         /* <0xHH> stands for a byte */
    size_t strip_start;        /* leading spaces to strip from a decoded text */
    bool strip_each;           /* that many from each token, while there is no text yet */
    bool strip_first;          /* from the first token only */
    int32_t bos, eos;
    struct tokenizer_affix prefix, suffix;
};

struct tokenizer *tokenizer_new(void);
/* Puts a token; `id` is in 0 .. TOKENIZER_IDS_MAX - 1. */
void tokenizer_put_token(struct tokenizer *t, int32_t id, struct str piece, enum token_kind kind);
/* Puts an added token; ERR_FORMAT when its text is empty or not UTF-8. */
enum status tokenizer_put_added(struct tokenizer *t, int32_t id, struct str content, bool special,
                                bool normalized, int flags, struct err *err) MUST_CHECK;
/* Puts a merge, after bpe_init. ERR_FORMAT when a part or the whole is not a token. */
enum status tokenizer_put_merge(struct tokenizer *t, struct str left, struct str right,
                                uint32_t rank, struct buf *scratch, struct err *err) MUST_CHECK;
/* Splits "left right". */
enum status tokenizer_split_merge(struct str line, struct str *left, struct str *right,
                                  struct err *err) MUST_CHECK;
/* Computes the bytes of every token and builds the search for added tokens. */
enum status tokenizer_finish(struct tokenizer *t, struct err *err) MUST_CHECK;

/* ---- kinds of files: each function fills a new tokenizer; the caller finishes it ---- */

/* Fills from byte-level tokens by rank, as tiktoken does: merging takes the pair whose joined bytes
 * have the lowest rank. bytes[rank] (all ranks, from 0) becomes token first_id + rank. */
enum status tokenizer_fill_ranks(struct tokenizer *t, const struct str *bytes, size_t n,
                                 int32_t first_id, struct err *err) MUST_CHECK;
enum status tokenizer_fill_tiktoken(struct tokenizer *t, struct str file, const cJSON *config,
                                    struct err *err) MUST_CHECK;
enum status tokenizer_fill_tekken(struct tokenizer *t, struct str file, struct err *err) MUST_CHECK;
bool tokenizer_is_tiktoken(struct str file);

/* Piece types of SentencePiece's ModelProto. */
enum spm_kind {
    SPM_NORMAL = 1,
    SPM_UNKNOWN = 2,
    SPM_CONTROL = 3,
    SPM_USER_DEFINED = 4,
    SPM_UNUSED = 5,
    SPM_BYTE = 6
};
struct spm_piece {
    struct str text;
    float score;
    int32_t kind;
};
/* Fills from the pieces of a SentencePiece model, once the fields of t->spm are set. byte_fallback
 * needs all 256 byte pieces. */
enum status tokenizer_fill_spm(struct tokenizer *t, const struct spm_piece *pieces, size_t n,
                               bool byte_fallback, struct err *err) MUST_CHECK;
/* Fills from a protobuf file. */
enum status tokenizer_fill_sentencepiece(struct tokenizer *t, struct str file,
                                         struct err *err) MUST_CHECK;

/* ---- tokenizer_config.json and related files; NULL documents are empty ---- */

/* Puts the added_tokens_decoder of the configuration; without `overrule`, existing added tokens
 * stay as they are. */
enum status tokenizer_config_added_tokens(struct tokenizer *t, const cJSON *config, bool overrule,
                                          struct err *err) MUST_CHECK;
/* Puts the tokens of added_tokens.json (text: id) and the special tokens named in the two other
 * files; those without an id get the next free ids. */
enum status tokenizer_config_special_tokens(struct tokenizer *t, const cJSON *config,
                                            const cJSON *added, const cJSON *specials,
                                            struct err *err) MUST_CHECK;
/* Reads bos_token, eos_token, add_bos_token and add_eos_token. */
enum status tokenizer_config_bos_eos(struct tokenizer *t, const cJSON *config,
                                     struct err *err) MUST_CHECK;
/* Puts one added token, given as an object with content and flags. */
enum status tokenizer_config_put_added(struct tokenizer *t, const cJSON *j, int64_t id,
                                       struct err *err) MUST_CHECK;
enum status tokenizer_affix_add(struct tokenizer_affix *a, int32_t id, struct err *err) MUST_CHECK;

/* GPT-2's byte-to-character alphabet of byte-level vocabularies. */
int32_t byte_level_encode(unsigned char byte);

#endif
