/* output_parser.c - see output_parser.h. Thread: as output_parser.h says. */
#include "shared/serve/output_parser.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/serve/completion_request.h"

enum { ID_MAX = 40, SHORT_ID_LETTERS = 9, LONG_ID_LETTERS = 24 };

/* What was sent of a tool call. Its id is made when its name is known. */
struct emitted_call {
    char id[ID_MAX];
    bool header_sent;
    size_t n_sent; /* bytes of the arguments */
};

struct output_parser {
    const struct serve *serve;
    struct hash128 digest;
    bool has_reasoning, has_tools; /* which parsers are in use */
    struct reasoning reasoning;
    struct tool_parser tools;
    struct buf text, rest;          /* input of the reasoning parser, and of the tool parser */
    struct buf reasoning_text;      /* streamed: not sent yet; else all of it */
    uint32_t n_tokens, n_reasoning; /* tokens */
    struct emitted_call *emitted;   /* [n_emitted] of tools.calls */
    uint32_t n_emitted;
};

struct output_parser *output_parser_create(const struct completion_request *c,
                                           struct hash128 digest)
{
    const struct serve *s = c->serve;
    bool has_reasoning = s->o.reasoning != NULL, has_tools = c->p.tools.choice != TOOL_CHOICE_NONE;
    if (!has_reasoning && !has_tools) return NULL;
    struct output_parser *p = MEM_NEW(struct output_parser);
    struct buf none = { 0 };
    p->serve = s;
    p->digest = digest;
    p->has_reasoning = has_reasoning;
    p->has_tools = has_tools;
    if (has_reasoning) reasoning_init(&p->reasoning, s->o.reasoning, c->reasoning);
    if (!has_tools) return p;
    tool_parser_init(&p->tools, s->o.tools, c->tools,
                     c->p.tools.parallel && c->p.tools.choice != TOOL_CHOICE_NAMED ? 0 : 1);
    tool_parser_push(&p->tools, buf_str(&c->tool_call_prefix), &none);
    buf_release(&none);
    return p;
}

void output_parser_free(struct output_parser *p)
{
    if (!p) return;
    if (p->has_reasoning) reasoning_release(&p->reasoning);
    if (p->has_tools) tool_parser_release(&p->tools);
    buf_release(&p->text);
    buf_release(&p->rest);
    buf_release(&p->reasoning_text);
    mem_free(p->emitted);
    mem_free(p);
}

struct buf *output_parser_input(struct output_parser *p) { return &p->text; }

bool output_parser_needs_token(const struct output_parser *p, int32_t id)
{
    uint32_t i = p->has_reasoning ? 0 : p->serve->n_reasoning_parser_tokens,
             n = p->has_tools ? p->serve->n_parser_tokens : p->serve->n_reasoning_parser_tokens;
    for (; i < n; i++)
        if (p->serve->parser_tokens[i] == id) return true;
    return false;
}

/* ---- parsing ---- */

/* The digest has the request's name in it, so ids differ between requests. */
static void make_id(const struct output_parser *p, uint32_t i_call, char id[ID_MAX])
{
    static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    const uint64_t from[] = { p->digest.lo, p->digest.hi, i_call };
    uint8_t bytes[32];
    size_t n = p->tools.f->short_ids ? SHORT_ID_LETTERS : LONG_ID_LETTERS;
    sha256(from, sizeof from, bytes);
    int at = p->tools.f->short_ids ? 0 : snprintf(id, ID_MAX, "call_");
    for (size_t i = 0; i < n; i++) id[at++] = letters[bytes[i] % (sizeof letters - 1)];
    id[at] = 0;
}

static void start_emitted_calls(struct output_parser *p)
{
    while (p->n_emitted < p->tools.n_calls && p->tools.calls[p->n_emitted].named) {
        p->emitted = mem_realloc(p->emitted, p->n_emitted + 1, sizeof *p->emitted);
        p->emitted[p->n_emitted] = (struct emitted_call){ 0 };
        make_id(p, p->n_emitted, p->emitted[p->n_emitted].id);
        p->n_emitted++;
    }
}

static void extract_tool_calls(struct output_parser *p, struct buf *content)
{
    if (p->has_tools) {
        tool_parser_push(&p->tools, buf_str(&p->rest), content);
        start_emitted_calls(p);
    } else {
        buf_add_str(content, buf_str(&p->rest));
    }
    buf_clear(&p->rest);
}

static void extract_reasoning(struct output_parser *p)
{
    if (p->has_reasoning)
        reasoning_push(&p->reasoning, buf_str(&p->text), &p->reasoning_text, &p->rest);
    else buf_add_str(&p->rest, buf_str(&p->text));
    buf_clear(&p->text);
}

