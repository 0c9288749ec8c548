/* tokenizer_tiktoken.c - reads vocabularies in tiktoken's form: one line per token, with its bytes
 * in base64 and its rank, which is its id.
 *
 * The file holds neither the pattern nor the special tokens. They belong to the model family, which
 * the number of ranks identifies; another number is refused. Names in tokenizer_config.json take
 * precedence over the family's.
 * Thread: the builder's. */
#include <stdio.h>
#include <string.h>

#include "shared/text/base64.h"
#include "shared/text/tokenizer/tokenizer_internal.h"

/* n_specials special tokens follow the ranks in this order; the last name is a series, numbered
 * from `first`. */
struct tiktoken_family {
    const char *name, *preset;
    size_t n_ranks, n_specials;
    int first;
    const char *bos, *eos;
    const char *specials[16];
};

static const struct tiktoken_family FAMILIES[] = {
    {
        .name = "Llama 3",
        .preset = "llama-bpe",
        .n_ranks = 128000,
        .n_specials = 256,
        .first = 2,
        .bos = "<|begin_of_text|>",
        .eos = "<|end_of_text|>",
        .specials = { "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
                      "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|step_id|>",
                      "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
                      "<|python_tag|>", "<|image|>", "<|reserved_special_token_%d|>" },
    },
    {
        .name = "Qwen",
        .preset = "qwen2",
        .n_ranks = 151643,
        .n_specials = 208,
        .first = 0,
        .eos = "<|endoftext|>",
        .specials = { "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_%d|>" },
    },
};

struct tiktoken_ranks {
    struct buf bytes; /* of all tokens, concatenated */
    size_t *ends;     /* [cap] */
    size_t *starts;
    size_t n, cap;
};

static enum status put_rank(struct tiktoken_ranks *r, size_t line, struct str token,
                            struct str number, struct err *err)
{
    int64_t rank = -1;
    size_t start = r->bytes.len;
    if (str_to_i64(number, &rank) != OK || rank != (int64_t)r->n || rank >= TOKENIZER_IDS_MAX)
        return err_set(err, ERR_FORMAT, "line %zu: the rank %zu was expected", line, r->n);
    if (!base64_decode(token, &r->bytes))
        return err_set(err, ERR_FORMAT, "line %zu is not of the form \"base64 rank\"", line);
    if (r->n == r->cap) {
        r->cap = r->cap ? r->cap * 2 : 4096;
        r->starts = mem_realloc(r->starts, r->cap, sizeof *r->starts);
        r->ends = mem_realloc(r->ends, r->cap, sizeof *r->ends);
    }
    r->starts[r->n] = start;
    r->ends[r->n++] = r->bytes.len;
    return OK;
}

static enum status read_lines(struct tiktoken_ranks *r, struct str file, struct err *err)
{
    struct str line;
    for (size_t i = 1; str_split(&file, '\n', &line); i++) {
        line = str_trim(line);
        size_t space = str_find_char(line, ' ');
        if (line.n == 0) continue;
        if (space == SIZE_MAX)
            return err_set(err, ERR_FORMAT, "line %zu is not of the form \"base64 rank\"", i);
        TRY(put_rank(r, i, str_sub(line, 0, space), str_sub(line, space + 1, SIZE_MAX), err));
    }
    return OK;
}

bool tokenizer_is_tiktoken(struct str file)
{
    struct str line, rest = str_sub(file, 0, 4096);
    struct buf bytes = { 0 };
    int64_t rank;
    (void)str_split(&rest, '\n', &line);
    line = str_trim(line);
    size_t space = str_find_char(line, ' ');
    bool good = space != SIZE_MAX && space > 0 && base64_decode(str_sub(line, 0, space), &bytes) &&
                str_to_i64(str_sub(line, space + 1, SIZE_MAX), &rank) == OK;
    buf_release(&bytes);
    return good;
}

/* ---- the family ---- */

static void special_name(const struct tiktoken_family *f, size_t i, char *out, size_t size)
{
    size_t last = 0;
    while (f->specials[last + 1]) last++;
    size_t i_name = i < last ? i : last;
    snprintf(out, size, f->specials[i_name], f->first + (int)(i - i_name));
}

static enum status put_specials(struct tokenizer *t, const struct tiktoken_family *f,
                                struct err *err)
{
    char name[64];
    for (size_t i = 0; i < f->n_specials; i++) {
        size_t id = f->n_ranks + i;
        special_name(f, i, name, sizeof name);
        bool taken = (id < t->n_tokens && t->tokens[id].used) ||
                     tokenizer_find(t, str_of(name)) >= 0;
        if (!taken) TRY(tokenizer_put_added(t, (int32_t)id, str_of(name), true, false, 0, err));
    }
    if (f->bos) t->bos = tokenizer_find(t, str_of(f->bos));
    t->eos = tokenizer_find(t, str_of(f->eos));
    return t->bos >= 0 ? tokenizer_affix_add(&t->prefix, t->bos, err) : OK;
}

static enum status fill(struct tokenizer *t, const struct tiktoken_ranks *r, const cJSON *config,
                        struct err *err)
{
    const struct tiktoken_family *f = NULL;
    for (size_t i = 0; i < COUNT_OF(FAMILIES); i++)
        if (FAMILIES[i].n_ranks == r->n) f = &FAMILIES[i];
    if (!f)
        return err_set(err, ERR_UNSUPPORTED,
                       "a tiktoken vocabulary of %zu ranks is of no known family (Llama 3 has "
                       "128000, Qwen 151643), "
                       "and the file has no pre-tokenizer pattern",
                       r->n);
    struct str *bytes = MEM_ARRAY(struct str, r->n);
    for (size_t i = 0; i < r->n; i++)
        bytes[i] = (struct str){ r->bytes.data + r->starts[i], r->ends[i] - r->starts[i] };
    enum status st = tokenizer_fill_ranks(t, bytes, r->n, 0, err);
    mem_free(bytes);
    if (st != OK) return st;
    TRY(tokenizer_config_added_tokens(t, config, false, err));
    TRY(put_specials(t, f, err));
    const struct pre_tokenizer_preset *preset = pre_tokenizer_preset_find(f->preset);
    if (preset->nfc) TRY(normalizer_add(&t->normalizer, NORMALIZER_NFC, STR(""), STR("")));
    return pre_tokenizer_add_preset(&t->pre_tokenizer, preset, err);
}

enum status tokenizer_fill_tiktoken(struct tokenizer *t, struct str file, const cJSON *config,
                                    struct err *err)
{
    struct tiktoken_ranks r = { 0 };
    enum status st = read_lines(&r, file, err);
    if (st == OK) st = fill(t, &r, config, err);
    buf_release(&r.bytes);
    mem_free(r.starts);
    mem_free(r.ends);
    return st;
}
