/* tokenizer.h - text to token ids and back, for one model.
 *
 * Built from the model's files: tokenizer.json, tokenizer.model (SentencePiece or tiktoken),
 * tekken.json, or the tokenizer.ggml.* keys of a GGUF (handed over as arrays).
 * Encode (as Hugging Face `tokenizers`): cut out added tokens, normalise, pre-tokenise
 * (pre_tokenizer.h), merge (bpe.h), add BOS/EOS if asked for. SentencePiece differs: spm.h.
 * With a byte-level vocabulary, or SentencePiece with byte fallback, decode(encode(x)) is x for
 * valid text, except where the model normalises: NFC (Qwen) composes characters, SentencePiece
 * returns U+2581 as a space and may remove extra spaces, and added tokens may take the white space
 * next to them (lstrip, rstrip).
 * Thread: create on one; then read-only, use on any. */
#ifndef BATON_TEXT_TOKENIZER_TOKENIZER_H
#define BATON_TEXT_TOKENIZER_TOKENIZER_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

struct tokenizer;

enum token_kind {
    TOKEN_NORMAL,
    TOKEN_CONTROL, /* special: left out of text */
    TOKEN_USER,    /* added, part of text */
    TOKEN_BYTE,
    TOKEN_UNUSED
};

/* A vocabulary as arrays, for formats that are not tokenizer.json. Everything is copied. */
struct tokenizer_vocab {
    const char *model;        /* "gpt2": byte-level BPE, "llama": SentencePiece; no others */
    const char *pre;          /* GGUF's name of the pre-tokenizer: "llama-bpe", "qwen2", ... */
    const struct str *tokens; /* [n_tokens]; gpt2: in its byte-to-character alphabet */
    /* [n_tokens] GGUF token_type (1 normal, 3 control, 4 user defined, 6 byte), or NULL (gpt2). */
    const int32_t *kinds;
    size_t n_tokens;
    const struct str *merges; /* [n_merges] "left right" by rank; gpt2 only */
    size_t n_merges;
    int32_t bos, eos; /* -1: none */
    bool add_bos, add_eos;
    const float *scores;   /* [n_tokens]; llama only */
    bool add_space_prefix; /* llama only: puts a space in front of texts */
};

/* Contents of a model folder's tokenizer files; empty when absent. */
struct tokenizer_files {
    struct str json, config;    /* tokenizer.json, tokenizer_config.json */
    struct str model;           /* without tokenizer.json: SentencePiece, tekken.json or tiktoken */
    const char *model_name;     /* name of that file, for messages; may be NULL */
    struct str added, specials; /* added_tokens.json, special_tokens_map.json: used with `model` */
};

/* Builds a tokenizer from the contents of tokenizer.json and tokenizer_config.json (may be empty).
 * Unknown components are refused by type (ERR_UNSUPPORTED). */
enum status tokenizer_from_json(struct str tokenizer_json, struct str config_json,
                                struct tokenizer **out, struct err *err) MUST_CHECK;
/* Builds a tokenizer from whichever vocabulary is there; ERR_NOT_FOUND when there is none. */
enum status tokenizer_from_files(const struct tokenizer_files *files, struct tokenizer **out,
                                 struct err *err) MUST_CHECK;
enum status tokenizer_from_vocab(const struct tokenizer_vocab *vocab, struct tokenizer **out,
                                 struct err *err) MUST_CHECK;
void tokenizer_free(struct tokenizer *t);

/* Appends the ids of `text` to the caller's array: *ids is grown with mem_realloc, *n is its
 * length. Added tokens in the text are always recognised; `add_special` adds BOS and EOS as the
 * model's files say. Invalid UTF-8 is read as U+FFFD. ERR_TOO_LONG for more than `limit` ids
 * (SIZE_MAX: no limit), with *n unchanged. */
enum status tokenizer_encode(const struct tokenizer *t, struct str text, bool add_special,
                             size_t limit, int32_t **ids, size_t *n, struct err *err) MUST_CHECK;

/* Appends the bytes of one token, perhaps part of a UTF-8 character. Nothing for ids outside the
 * vocabulary and, with skip_special, for control tokens. */
void tokenizer_token_bytes(const struct tokenizer *t, int32_t id, bool skip_special,
                           struct buf *out);
/* Appends the text of all ids: bytes joined, invalid UTF-8 replaced by U+FFFD, without the leading
 * space that the model's decoder strips. */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool skip_special,
                      struct buf *out);
/* The token as the vocabulary writes it ("\u0120the", "<|im_end|>"); empty when out of range. */
struct str tokenizer_piece(const struct tokenizer *t, int32_t id);

size_t tokenizer_n_vocab(const struct tokenizer *t); /* ids are 0 .. n-1; some may be unused */
int32_t tokenizer_bos(const struct tokenizer *t);    /* -1: none */
int32_t tokenizer_eos(const struct tokenizer *t);
bool tokenizer_is_special(const struct tokenizer *t, int32_t id); /* control token */
/* Id of the token, added or in the vocabulary, that is written `piece`; -1: none. */
int32_t tokenizer_find(const struct tokenizer *t, struct str piece);

#endif
