/* fuzz_text_bundle.c - arbitrary bytes for the reader of a model's text, which a node that has the
 * cluster secret sent: their HMAC is put behind them. What is accepted has known names, known
 * parsers and pieces of the bytes that it was given. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/text/text_bundle.h"
#include "shared/base/hash/hash.h"
#include "shared/text/output/reasoning.h"
#include "shared/text/output/tool_parser.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_parsers(const struct text_bundle *b)
{
    const char *reasoning = b->reasoning_parser, *tools = b->tool_parser;
    if (strcmp(reasoning, "auto") != 0 && strcmp(reasoning, "none") != 0 &&
        !reasoning_format_find(str_of(reasoning)))
        abort();
    if (strcmp(tools, "auto") != 0 && strcmp(tools, "none") != 0 &&
        !tool_format_find(str_of(tools)))
        abort();
}

static void check(const struct text_bundle *b, struct str bytes)
{
    if (b->n_files < 1 || b->n_files > TEXT_FILES_MAX || b->n_names < 1 ||
        b->n_names > TEXT_NAMES_MAX || b->max_model_len == 0)
        abort();
    check_parsers(b);
    for (size_t i = 0; i < b->n_names; i++)
        if (!b->names[i][0] || strlen(b->names[i]) >= TEXT_NAME_MAX) abort();
    for (size_t i = 0; i < b->n_files; i++) {
        const struct text_file *f = &b->files[i];
        if (f->name[0] == '/' || strstr(f->name, "..") || f->size < f->bytes.n) abort();
        if (f->bytes.n && (f->bytes.p < bytes.p || f->bytes.p + f->bytes.n > bytes.p + bytes.n))
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct text_bundle b;
    struct err err = { 0 };
    struct buf bytes = { 0 };
    uint8_t mac[32];
    buf_add(&bytes, data, size);
    hmac_sha256("", 0, size ? (const char *)data : "", size, mac);
    for (size_t i = 0; i < sizeof mac; i++) buf_printf(&bytes, "%02x", mac[i]);
    if (text_bundle_read(buf_str(&bytes), (struct str){ 0 }, &b, &err) == OK) {
        check(&b, buf_str(&bytes));
        text_bundle_release(&b);
    } else if (err.code == OK || !err.text[0]) {
        abort();
    }
    buf_release(&bytes);
    return 0;
}
