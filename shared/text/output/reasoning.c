/* reasoning.c - see reasoning.h.
 *
 * step() is repeated on the held text until it needs more; each state decides how much of the text
 * is certain.
 * Thread: its owner's. */
#include "shared/text/output/reasoning.h"

#include "shared/base/mem.h"
#include "shared/text/output/format_name.h"
#include "shared/text/output/tag_match.h"

#define TEXT(literal)                                                                              \
    {                                                                                              \
        (literal), sizeof(literal) - 1                                                             \
    } /* a constant struct str */

static const struct reasoning_format REASONING_FORMATS[] = {
    {
        .name = "think",
        .aliases = "qwen3 deepseek deepseek-r1 deepseek-v3 deepseek-v31 qwen3-thinking basic glm45 "
                   "ernie-45-vl",
        .open = TEXT("<think>"),
        .close = TEXT("</think>"),
    },
    {
        .name = "ernie",
        .aliases = "ernie-x1 ernie45 ernie-45-vl-thinking",
        .open = TEXT("<think>"),
        .close = TEXT("</think>"),
        .answer_open = TEXT("<response>"),
        .answer_close = TEXT("</response>"),
    },
};

const struct reasoning_format *reasoning_format_find(struct str name)
{
    for (size_t i = 0; i < COUNT_OF(REASONING_FORMATS); i++)
        if (format_is_named(name, REASONING_FORMATS[i].name, REASONING_FORMATS[i].aliases))
            return &REASONING_FORMATS[i];
    return NULL;
}

bool reasoning_parser_is_known(struct str name)
{
    return format_is_auto_or_none(name) || reasoning_format_find(name);
}

const struct reasoning_format *reasoning_format_of_template(struct str source)
{
    if (str_find(source, REASONING_FORMATS[0].close) == SIZE_MAX &&
        str_find(source, REASONING_FORMATS[0].open) == SIZE_MAX)
        return NULL;
    /* The templates of reasoning ERNIE models set think_mode in the system message; <response> is
     * written by the model. */
    bool ernie = str_find(source, STR("<response>")) != SIZE_MAX ||
                 str_find(source, STR("think_mode=")) != SIZE_MAX;
    return &REASONING_FORMATS[ernie];
}

enum reasoning_state reasoning_state_after(const struct reasoning_format *f, struct str prompt)
{
    struct str end = str_trim(prompt);
    if (end.n >= f->open.n && str_eq(str_sub(end, end.n - f->open.n, SIZE_MAX), f->open))
        return REASONING_LEAD;
    if (end.n >= f->close.n && str_eq(str_sub(end, end.n - f->close.n, SIZE_MAX), f->close))
        return REASONING_AFTER;
    return REASONING_START;
}

enum reasoning_state reasoning_state_within(const struct reasoning_format *f, struct str text)
{
    struct str s = str_trim(text);
    if (tag_match_at(s, f->open) != TAG_MATCH_WHOLE) return s.n ? REASONING_REST : REASONING_START;
    return str_find(s, f->close) == SIZE_MAX ? REASONING_INSIDE : REASONING_AFTER;
}

void reasoning_init(struct reasoning *r, const struct reasoning_format *f,
                    enum reasoning_state state)
{
    *r = (struct reasoning){ .f = f, .state = state };
}

void reasoning_release(struct reasoning *r) { buf_release(&r->held); }

static void drop(struct reasoning *r, size_t n) { buf_consume(&r->held, n); }

static void emit(struct reasoning *r, size_t n, struct buf *out)
{
    buf_add_str(out, str_sub(buf_str(&r->held), 0, n));
    drop(r, n);
}

static bool set_state(struct reasoning *r, enum reasoning_state state)
{
    r->state = state;
    return true;
}

static enum tag_match peek(const struct reasoning *r, struct str tag)
{
    struct str text = buf_str(&r->held);
    return tag_match_at(str_sub(text, tag_leading_blanks(text), SIZE_MAX), tag);
}

/* Goes to `then` after blanks and `tag`, to `otherwise` at anything else; drop_blanks: those before
 * it belong to an earlier tag. False: not known yet. */
static bool expect(struct reasoning *r, struct str tag, enum reasoning_state then,
                   enum reasoning_state otherwise, bool drop_blanks)
{
    struct str text = buf_str(&r->held);
    size_t n = tag_leading_blanks(text);
    enum tag_match m = tag.n ? peek(r, tag) : n < text.n ? TAG_MATCH_NO : TAG_MATCH_PARTIAL;
    if (m == TAG_MATCH_PARTIAL) return false;
    if (m == TAG_MATCH_WHOLE) drop(r, n + tag.n);
    else if (drop_blanks) drop(r, n);
    return set_state(r, m == TAG_MATCH_WHOLE ? then : otherwise);
}

/* Emits text up to `tag`, without the blanks before it, then goes to `then`. False: no tag yet. */
static bool until(struct reasoning *r, struct str tag, enum reasoning_state then, struct buf *out)
{
    struct str text = buf_str(&r->held);
    size_t at = str_find(text, tag),
           n = at == SIZE_MAX ? text.n - tag_match_partial(text, tag) : at;
    n -= tag_trailing_blanks(str_sub(text, 0, n));
    emit(r, n, out);
    if (at == SIZE_MAX) return false;
    drop(r, at - n + tag.n);
    return set_state(r, then);
}

static bool lead(struct reasoning *r, enum reasoning_state then)
{
    drop(r, tag_leading_blanks(buf_str(&r->held)));
    return r->held.len > 0 && set_state(r, then);
}

/* Handles the held text in the current state; true when the state has changed. */
static bool step(struct reasoning *r, struct buf *reasoning_text, struct buf *answer)
{
    const struct reasoning_format *f = r->f;
    switch (r->state) {
    case REASONING_START:
        /* The answer's own tag may come without reasoning before it. */
        if (f->answer_open.n && peek(r, f->answer_open) != TAG_MATCH_NO)
            return expect(r, f->answer_open, REASONING_ANSWER_LEAD, REASONING_REST, false);
        return expect(r, f->open, REASONING_LEAD, REASONING_REST, false);
    case REASONING_LEAD: return lead(r, REASONING_INSIDE);
    case REASONING_INSIDE: return until(r, f->close, REASONING_AFTER, reasoning_text);
    case REASONING_AFTER:
        return expect(r, f->answer_open, REASONING_ANSWER_LEAD, REASONING_REST, true);
    case REASONING_ANSWER_LEAD: return lead(r, REASONING_ANSWER);
    case REASONING_ANSWER: return until(r, f->answer_close, REASONING_TAIL, answer);
    case REASONING_TAIL: return lead(r, REASONING_REST);
    default: emit(r, r->held.len, answer); return false;
    }
}

void reasoning_push(struct reasoning *r, struct str text, struct buf *reasoning_text,
                    struct buf *answer)
{
    if (r->state == REASONING_REST) {
        buf_add_str(answer, text);
        return;
    }
    buf_add_str(&r->held, text);
    while (step(r, reasoning_text, answer)) {}
}

/* What looked like the beginning of a tag is text. Blanks after a tag belong to it. */
void reasoning_finish(struct reasoning *r, struct buf *reasoning_text, struct buf *answer)
{
    bool blank = tag_leading_blanks(buf_str(&r->held)) == r->held.len;
    if (blank && r->state != REASONING_START) drop(r, r->held.len);
    if (r->state == REASONING_AFTER) drop(r, tag_leading_blanks(buf_str(&r->held)));
    emit(r, r->held.len, reasoning_is_inside(r) ? reasoning_text : answer);
}