/* Tags count as reasoning, also when they have several tokens. */
static void count_reasoning_tokens(struct output_parser *p, enum reasoning_state before,
                                   bool was_inside)
{
    p->n_tokens++;
    if (before == REASONING_START && reasoning_is_inside(&p->reasoning))
        p->n_reasoning = p->n_tokens;
    else if (was_inside) p->n_reasoning++;
}

bool output_parser_push(struct output_parser *p, struct buf *content)
{
    enum reasoning_state before = p->reasoning.state;
    bool was_inside = p->has_reasoning && reasoning_is_inside(&p->reasoning);
    extract_reasoning(p);
    if (p->has_reasoning) count_reasoning_tokens(p, before, was_inside);
    extract_tool_calls(p, content);
    return !p->has_tools || !p->tools.full;
}

void output_parser_finish(struct output_parser *p, bool cut, struct buf *content)
{
    extract_reasoning(p);
    if (p->has_reasoning) reasoning_finish(&p->reasoning, &p->reasoning_text, &p->rest);
    extract_tool_calls(p, content);
    if (!p->has_tools) return;
    tool_parser_finish(&p->tools, cut, content);
    start_emitted_calls(p);
}

uint32_t output_parser_n_tool_calls(const struct output_parser *p)
{
    return p->has_tools ? tool_parser_n_good(&p->tools) : 0;
}

uint32_t output_parser_n_reasoning_tokens(const struct output_parser *p) { return p->n_reasoning; }

bool output_parser_has_output(const struct output_parser *p)
{
    return p && (p->reasoning_text.len || output_parser_n_tool_calls(p));
}

/* ---- writing ---- */

/* Writes both names, since vLLM's clients are moving from one to the other. */
static void write_reasoning(const struct output_parser *p, struct buf *out)
{
    buf_add_c(out, "\"reasoning_content\":");
    json_add_string(out, buf_str(&p->reasoning_text));
    buf_add_c(out, ",\"reasoning\":");
    json_add_string(out, buf_str(&p->reasoning_text));
}

/* with_index: for a delta. The delta that announces a call may have the first bytes of its
 * arguments. */
static void write_call(const struct output_parser *p, uint32_t i, bool with_index,
                       struct str arguments, struct buf *out)
{
    buf_add_char(out, '{');
    if (with_index) buf_printf(out, "\"index\":%u,", i);
    if (!with_index || !p->emitted[i].header_sent) {
        buf_printf(out,
                   "\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", p->emitted[i].id);
        json_add_string(out, buf_str(&p->tools.calls[i].name));
        buf_add_c(out, ",\"arguments\":");
    } else {
        buf_add_c(out, "\"function\":{\"arguments\":");
    }
    json_add_string(out, arguments);
    buf_add_c(out, "}}");
}

void output_parser_write(const struct output_parser *p, bool reasoning, struct buf *out)
{
    bool first = true;
    if (reasoning && p->reasoning_text.len) {
        buf_add_char(out, ',');
        write_reasoning(p, out);
    }
    for (uint32_t i = 0; i < p->n_emitted; i++) {
        if (p->tools.calls[i].broken) continue;
        buf_add_c(out, first ? ",\"tool_calls\":[" : ",");
        write_call(p, i, false, buf_str(&p->tools.calls[i].arguments), out);
        first = false;
    }
    if (!first) buf_add_char(out, ']');
}

static bool is_new(const struct output_parser *p, uint32_t i)
{
    return !p->emitted[i].header_sent || p->emitted[i].n_sent < p->tools.calls[i].arguments.len;
}

bool output_parser_has_delta(const struct output_parser *p, bool reasoning)
{
    if (reasoning && p->reasoning_text.len) return true;
    for (uint32_t i = 0; i < p->n_emitted; i++)
        if (is_new(p, i)) return true;
    return false;
}

void output_parser_write_delta(const struct output_parser *p, bool reasoning, bool first,
                               struct buf *out)
{
    bool any = false;
    if (reasoning && p->reasoning_text.len) {
        if (!first) buf_add_char(out, ',');
        write_reasoning(p, out);
        first = false;
    }
    for (uint32_t i = 0; i < p->n_emitted; i++) {
        struct str arguments = str_sub(buf_str(&p->tools.calls[i].arguments), p->emitted[i].n_sent,
                                       SIZE_MAX);
        if (!is_new(p, i)) continue;
        if (!any) buf_add_c(out, first ? "\"tool_calls\":[" : ",\"tool_calls\":[");
        else buf_add_char(out, ',');
        write_call(p, i, true, arguments, out);
        any = true;
    }
    if (any) buf_add_char(out, ']');
}

void output_parser_delta_sent(struct output_parser *p)
{
    buf_clear(&p->reasoning_text);
    for (uint32_t i = 0; i < p->n_emitted; i++) {
        p->emitted[i].header_sent = true;
        p->emitted[i].n_sent = p->tools.calls[i].arguments.len;
    }
}
