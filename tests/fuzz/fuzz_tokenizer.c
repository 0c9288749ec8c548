/* fuzz_tokenizer.c - tokenizer.json, tokenizer_config.json and a text, separated by 0 bytes.
 *
 * Every accepted tokenizer must give ids of its vocabulary, keep to the limit, decode to valid
 * UTF-8, and stream the text that it decodes at once, except for the spaces that its decoder strips
 * from the front. */
#include <stdlib.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/output/detokenizer.h"
#include "shared/text/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool good)
{
    if (!good) abort();
}

static void check_limit(const struct tokenizer *t, struct str text, size_t n)
{
    int32_t *ids = NULL;
    size_t n_again = 0;
    struct err err = { 0 };
    require(tokenizer_encode(t, text, true, n, &ids, &n_again, &err) == OK && n_again == n);
    if (n > 0)
        require(tokenizer_encode(t, text, true, n - 1, &ids, &n_again, &err) == ERR_TOO_LONG &&
                n_again == n);
    mem_free(ids);
}

static void check_stream(const struct tokenizer *t, const int32_t *ids, size_t n, struct str whole)
{
    struct detokenizer d;
    struct buf out = { 0 };
    detokenizer_init(&d, t, false, NULL, 0, false);
    for (size_t i = 0; i < n; i++) require(!detokenizer_push(&d, ids[i], &out));
    detokenizer_finish(&d, &out);
    require(out.len >= whole.n);
    size_t n_front = out.len - whole.n;
    for (size_t i = 0; i < n_front; i++) require(out.data[i] == ' ');
    require(whole.n == 0 || memcmp(out.data + n_front, whole.p, whole.n) == 0);
    detokenizer_release(&d);
    buf_release(&out);
}

static void check_text(const struct tokenizer *t, struct str text)
{
    int32_t *ids = NULL;
    size_t n = 0;
    struct err err = { 0 };
    struct buf whole = { 0 };
    if (tokenizer_encode(t, text, true, SIZE_MAX, &ids, &n, &err) == OK) {
        for (size_t i = 0; i < n; i++)
            require(ids[i] >= 0 && (size_t)ids[i] < tokenizer_n_vocab(t));
        tokenizer_decode(t, ids, n, false, &whole);
        require(utf8_is_valid(buf_str(&whole)));
        check_limit(t, text, n);
        check_stream(t, ids, n, buf_str(&whole));
    }
    buf_release(&whole);
    mem_free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct str rest = { (const char *)data, size }, json = { 0 }, config = { 0 };
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    if (!str_split(&rest, 0, &json)) return 0;
    (void)str_split(&rest, 0, &config);
    if (tokenizer_from_json(json, config, &t, &err) != OK) return 0;
    check_text(t, rest.p ? rest : STR(""));
    tokenizer_free(t);
    return 0;
}
