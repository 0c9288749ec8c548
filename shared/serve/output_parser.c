/* output_parser.c - see output_parser.h. Thread: as output_parser.h says. */
#include "shared/serve/output_parser.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/hash.h"
#include "shared/serve/completion_request.h"

enum { ID_MAX = 40, SHORT_ID_LETTERS = 9 };

/* What of a call went out; its id is made when its name is known. */
struct told {
    char   id[ID_MAX];
    bool   announced;
    size_t n_sent; /* bytes of the arguments */
};

struct parts {
    const struct serve *serve;
    bool                thinks, calls; /* which parsers there are */
    struct reasoning    reasoning;
    struct tool_parser  tools;
    struct buf          text, rest;    /* before either parser, and between them */
    struct buf          thoughts;      /* streamed: not sent yet; else all */
    uint32_t            n_taken, n_thought; /* tokens */
    struct told        *told;          /* [n_told] of tools.calls */
    uint32_t            n_told;
};

struct parts *parts_create(const struct call *c)
{
    const struct serve *s = c->serve;
    bool thinks = s->o.reasoning != NULL, calls = c->p.tools.choice != TOOL_CHOICE_NONE;
    if (!thinks && !calls) return NULL;
    struct parts *p = MEM_NEW(struct parts);
    struct buf none = { 0 };
    p->serve = s;
    p->thinks = thinks;
    p->calls = calls;
    if (thinks) reasoning_init(&p->reasoning, s->o.reasoning, c->reasoning);
    if (!calls) return p;
    tool_parser_init(&p->tools, s->o.tools, c->tools, c->p.tools.parallel && c->p.tools.choice != TOOL_CHOICE_NAMED ? 0 : 1);
    tool_parser_push(&p->tools, buf_str(&c->begun_call), &none);
    buf_release(&none);
    return p;
}

void parts_free(struct parts *p)
{
    if (!p) return;
    if (p->thinks) reasoning_release(&p->reasoning);
    if (p->calls) tool_parser_release(&p->tools);
    buf_release(&p->text);
    buf_release(&p->rest);
    buf_release(&p->thoughts);
    mem_free(p->told);
    mem_free(p);
}

struct buf *parts_text(struct parts *p) { return &p->text; }

bool parts_show(const struct parts *p, int32_t id)
{
    uint32_t i = p->thinks ? 0 : p->serve->n_shown_reasoning, n = p->calls ? p->serve->n_shown : p->serve->n_shown_reasoning;
    for (; i < n; i++)
        if (p->serve->shown[i] == id) return true;
    return false;
}

/* ---- taking apart ---- */

static void make_id(const struct parts *p, char id[ID_MAX])
{
    static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    uint8_t bytes[24];
    size_t n = p->tools.f->short_ids ? SHORT_ID_LETTERS : sizeof bytes;
    random_bytes(bytes, sizeof bytes);
    int at = p->tools.f->short_ids ? 0 : snprintf(id, ID_MAX, "call_");
    for (size_t i = 0; i < n; i++) id[at++] = letters[bytes[i] % (sizeof letters - 1)];
    id[at] = 0;
}

static void name_calls(struct parts *p)
{
    while (p->n_told < p->tools.n_calls && p->tools.calls[p->n_told].named) {
        p->told = mem_realloc(p->told, p->n_told + 1, sizeof *p->told);
        p->told[p->n_told] = (struct told){ 0 };
        make_id(p, p->told[p->n_told++].id);
    }
}

static void find_calls(struct parts *p, struct buf *content)
{
    if (p->calls) {
        tool_parser_push(&p->tools, buf_str(&p->rest), content);
        name_calls(p);
    } else {
        buf_add_str(content, buf_str(&p->rest));
    }
    buf_clear(&p->rest);
}

static void find_thoughts(struct parts *p)
{
    if (p->thinks) reasoning_push(&p->reasoning, buf_str(&p->text), &p->thoughts, &p->rest);
    else buf_add_str(&p->rest, buf_str(&p->text));
    buf_clear(&p->text);
}

/* The tags count as thought, also when they are several tokens. */
static void count_thoughts(struct parts *p, enum reasoning_state before, bool was_inside)
{
    p->n_taken++;
    if (before == REASONING_START && reasoning_is_inside(&p->reasoning)) p->n_thought = p->n_taken;
    else if (was_inside) p->n_thought++;
}

