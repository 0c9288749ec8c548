/* fuzz_tokenizer_files.c - vocabularies of every format but tokenizer.json, and the files next to
 * them.
 *
 * Input: four lengths (u32 little endian) and that many bytes each: the vocabulary,
 * tokenizer_config.json, added_tokens.json and special_tokens_map.json; then a text. A vocabulary
 * that begins with "GGUF" is a GGUF file, whose arrays are used. Every accepted tokenizer must give
 * ids of its vocabulary, keep to the limit, and decode to valid UTF-8. */
#include <stdlib.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/load/gguf.h"
#include "shared/text/tokenizer/tokenizer.h"
#include "shared/text/utf8.h"

enum { N_FILES = 4 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool good)
{
    if (!good) abort();
}

static void check_text(const struct tokenizer *t, struct str text)
{
    int32_t *ids = NULL, *again = NULL;
    size_t n = 0, n_again = 0;
    struct err err = { 0 };
    struct buf whole = { 0 };
    if (tokenizer_encode(t, text, true, SIZE_MAX, &ids, &n, &err) == OK) {
        for (size_t i = 0; i < n; i++)
            require(ids[i] >= 0 && (size_t)ids[i] < tokenizer_n_vocab(t));
        tokenizer_decode(t, ids, n, false, &whole);
        require(utf8_is_valid(buf_str(&whole)));
        require(tokenizer_encode(t, text, true, n, &again, &n_again, &err) == OK && n_again == n);
        require(n == 0 || memcmp(ids, again, n * sizeof *ids) == 0);
        if (n > 0)
            require(tokenizer_encode(t, text, true, n - 1, &again, &n_again, &err) ==
                        ERR_TOO_LONG &&
                    n_again == n);
    }
    buf_release(&whole);
    mem_free(ids);
    mem_free(again);
}

static enum status from_gguf(const struct gguf *g, struct tokenizer **out, struct err *err)
{
    const struct gguf_kv *scores = gguf_find(g, "tokenizer.ggml.scores");
    struct tokenizer_vocab v = { .pre = "smollm", .bos = -1, .eos = -1, .add_space_prefix = true };
    struct str *tokens = NULL, *merges = NULL;
    int32_t *kinds = NULL;
    float *floats = NULL;
    size_t n_kinds = 0;
    enum status st = gguf_get_strs(g, "tokenizer.ggml.tokens", &tokens, &v.n_tokens, err);
    if (st == OK) st = gguf_get_strs(g, "tokenizer.ggml.merges", &merges, &v.n_merges, err);
    if (st == OK) st = gguf_get_i32s(g, "tokenizer.ggml.token_type", &kinds, &n_kinds, err);
    if (scores && scores->type == GGUF_ARRAY && scores->elem == GGUF_F32 &&
        scores->n == v.n_tokens && v.n_tokens > 0)
        floats = mem_dup(scores->value, v.n_tokens * sizeof *floats);
    v.model = floats ? "llama" : "gpt2";
    v.tokens = tokens;
    v.merges = merges;
    v.kinds = n_kinds == v.n_tokens ? kinds : NULL;
    v.scores = floats;
    if (st == OK) st = tokenizer_from_vocab(&v, out, err);
    void *owned[] = { tokens, merges, kinds, floats };
    for (size_t i = 0; i < COUNT_OF(owned); i++) mem_free(owned[i]);
    return st;
}

static enum status make(const struct str files[N_FILES], struct tokenizer **out, struct err *err)
{
    struct tokenizer_files f = {
        .model = files[0],
        .config = files[1],
        .added = files[2],
        .specials = files[3],
        .model_name = "file",
    };
    struct gguf *g = NULL;
    if (!str_starts(files[0], "GGUF")) return tokenizer_from_files(&f, out, err);
    TRY(gguf_parse(files[0], &g, err));
    enum status st = from_gguf(g, out, err);
    gguf_close(g);
    return st;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct str rest = { (const char *)data, size }, files[N_FILES];
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    uint8_t lengths[N_FILES][4];
    if (!str_take(&rest, lengths, sizeof lengths)) return 0;
    for (size_t i = 0; i < N_FILES; i++) {
        const uint8_t *n = lengths[i];
        files[i] = str_sub(
            rest, 0, (size_t)n[0] | (size_t)n[1] << 8 | (size_t)n[2] << 16 | (size_t)n[3] << 24);
        rest = str_sub(rest, files[i].n, SIZE_MAX);
    }
    if (make(files, &t, &err) != OK) return 0;
    check_text(t, rest);
    tokenizer_free(t);
    return 0;
}
