/* tokenizer_internal.h - the inside of a tokenizer, for the files that build one (tokenizer_*.c)
 * and those that use it (tokenizer.c, encode*.c). Nothing else but tests includes this.
 *
 * Building: tokenizer_new, put tokens, added tokens and merges, set the fields, tokenizer_finish.
 * Read-only afterwards. Thread: the builder's until finished, then any. */
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

/* Ids end far below this in all models; it bounds what a damaged file can make us allocate. The
 * text limit is that of a rendered prompt. */
enum {
    TOKENIZER_IDS_MAX = 1 << 21,
    TOKENIZER_TEXT_MAX = 64 << 20,
    TOKENIZER_AFFIX_MAX = 16,
    TOKENIZER_PIECE_MAX = 1024
};

struct vocab_token {
    struct str piece, bytes; /* as spelled, and what it stands for in text */
    enum token_kind kind;
    bool used, is_added;
    bool in_model;       /* part of the vocabulary that merging knows; an added token may be
                          * that too */
    bool resegment;      /* spm: never given out, but as what it was merged from */
    bool normalized;     /* added tokens: searched for after normalising */
    unsigned char flags; /* added tokens: ADDED_TOKEN_* */
};

/* Ids put before or behind a text. */
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
    bool byte_fallback; /* characters that are no token become <0xHH> tokens */
    bool fuse_unk, ignore_merges;
    int32_t unk;               /* -1: characters that are no token are left out */
    int32_t byte_ids[256];     /* byte_level: the byte's token; byte_fallback: <0xHH>; -1:
                                * none */
    size_t piece_max;          /* bytes of the longest token, as merging knows it */
    bool drops_nothing;        /* every byte of a text ends up in some token of its own */
    struct normalizer decoder; /* replacements inside a token's text */
    bool decode_bytes;         /* <0xHH> stands for a byte */
    size_t strip_start;        /* spaces taken off the front of a decoded text */
    bool strip_each;           /* and off the next token's front, while there is no text yet */
    bool strip_first;          /* off the first token's front only, however many */
    int32_t bos, eos;
    struct tokenizer_affix prefix, suffix;
};

struct tokenizer *tokenizer_new(void);
/* id is in 0 .. TOKENIZER_IDS_MAX - 1. */
void tokenizer_put_token(struct tokenizer *t, int32_t id, struct str piece, enum token_kind kind);
/* An added token; ERR_FORMAT when its text is empty or not UTF-8. */
enum status tokenizer_put_added(struct tokenizer *t, int32_t id, struct str content, bool special,
                                bool normalized, int flags, struct err *err) MUST_CHECK;
/* Call bpe_init before. ERR_FORMAT when a part or the whole is no token. */
enum status tokenizer_put_merge(struct tokenizer *t, struct str left, struct str right,
                                uint32_t rank, struct buf *scratch, struct err *err) MUST_CHECK;
/* The halves of "left right". */
enum status tokenizer_split_merge(struct str line, struct str *left, struct str *right,
                                  struct err *err) MUST_CHECK;
/* Work out the bytes of every token and the search for added tokens. */
enum status tokenizer_finish(struct tokenizer *t, struct err *err) MUST_CHECK;

/* ---- kinds of files: each fills a new tokenizer, and leaves finishing it to the caller ---- */

/* Byte-level tokens by rank, where merging takes the pair whose joint bytes have the lowest rank:
 * tiktoken's way. `bytes` of each rank becomes token first_id + rank. A table over all ranks at
 * once, in order from 0. */
enum status tokenizer_fill_ranks(struct tokenizer *t, const struct str *bytes, size_t n,
                                 int32_t first_id, struct err *err) MUST_CHECK;
enum status tokenizer_fill_tiktoken(struct tokenizer *t, struct str file, const cJSON *config,
                                    struct err *err) MUST_CHECK;
enum status tokenizer_fill_tekken(struct tokenizer *t, struct str file, struct err *err) MUST_CHECK;
bool tokenizer_is_tiktoken(struct str file);

/* A SentencePiece model of any origin. */
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
/* t->spm's fields are set before. Byte pieces are used when `byte_fallback`, which needs all
 * 256. */
enum status tokenizer_fill_spm(struct tokenizer *t, const struct spm_piece *pieces, size_t n,
                               bool byte_fallback, struct err *err) MUST_CHECK;
/* The protobuf file. */
enum status tokenizer_fill_sentencepiece(struct tokenizer *t, struct str file,
                                         struct err *err) MUST_CHECK;

/* ---- tokenizer_config.json and its neighbours; NULL documents are empty ---- */

/* added_tokens_decoder of the configuration: tokens that are there already as added ones stay,
 * unless it overrules. */
enum status tokenizer_config_added_tokens(struct tokenizer *t, const cJSON *config, bool overrule,
                                          struct err *err) MUST_CHECK;
/* added_tokens.json (text: id), and the names of special tokens in both other files; those without
 * an id get the next free ones. */
enum status tokenizer_config_special_tokens(struct tokenizer *t, const cJSON *config,
                                            const cJSON *added, const cJSON *specials,
                                            struct err *err) MUST_CHECK;
/* bos_token, eos_token, add_bos_token, add_eos_token. */
enum status tokenizer_config_bos_eos(struct tokenizer *t, const cJSON *config,
                                     struct err *err) MUST_CHECK;
/* One added token as an object with content and flags. */
enum status tokenizer_config_put_added(struct tokenizer *t, const cJSON *j, int64_t id,
                                       struct err *err) MUST_CHECK;
enum status tokenizer_affix_add(struct tokenizer_affix *a, int32_t id, struct err *err) MUST_CHECK;

/* The alphabet in which byte-level vocabularies spell bytes: one character per byte. */
int32_t byte_level_encode(unsigned char byte);
int byte_level_decode(int32_t cp); /* -1: no byte's character */

#endif
