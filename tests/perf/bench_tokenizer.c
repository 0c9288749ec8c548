/* bench_tokenizer.c - how fast a model's tokenizer encodes: MB/s of ordinary text, and of 1 MB
 * texts that cannot be split.
 *
 * usage: bench_tokenizer MODEL...     folders or GGUF files. Prints; judges nothing. */
#include <stdio.h>
#include <string.h>

#include "deploy/node/node_model.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/model/load/model_files.h"

enum { TEXT_BYTES = 1 << 20, ROUNDS = 3 };

static uint64_t seed = 1;

static uint32_t below(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

/* A text of a kind; every kind but the first is one piece for most tokenizers. */
static void make_text(int kind, struct buf *out)
{
    static const char *const words[] = { "The ",  "quick ",   "brown ", "fox ",    "jumps ",
                                         "over ", "a ",       "lazy ",  "dog",     ". ",
                                         "in ",   "1984",     ", ",     "return ", "NULL",
                                         ";\n",   "(i = 0) ", "naïve ", "世界" };
    while (out->len < TEXT_BYTES) {
        switch (kind) {
        case 0: buf_add_c(out, words[below(COUNT_OF(words))]); break;
        case 1: buf_add_char(out, (char)('a' + below(26))); break;
        case 2: buf_add_char(out, 'a'); break;
        case 3: buf_add_c(out, "thequickbrownfoxjumpsoverthelazydog"); break;
        case 4:
            buf_printf(out, "%c%c%c", (int)(0xE4 + below(5)), (int)(0x80 + below(64)),
                       (int)(0x80 + below(64)));
            break;
        case 5: buf_add_char(out, ' '); break;
        case 6: buf_add_char(out, "-=*#_/.!"[below(8)]); break;
        case 7: buf_add_char(out, (char)('0' + below(10))); break;
        default: buf_add_char(out, (char)('A' + below(26) + (below(2) ? 32 : 0))); break;
        }
    }
}

static const char *const kinds[] = {
    "ordinary text", "random letters", "one letter", "words without spaces",  "random Chinese",
    "spaces",        "signs",          "digits",     "letters of both cases",
};

static void measure(const struct tokenizer *t, int kind)
{
    struct buf text = { 0 };
    uint64_t best = UINT64_MAX;
    size_t n = 0;
    make_text(kind, &text);
    for (int i = 0; i < ROUNDS; i++) {
        int32_t *ids = NULL;
        struct err err = { 0 };
        uint64_t start = clock_ns();
        n = 0;
        enum status st = tokenizer_encode(t, buf_str(&text), false, SIZE_MAX, &ids, &n, &err);
        uint64_t took = clock_ns() - start;
        if (st != OK) printf("  %s\n", err.text);
        if (took < best) best = took;
        mem_free(ids);
    }
    printf("  %-22s %8.1f MB/s %8.1f ms %9zu tokens\n", kinds[kind],
           (double)text.len / 1e6 / ((double)best / 1e9), (double)best / 1e6, n);
    buf_release(&text);
}

static int measure_model(const char *path)
{
    struct model_text text;
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    uint64_t start = clock_ns();
    enum status st = model_text_load(path, &text, &err);
    if (st == OK) {
        st = node_model_tokenizer(&text, &t, &err);
        model_text_release(&text);
    }
    if (st != OK) {
        printf("%s: %s\n", path, err.text);
        return 1;
    }
    printf("%s: %zu tokens, loaded in %.0f ms\n", path, tokenizer_n_vocab(t),
           (double)(clock_ns() - start) / 1e6);
    for (int i = 0; i < (int)COUNT_OF(kinds); i++) measure(t, i);
    tokenizer_free(t);
    return 0;
}

int main(int argc, char **argv)
{
    int failed = argc < 2;
    for (int i = 1; i < argc; i++) failed |= measure_model(argv[i]);
    return failed;
}
