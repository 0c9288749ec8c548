/* dummy_tokenizer.c - see dummy_tokenizer.h. */
#include "deploy/text/dummy_tokenizer.h"

#include <stdio.h>

#include "shared/base/mem.h"
#include "shared/model/config/config_hf.h"

enum { BYTES = 256, SPELLING_MAX = 24 };

/* GPT-2's byte alphabet: printable bytes of Latin-1 stand for themselves, the other bytes for the
 * characters from U+0100 on, in order. */
static bool is_printable(unsigned byte)
{
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

static unsigned character_of(unsigned byte)
{
    unsigned c = BYTES;
    if (is_printable(byte)) return byte;
    for (unsigned i = 0; i < byte; i++) c += !is_printable(i);
    return c;
}

/* Writes one character: at most 3 bytes of UTF-8, then a 0 byte. */
static void spell_byte(unsigned byte, char *to)
{
    const unsigned c = character_of(byte);
    if (c >= 0x80) *to++ = (char)(0xc0 | c >> 6);
    *to++ = (char)(c >= 0x80 ? 0x80 | (c & 0x3f) : c);
    *to = 0;
}

enum status dummy_tokenizer_create(const char *folder, struct tokenizer **out, struct err *err)
{
    struct model_config *c = MEM_NEW(struct model_config);
    struct model_generation generation;
    enum status st = config_hf_load(folder, c, &generation, err);
    const size_t n = st == OK ? c->n_vocab : 0;
    struct str *tokens = MEM_ARRAY(struct str, n);
    char(*text)[SPELLING_MAX] = mem_calloc(n ? n : 1, sizeof *text);
    for (size_t i = 0; i < n; i++) {
        if (i < BYTES) spell_byte((unsigned)i, text[i]);
        else snprintf(text[i], sizeof text[i], "<%zu>", i);
        tokens[i] = str_of(text[i]);
    }
    const struct tokenizer_vocab v = {
        .model = "gpt2", .pre = "gpt-2", .tokens = tokens, .n_tokens = n, .bos = -1, .eos = -1
    };
    if (st == OK && n < BYTES)
        st = err_set(err, ERR_CONFIG,
                     "%s has no tokenizer, and a vocabulary of %zu tokens has no room for one that "
                     "spells bytes; put a tokenizer there",
                     folder, n);
    if (st == OK) st = tokenizer_from_vocab(&v, out, err);
    mem_free(text);
    mem_free(tokens);
    mem_free(c);
    return st;
}
