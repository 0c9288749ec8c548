/* tokenizer_gguf.c - builds a tokenizer from the arrays of a GGUF: byte-level BPE ("gpt2") or
 * SentencePiece ("llama").
 * Thread: the builder's. */
#include <string.h>

#include "shared/text/tokenizer/tokenizer_internal.h"

static enum status put_gguf_token(struct tokenizer *t, int32_t id, struct str piece, int32_t kind,
                                  struct err *err)
{
    bool special = kind == SPM_CONTROL || kind == SPM_UNKNOWN;
    if (special || kind == SPM_USER_DEFINED)
        return tokenizer_put_added(t, id, piece, special, false, 0, err);
    tokenizer_put_token(t, id, piece,
                        kind == SPM_BYTE     ? TOKEN_BYTE
                        : kind == SPM_UNUSED ? TOKEN_UNUSED
                                             : TOKEN_NORMAL);
    return OK;
}

static enum status put_gguf_merges(struct tokenizer *t, const struct tokenizer_vocab *v,
                                   struct err *err)
{
    struct buf scratch = { 0 };
    enum status st = OK;
    bpe_init(&t->bpe, v->n_merges);
    for (size_t i = 0; i < v->n_merges && st == OK; i++) {
        struct str left, right;
        st = tokenizer_split_merge(v->merges[i], &left, &right, err);
        if (st == OK) st = tokenizer_put_merge(t, left, right, (uint32_t)i, &scratch, err);
    }
    buf_release(&scratch);
    return st;
}

static enum status put_bos_eos(struct tokenizer *t, const struct tokenizer_vocab *v,
                               struct err *err)
{
    int64_t n = (int64_t)v->n_tokens;
    if (v->bos < -1 || v->bos >= n || v->eos < -1 || v->eos >= n)
        return err_set(err, ERR_FORMAT,
                       "the BOS or EOS token (%d, %d) is outside the vocabulary of %zu tokens",
                       (int)v->bos, (int)v->eos, v->n_tokens);
    if ((v->add_bos && v->bos < 0) || (v->add_eos && v->eos < 0))
        return err_set(err, ERR_FORMAT,
                       "the model adds BOS or EOS to texts, but has no such token");
    t->bos = v->bos;
    t->eos = v->eos;
    if (v->add_bos) t->prefix.ids[t->prefix.n++] = v->bos;
    if (v->add_eos) t->suffix.ids[t->suffix.n++] = v->eos;
    return OK;
}

static enum status fill_gpt2(struct tokenizer *t, const struct tokenizer_vocab *v, struct err *err)
{
    const struct pre_tokenizer_preset *preset = pre_tokenizer_preset_find(v->pre);
    if (!preset)
        return err_set(err, ERR_UNSUPPORTED, "pre-tokenizer \"%s\" is not supported",
                       v->pre ? v->pre : "");
    for (size_t i = 0; i < v->n_tokens; i++)
        TRY(put_gguf_token(t, (int32_t)i, v->tokens[i], v->kinds ? v->kinds[i] : SPM_NORMAL, err));
    TRY(put_gguf_merges(t, v, err));
    TRY(put_bos_eos(t, v, err));
    TRY(pre_tokenizer_add_preset(&t->pre_tokenizer, preset, err));
    if (preset->nfc) TRY(normalizer_add(&t->normalizer, NORMALIZER_NFC, STR(""), STR("")));
    t->byte_level = true;
    t->ignore_merges = preset->ignore_merges;
    return OK;
}

/* Fills from pieces with scores. The model has byte fallback if it has byte pieces. */
static enum status fill_llama(struct tokenizer *t, const struct tokenizer_vocab *v, struct err *err)
{
    if (!v->scores || !v->kinds)
        return err_set(
            err, ERR_FORMAT,
            "a tokenizer of the model \"llama\" needs tokenizer.ggml.scores and token_type");
    struct spm_piece *pieces = MEM_ARRAY(struct spm_piece, v->n_tokens);
    bool has_bytes = false;
    for (size_t i = 0; i < v->n_tokens; i++) {
        pieces[i] = (struct spm_piece){ v->tokens[i], v->scores[i], v->kinds[i] };
        has_bytes |= v->kinds[i] == SPM_BYTE;
    }
    t->spm.dummy_prefix = v->add_space_prefix;
    t->spm.escape = true;
    enum status st = tokenizer_fill_spm(t, pieces, v->n_tokens, has_bytes, err);
    mem_free(pieces);
    return st == OK ? put_bos_eos(t, v, err) : st;
}

static enum status fill_from_vocab(struct tokenizer *t, const struct tokenizer_vocab *v,
                                   struct err *err)
{
    if (v->n_tokens == 0 || v->n_tokens > TOKENIZER_IDS_MAX || v->n_merges >= UINT32_MAX)
        return err_set(err, ERR_FORMAT, "a vocabulary of %zu tokens and %zu merges is not possible",
                       v->n_tokens, v->n_merges);
    const char *model = v->model ? v->model : "";
    if (strcmp(model, "gpt2") == 0) TRY(fill_gpt2(t, v, err));
    else if (strcmp(model, "llama") == 0) TRY(fill_llama(t, v, err));
    else
        return err_set(err, ERR_UNSUPPORTED,
                       "tokenizer model \"%s\" is not supported (\"gpt2\" and \"llama\" are)",
                       model);
    return tokenizer_finish(t, err);
}

enum status tokenizer_from_vocab(const struct tokenizer_vocab *vocab, struct tokenizer **out,
                                 struct err *err)
{
    struct tokenizer *t = tokenizer_new();
    enum status st = fill_from_vocab(t, vocab, err);
    if (st == OK) *out = t;
    else tokenizer_free(t);
    return st;
}
