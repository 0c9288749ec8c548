/* fuzz_output_parser.c - arbitrary answers for the reasoning and tool call parsers. The first byte
 * chooses the format, the second the state that the prompt left and whether the answer was cut. One
 * piece and byte by byte must give the same, arguments of complete calls must be JSON objects, and
 * an answer without tags must stay as it is. */
#include <stdlib.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/output/reasoning.h"
#include "shared/text/output/tool_parser.h"
#include "shared/text/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char TOOLS[] = "[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{"
                            "\"type\":\"string\"},\"i\":{\"type\":\"integer\"}}}}}]";

/* Numbers of more than 63 characters are JSON, but json_parse refuses them. */
static bool is_object(struct str text)
{
    cJSON *o = NULL;
    struct err err = { 0 };
    enum status st = json_parse(text, false, &o, &err);
    bool good = st == OK ? cJSON_IsObject(o) : strstr(err.text, "63 characters") != NULL;
    cJSON_Delete(o);
    return good;
}

static void run(const struct tool_format *f, const cJSON *tools, enum reasoning_state from,
                bool ernie, bool cut, struct str text, size_t step, struct buf *out)
{
    struct tool_parser p;
    struct reasoning r;
    struct buf rest = { 0 }, content = { 0 };
    tool_parser_init(&p, f, tools, 0);
    reasoning_init(&r, reasoning_format_find(ernie ? STR("ernie") : STR("think")), from);
    for (size_t i = 0; i < text.n; i += step) {
        reasoning_push(&r, str_sub(text, i, step), out, &rest);
        tool_parser_push(&p, buf_str(&rest), &content);
        buf_clear(&rest);
    }
    reasoning_finish(&r, out, &rest);
    tool_parser_push(&p, buf_str(&rest), &content);
    tool_parser_finish(&p, cut, &content);
    buf_add_char(out, 1);
    buf_add_str(out, buf_str(&content));
    for (uint32_t i = 0; i < p.n_calls; i++) {
        const struct tool_call *c = &p.calls[i];
        buf_printf(out, "\1%d%d", c->complete, c->broken);
        buf_add_str(out, buf_str(&c->name));
        buf_add_char(out, 1);
        buf_add_str(out, buf_str(&c->arguments));
        if (!c->named || (c->complete && !is_object(buf_str(&c->arguments)))) abort();
    }
    buf_release(&rest);
    buf_release(&content);
    tool_parser_release(&p);
    reasoning_release(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static cJSON *tools;
    size_t n_formats = 0;
    struct buf whole = { 0 }, bytes = { 0 }, valid = { 0 };
    if (size < 2 || size > 4096) return 0;
    if (!tools && json_parse(STR(TOOLS), false, &tools, NULL) != OK) abort();
    while (tool_format_at(n_formats)) n_formats++;
    const struct tool_format *f = tool_format_at(data[0] % n_formats);
    enum reasoning_state from = (enum reasoning_state)(data[1] % (REASONING_REST + 1));
    bool ernie = data[1] & 16, cut = data[1] & 32;
    /* The detokenizer emits valid UTF-8 only. */
    utf8_add_valid(&valid, (struct str){ (const char *)data + 2, size - 2 });
    for (size_t i = 0; i < valid.len; i++)
        if (!valid.data[i]) valid.data[i] = '0'; /* \u0000 is JSON, but json_parse refuses it */
    run(f, tools, from, ernie, cut, buf_str(&valid), valid.len + 1, &whole);
    run(f, tools, from, ernie, cut, buf_str(&valid), 1, &bytes);
    if (whole.len != bytes.len || memcmp(whole.data, bytes.data, whole.len) != 0) abort();
    bool plain = from == REASONING_REST && !memchr(valid.data ? valid.data : "", '<', valid.len) &&
                 !memchr(valid.data ? valid.data : "", '[', valid.len);
    if (plain && !f->bare &&
        (whole.len != valid.len + 1 ||
         memcmp(whole.data + 1, valid.data ? valid.data : "", valid.len) != 0))
        abort();
    buf_release(&whole);
    buf_release(&bytes);
    buf_release(&valid);
    return 0;
}
