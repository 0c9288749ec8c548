/* token_ids.h - checks the ids of a text, written as "1,2,3". */
#ifndef BATON_TESTS_UNIT_TEXT_TOKEN_IDS_H
#define BATON_TESTS_UNIT_TEXT_TOKEN_IDS_H

#include "shared/base/mem.h"
#include "shared/text/tokenizer/tokenizer.h"
#include "tests/harness/test.h"

/* Writes the ids of `text` to `out`, separated by commas. */
static inline void show_ids(const struct tokenizer *t, struct str text, bool add_special,
                            struct buf *out)
{
    int32_t *ids = NULL;
    size_t n = 0;
    struct err err = { 0 };
    if (tokenizer_encode(t, text, add_special, SIZE_MAX, &ids, &n, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    buf_clear(out);
    buf_add_c(out, "");
    for (size_t i = 0; i < n; i++) buf_printf(out, "%s%d", i ? "," : "", (int)ids[i]);
    mem_free(ids);
}

#define CHECK_IDS(t, text, add_special, want)                                                      \
    do {                                                                                           \
        struct buf shown_ = { 0 };                                                                 \
        show_ids((t), str_of(text), (add_special), &shown_);                                       \
        CHECK_EQ_STR(shown_.data, want);                                                           \
        buf_release(&shown_);                                                                      \
    } while (0)

#endif
