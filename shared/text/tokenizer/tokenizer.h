/* tokenizer.h - text to token ids and back, for one model.
 *
 * A tokenizer is built once from the model's own files (tokenizer.json, tokenizer.model in
 * SentencePiece's or tiktoken's form, tekken.json, or the tokenizer.ggml.* keys of a GGUF, which
 * the model folder hands over as plain arrays) and is read-only afterwards: any number of threads
 * may encode at once. Pipeline of encode (facts of the format: Hugging Face `tokenizers`
 * documentation): cut out added tokens, normalise, pre-tokenise (pre_tokenizer.h), merge (bpe.h),
 * then BOS/EOS when asked for. SentencePiece models have a way of their own (spm.h).
 *
 * decode(encode(x)) is x for every valid text when the vocabulary is byte-level, or SentencePiece
 * with bytes to fall back on, except where the model's own normal form differs from x: NFC (Qwen)
 * gives composed characters, U+2581 comes back as a space from SentencePiece, which may also take
 * away extra spaces, and white space next to added tokens may be theirs (lstrip, rstrip). Thread:
 * create on one, use on any. */
#ifndef BATON_TEXT_TOKENIZER_TOKENIZER_H
#define BATON_TEXT_TOKENIZER_TOKENIZER_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

struct tokenizer;

enum token_kind {
    TOKEN_NORMAL,
    TOKEN_CONTROL /* special: left out of text */,
    TOKEN_USER /* added, shown */,
    TOKEN_BYTE,
    TOKEN_UNUSED
};

/* A vocabulary as arrays, for formats that are not tokenizer.json. Everything is copied. */
struct tokenizer_vocab {
    const char *model;        /* "gpt2": byte-level BPE, "llama": SentencePiece; others are
                               * ERR_UNSUPPORTED by name */
    const char *pre;          /* pre-tokenizer name as GGUF spells it: "smollm", "llama-bpe",
                               * "gpt-2", "qwen2" ... */
    const struct str *tokens; /* [n_tokens] in the byte-to-character alphabet of GPT-2 */
    const int32_t *kinds;     /* [n_tokens] GGUF token_type (1 normal, 3 control, 4 user
                               * defined, 6 byte), or NULL (gpt2) */
    size_t n_tokens;
    const struct str *merges; /* [n_merges] "left right" by rank; gpt2 only */
    size_t n_merges;
    int32_t bos, eos; /* -1: none */
    bool add_bos, add_eos;
    const float *scores;   /* [n_tokens]; llama only */
    bool add_space_prefix; /* llama only: a space in front of texts */
};

/* The files of a model folder that concern its tokenizer, each whole; empty when absent. */
struct tokenizer_files {
    struct str json, config;    /* tokenizer.json, tokenizer_config.json */
    struct str model;           /* used without a tokenizer.json: a SentencePiece model, tekken.json
                                 * or a tiktoken file */
    const char *model_name;     /* of that file, for messages; may be NULL */
    struct str added, specials; /* added_tokens.json, special_tokens_map.json: used with `model` */
};

/* Read `tokenizer.json` (text of the whole file) with `tokenizer_config.json` (may be empty).
 * Features outside what is implemented are refused by name (ERR_UNSUPPORTED with the component's
 * type). */
enum status tokenizer_from_json(struct str tokenizer_json, struct str config_json,
                                struct tokenizer **out, struct err *err) MUST_CHECK;
/* Whichever vocabulary is there, refusing in the same way; ERR_NOT_FOUND when there is none. */
enum status tokenizer_from_files(const struct tokenizer_files *files, struct tokenizer **out,
                                 struct err *err) MUST_CHECK;
enum status tokenizer_from_vocab(const struct tokenizer_vocab *vocab, struct tokenizer **out,
                                 struct err *err) MUST_CHECK;
void tokenizer_free(struct tokenizer *t);

/* Ids of `text` appended to the caller's array: *ids is grown with mem_realloc, *n is its length.
 * Added tokens in the text are always recognised; `add_special` puts BOS and EOS around it as the
 * model's files say. Fails with ERR_TOO_LONG once more than `limit` ids would result (SIZE_MAX: no
 * limit); *n is unchanged then. Invalid UTF-8 reads as U+FFFD. */
enum status tokenizer_encode(const struct tokenizer *t, struct str text, bool add_special,
                             size_t limit, int32_t **ids, size_t *n, struct err *err) MUST_CHECK;

/* Raw bytes of one token appended to `out` (may be part of a UTF-8 character). Control tokens give
 * nothing when skip_special. Ids outside the vocabulary give nothing. */
void tokenizer_token_bytes(const struct tokenizer *t, int32_t id, bool skip_special,
                           struct buf *out);
/* Text of all ids: bytes joined, invalid UTF-8 replaced by U+FFFD, without the space that the
 * model's own decoder takes off the front. */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool skip_special,
                      struct buf *out);
/* The token as the vocabulary spells it ("\u0120the", "<|im_end|>"); empty when out of range. */
struct str tokenizer_piece(const struct tokenizer *t, int32_t id);

size_t tokenizer_n_vocab(const struct tokenizer *t); /* ids are 0 .. n-1; some may be unused */
int32_t tokenizer_bos(const struct tokenizer *t);    /* -1: none */
int32_t tokenizer_eos(const struct tokenizer *t);
bool tokenizer_is_special(const struct tokenizer *t, int32_t id); /* control token */
/* Id of exactly this token text (added or in the vocabulary), or -1. */
int32_t tokenizer_find(const struct tokenizer *t, struct str piece);

#endif
