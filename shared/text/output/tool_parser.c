/* tool_parser.c - see tool_parser.h: text between calls, and calls that turn out to be text.
 * Thread: its owner's. */
#include "shared/text/output/tool_parser.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/output/tag_match.h"

void tool_parser_init(struct tool_parser *p, const struct tool_format *f, const cJSON *tools,
                      uint32_t max_calls)
{
    *p = (struct tool_parser){ .f = f, .tools = tools, .max_calls = max_calls };
}

void tool_parser_release(struct tool_parser *p)
{
    for (uint32_t i = 0; i < p->n_calls; i++) {
        buf_release(&p->calls[i].name);
        buf_release(&p->calls[i].arguments);
    }
    mem_free(p->calls);
    buf_release(&p->in);
    buf_release(&p->raw);
    buf_release(&p->word);
}

uint32_t tool_parser_n_good(const struct tool_parser *p)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_calls; i++) n += !p->calls[i].broken;
    return n;
}

/* ---- reading ---- */

struct str tool_rest(const struct tool_parser *p)
{
    return str_sub(buf_str(&p->in), p->at, SIZE_MAX);
}

void tool_consume(struct tool_parser *p, size_t n)
{
    if (p->state != TOOL_STATE_TEXT) buf_add_str(&p->raw, str_sub(tool_rest(p), 0, n));
    p->at += n;
}

static enum tool_step set_state(struct tool_parser *p, int state)
{
    if (state == TOOL_STATE_BAD) return TOOL_BAD;
    p->state = state;
    return TOOL_CONTINUE;
}

enum tool_step tool_expect(struct tool_parser *p, struct str tag, int then, int otherwise)
{
    tool_consume(p, tag_leading_blanks(tool_rest(p)));
    switch (tag_match_at(tool_rest(p), tag)) {
    case TAG_MATCH_PARTIAL: return TOOL_MORE;
    case TAG_MATCH_NO: return set_state(p, otherwise);
    default: break;
    }
    tool_consume(p, tag.n);
    return set_state(p, then);
}

enum tool_step tool_read_until(struct tool_parser *p, struct str tag, struct str *out, int then)
{
    struct str rest = tool_rest(p);
    size_t at = str_find(rest, tag);
    if (at == SIZE_MAX) return rest.n < TOOL_NAME_MAX + tag.n ? TOOL_MORE : TOOL_BAD;
    if (at > TOOL_NAME_MAX) return TOOL_BAD;
    *out = str_sub(rest, 0, at);
    tool_consume(p, at + tag.n);
    return set_state(p, then);
}

/* ---- calls ---- */

bool tool_call_begin(struct tool_parser *p)
{
    if (p->max_calls && tool_parser_n_good(p) >= p->max_calls) {
        p->full = true;
        return false;
    }
    if (p->n_calls == p->calls_cap) {
        p->calls_cap = p->calls_cap ? 2 * p->calls_cap : 4;
        p->calls = mem_realloc(p->calls, p->calls_cap, sizeof *p->calls);
    }
    p->calls[p->n_calls++] = (struct tool_call){ 0 };
    p->open = true;
    p->closing = false;
    p->key = 0;
    p->scan = (struct json_scan){ 0 };
    buf_clear(&p->word);
    return true;
}

struct tool_call *tool_call_current(struct tool_parser *p) { return &p->calls[p->n_calls - 1]; }

/* Does the request have a tool of this name? */
static bool is_known_tool(const struct tool_parser *p, struct str name)
{
    const cJSON *t;
    if (!p->tools) return true;
    cJSON_ArrayForEach (t, p->tools) {
        const cJSON *known = json_member(json_member(t, "function"), "name");
        if (cJSON_IsString(known) && str_eq_c(name, known->valuestring)) return true;
    }
    return false;
}

enum tool_step tool_call_name(struct tool_parser *p, struct str name)
{
    struct tool_call *c = tool_call_current(p);
    name = str_trim(name);
    if (name.n == 0 || name.n > TOOL_NAME_MAX || c->named) return TOOL_BAD;
    for (size_t i = 0; i < name.n; i++)
        if ((unsigned char)name.p[i] <= ' ') return TOOL_BAD;
    /* Clients look a call's function up by its name: a model may write any, but only one that the
     * request has is a call. */
    if (!is_known_tool(p, name)) return TOOL_BAD;
    buf_add_str(&c->name, name);
    c->named = true;
    return TOOL_CONTINUE;
}

void tool_call_end(struct tool_parser *p)
{
    struct tool_call *c = tool_call_current(p);
    if (c->arguments.len == 0) buf_add_c(&c->arguments, "{}");
    c->complete = true;
    p->open = false;
    p->closing = true;
    buf_clear(&p->raw);
}