bool parts_take(struct parts *p, struct buf *content)
{
    enum reasoning_state before = p->reasoning.state;
    bool was_inside = p->thinks && reasoning_is_inside(&p->reasoning);
    find_thoughts(p);
    if (p->thinks) count_thoughts(p, before, was_inside);
    find_calls(p, content);
    return !p->calls || !p->tools.full;
}

void parts_finish(struct parts *p, bool cut, struct buf *content)
{
    find_thoughts(p);
    if (p->thinks) reasoning_finish(&p->reasoning, &p->thoughts, &p->rest);
    find_calls(p, content);
    if (!p->calls) return;
    tool_parser_finish(&p->tools, cut, content);
    name_calls(p);
}

uint32_t parts_n_calls(const struct parts *p) { return p->calls ? tool_parser_n_good(&p->tools) : 0; }

uint32_t parts_n_reasoning_tokens(const struct parts *p) { return p->n_thought; }

bool parts_are_there(const struct parts *p) { return p && (p->thoughts.len || parts_n_calls(p)); }

/* ---- writing ---- */

/* Both names: vLLM's clients are moving from one to the other. */
static void write_thoughts(const struct parts *p, struct buf *out)
{
    buf_add_c(out, "\"reasoning_content\":");
    json_add_string(out, buf_str(&p->thoughts));
    buf_add_c(out, ",\"reasoning\":");
    json_add_string(out, buf_str(&p->thoughts));
}

/* with_index: as the pieces of a stream carry it. The first bytes of the arguments are not part of the announcement. */
static void write_call(const struct parts *p, uint32_t i, bool with_index, struct str arguments, struct buf *out)
{
    buf_add_char(out, '{');
    if (with_index) buf_printf(out, "\"index\":%u,", i);
    if (!with_index || !p->told[i].announced) {
        buf_printf(out, "\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", p->told[i].id);
        json_add_string(out, buf_str(&p->tools.calls[i].name));
        buf_add_c(out, ",\"arguments\":");
    } else {
        buf_add_c(out, "\"function\":{\"arguments\":");
    }
    json_add_string(out, arguments);
    buf_add_c(out, "}}");
}

void parts_write(const struct parts *p, bool reasoning, struct buf *out)
{
    bool first = true;
    if (reasoning && p->thoughts.len) {
        buf_add_char(out, ',');
        write_thoughts(p, out);
    }
    for (uint32_t i = 0; i < p->n_told; i++) {
        if (p->tools.calls[i].broken) continue;
        buf_add_c(out, first ? ",\"tool_calls\":[" : ",");
        write_call(p, i, false, buf_str(&p->tools.calls[i].arguments), out);
        first = false;
    }
    if (!first) buf_add_char(out, ']');
}

static bool is_new(const struct parts *p, uint32_t i) { return !p->told[i].announced || p->told[i].n_sent < p->tools.calls[i].arguments.len; }

bool parts_has_news(const struct parts *p, bool reasoning)
{
    if (reasoning && p->thoughts.len) return true;
    for (uint32_t i = 0; i < p->n_told; i++)
        if (is_new(p, i)) return true;
    return false;
}

void parts_write_delta(const struct parts *p, bool reasoning, bool first, struct buf *out)
{
    bool any = false;
    if (reasoning && p->thoughts.len) {
        if (!first) buf_add_char(out, ',');
        write_thoughts(p, out);
        first = false;
    }
    for (uint32_t i = 0; i < p->n_told; i++) {
        struct str arguments = str_sub(buf_str(&p->tools.calls[i].arguments), p->told[i].n_sent, SIZE_MAX);
        if (!is_new(p, i)) continue;
        if (!any) buf_add_c(out, first ? "\"tool_calls\":[" : ",\"tool_calls\":[");
        else buf_add_char(out, ',');
        write_call(p, i, true, arguments, out);
        any = true;
    }
    if (any) buf_add_char(out, ']');
}

void parts_sent(struct parts *p)
{
    buf_clear(&p->thoughts);
    for (uint32_t i = 0; i < p->n_told; i++) {
        p->told[i].announced = true;
        p->told[i].n_sent = p->tools.calls[i].arguments.len;
    }
}