/* Removes the current call, or marks it broken if its name may have been streamed. */
static void drop_call(struct tool_parser *p)
{
    struct tool_call *c = tool_call_current(p);
    c->broken = true;
    if (c->named) return;
    buf_release(&c->name);
    buf_release(&c->arguments);
    p->n_calls--;
}

/* Emits everything read since the last complete call as text. */
static void revert_to_text(struct tool_parser *p, struct buf *text)
{
    if (p->open) drop_call(p);
    if (!p->closing) {
        buf_add_str(text, buf_str(&p->raw));
        p->text_emitted = true;
    }
    p->after_call = p->closing;
    buf_clear(&p->raw);
    p->open = p->closing = false;
    p->state = TOOL_STATE_TEXT;
}

/* ---- text ---- */

/* Skips n blanks and the opening tag, and starts a call. */
static enum tool_step enter_call(struct tool_parser *p, int opened, size_t n)
{
    p->state = TOOL_STATE_BEGIN;
    p->i_open_tag = opened;
    p->started = true;
    tool_consume(p, n + (opened < 0 ? 0 : p->f->open[opened].n));
    return TOOL_CONTINUE;
}

struct open_tag {
    size_t at; /* SIZE_MAX: none */
    int which;
    size_t hold; /* bytes at the end that may be the beginning of a tag */
};

static struct open_tag find_open_tag(const struct tool_format *f, struct str text)
{
    struct open_tag o = { SIZE_MAX, 0, 0 };
    for (size_t i = 0; i < COUNT_OF(f->open) && f->open[i].n; i++) {
        size_t at = str_find(text, f->open[i]), partial = tag_match_partial(text, f->open[i]);
        if (partial > o.hold) o.hold = partial;
        if (at >= o.at) continue;
        o.at = at;
        o.which = (int)i;
    }
    return o;
}

/* Emits text up to the next call. Blanks are held until it is clear that no call follows them;
 * blanks after a call are kept only if text follows. */
static enum tool_step read_text(struct tool_parser *p, bool last, struct buf *text)
{
    size_t n_after = p->after_call ? tag_leading_blanks(tool_rest(p)) : 0;
    if (!p->text_emitted || (last && n_after == tool_rest(p).n)) tool_consume(p, n_after);
    struct str rest = tool_rest(p);
    size_t n_blanks = tag_leading_blanks(rest);
    struct open_tag o = find_open_tag(p->f, rest);
    if (p->f->bare && !p->started && n_blanks < rest.n && rest.p[n_blanks] == '{')
        return enter_call(p, -1, n_blanks);
    size_t n = o.at < SIZE_MAX ? o.at : rest.n - (last ? 0 : o.hold);
    if (!last || o.at < SIZE_MAX) n -= tag_trailing_blanks(str_sub(rest, 0, n));
    if (n > 0) {
        p->started = p->text_emitted = true;
        p->after_call = false;
        buf_add_str(text, str_sub(rest, 0, n));
        tool_consume(p, n);
    }
    if (o.at == SIZE_MAX) return TOOL_MORE;
    return enter_call(p, o.which, o.at - n);
}

static enum tool_step read_call(struct tool_parser *p, bool last)
{
    enum tool_step st = p->f->step(p, last);
    if (st == TOOL_CONTINUE && p->state == TOOL_STATE_TEXT) {
        buf_clear(&p->raw);
        p->after_call = true;
        p->closing = false;
    }
    return st;
}

static void parse(struct tool_parser *p, bool last, struct buf *text)
{
    enum tool_step st = TOOL_CONTINUE;
    while (st != TOOL_MORE && !p->full) {
        st = p->state == TOOL_STATE_TEXT ? read_text(p, last, text) : read_call(p, last);
        if (st == TOOL_BAD) revert_to_text(p, text);
    }
    if (p->full) p->at = p->in.len;
    buf_consume(&p->in, p->at);
    p->at = 0;
}

void tool_parser_push(struct tool_parser *p, struct str piece, struct buf *text)
{
    if (p->full) return;
    buf_add_str(&p->in, piece);
    parse(p, false, text);
}

void tool_parser_finish(struct tool_parser *p, bool cut, struct buf *text)
{
    if (p->full) return;
    parse(p, !cut, text);
    if (p->full || (cut && p->open && tool_call_current(p)->named)) return;
    do {
        if (p->state != TOOL_STATE_TEXT) revert_to_text(p, text);
        parse(p, true, text);
    } while (p->state != TOOL_STATE_TEXT && !p->full);
}
