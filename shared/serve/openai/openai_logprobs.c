/* openai_logprobs.c - stores logprobs as compact records and writes them in the formats of the two
 * APIs.
 *
 * A record is { id, logprob, rank, offset, n_top } and n_top pairs { id, logprob }: with few
 * alternatives a third of struct token_logprobs. A float is always written with the same digits
 * (json_add_f32), in token_logprobs as in top_logprobs, since evaluation tools compare the two for
 * equality; the chosen token is always among its alternatives. Thread: any; the owner of the
 * choice. */
#include <string.h>

#include "shared/serve/completion_request.h"

struct logprob_record {
    int32_t id;
    float logprob;
    int32_t rank;
    uint32_t offset; /* characters of the choice's text before it */
    uint32_t n_top;
};

struct logprob_pair {
    int32_t id;
    float logprob;
};

struct logprob_entry {
    struct logprob_record r;
    struct logprob_pair top[SAMPLER_LOGPROBS_MAX + 1]; /* best first; see with_chosen */
};

void openai_logprobs_store(struct buf *records, const struct token_logprobs *t, int32_t n_top,
                           uint32_t offset)
{
    struct logprob_record r = {
        .id = t->id, .logprob = t->logprob, .rank = t->rank, .offset = offset
    };
    r.n_top = n_top <= 0 ? 0 : t->n_top < (uint32_t)n_top ? t->n_top : (uint32_t)n_top;
    if (r.n_top > SAMPLER_LOGPROBS_MAX) r.n_top = SAMPLER_LOGPROBS_MAX;
    buf_add(records, &r, sizeof r);
    for (uint32_t i = 0; i < r.n_top; i++) {
        struct logprob_pair p = { t->top[i].id, t->top[i].logprob };
        buf_add(records, &p, sizeof p);
    }
}

static bool next_entry(struct str *rest, struct logprob_entry *e)
{
    if (rest->n < sizeof e->r) return false;
    memcpy(&e->r, rest->p, sizeof e->r);
    memcpy(e->top, rest->p + sizeof e->r, e->r.n_top * sizeof *e->top);
    *rest = str_sub(*rest, sizeof e->r + e->r.n_top * sizeof *e->top, SIZE_MAX);
    return true;
}

/* Keeps the n_top best, and adds the chosen token when it is not one of them. */
static void with_chosen(struct logprob_entry *e, int32_t n_top)
{
    uint32_t i = 0;
    if (e->r.n_top > (uint32_t)n_top) e->r.n_top = (uint32_t)n_top;
    while (i < e->r.n_top && e->top[i].id != e->r.id) i++;
    if (i == e->r.n_top) e->top[e->r.n_top++].id = e->r.id;
    e->top[i].logprob = e->r.logprob;
}

/* ---- names of tokens ---- */

uint32_t openai_text_chars(struct str text)
{
    uint32_t n = 0;
    for (size_t i = 0; i < text.n; i++) n += ((unsigned char)text.p[i] & 0xC0) != 0x80;
    return n;
}

uint32_t openai_token_chars(const struct choice *ch, int32_t id)
{
    struct buf b = { 0 };
    tokenizer_token_bytes(ch->request->serve->o.tokenizer, id, ch->request->p.skip_special, &b);
    uint32_t n = openai_text_chars(buf_str(&b));
    buf_release(&b);
    return n;
}

static void add_token_name(const struct choice *ch, int32_t id, struct buf *out)
{
    if (ch->request->p.tokens_as_ids) {
        buf_printf(out, "\"token_id:%d\"", id);
        return;
    }
    struct buf bytes = { 0 };
    tokenizer_token_bytes(ch->request->serve->o.tokenizer, id, false, &bytes);
    json_add_string(out, buf_str(&bytes));
    buf_release(&bytes);
}

/* ---- chat ---- */

static void add_chat_token(const struct choice *ch, struct logprob_pair p, struct buf *out)
{
    struct buf bytes = { 0 };
    tokenizer_token_bytes(ch->request->serve->o.tokenizer, p.id, false, &bytes);
    buf_add_c(out, "{\"token\":");
    add_token_name(ch, p.id, out);
    buf_add_c(out, ",\"logprob\":");
    json_add_f32(out, p.logprob);
    buf_add_c(out, ",\"bytes\":[");
    for (size_t i = 0; i < bytes.len; i++)
        buf_printf(out, i ? ",%u" : "%u", (unsigned char)bytes.data[i]);
    buf_add_char(out, ']');
    buf_release(&bytes);
}

void openai_write_chat_logprobs(const struct choice *ch, struct buf *out)
{
    struct str rest = buf_str(&ch->logprobs);
    struct logprob_entry e;
    int32_t n_top = ch->request->p.n_logprobs;
    buf_add_c(out, "{\"content\":[");
    for (bool first = true; next_entry(&rest, &e); first = false) {
        if (!first) buf_add_char(out, ',');
        add_chat_token(ch, (struct logprob_pair){ e.r.id, e.r.logprob }, out);
        buf_add_c(out, ",\"top_logprobs\":[");
        if (n_top > 0) with_chosen(&e, n_top);
        for (uint32_t i = 0; n_top > 0 && i < e.r.n_top; i++) {
            if (i) buf_add_char(out, ',');
            add_chat_token(ch, e.top[i], out);
            buf_add_char(out, '}');
        }
        buf_add_c(out, "]}");
    }
    buf_add_c(out, "],\"refusal\":null}");
}

/* ---- completions ---- */

/* Returns the choice that received the logprobs of this choice's prompt. */
static const struct choice *prompt_source(const struct choice *ch)
{
    return ch->request->p.stream ? ch : ch - ch->sample;
}

/* Iterates over the prompt's tokens (with echo) and the answer's; each of the four arrays needs one
 * pass. */
struct logprob_cursor {
    const struct choice *ch;
    struct str prompt, answer;
    size_t i, n_prompt;
    uint32_t offset;
};

static struct logprob_cursor cursor_start(const struct choice *ch, bool with_prompt)
{
    return (struct logprob_cursor){
        .ch = ch,
        .prompt = buf_str(&prompt_source(ch)->prompt_logprobs),
        .answer = buf_str(&ch->logprobs),
        .n_prompt = with_prompt ? ch->prompt->n_tokens : 0,
    };
}

/* *known is false for the first token of a prompt, which has no logprob. */
static bool cursor_next(struct logprob_cursor *w, struct logprob_entry *e, bool *known)
{
    *known = true;
    if (w->i >= w->n_prompt) return next_entry(&w->answer, e);
    *known = w->i > 0 && next_entry(&w->prompt, e);
    if (!*known) *e = (struct logprob_entry){ .r.id = w->ch->prompt->tokens[w->i] };
    e->r.offset = w->offset;
    w->offset += openai_token_chars(w->ch, e->r.id);
    w->i++;
    return true;
}

/* Two ids can have the same text (incomplete characters all show as U+FFFD). The chosen token keeps
 * its text; another token whose text is taken gets its spelling in the vocabulary, or its id. */
static void add_unique_name(const struct choice *ch, const struct logprob_entry *e, uint32_t i,
                            struct buf *out)
{
    struct buf name = { 0 }, other = { 0 };
    bool clash = false;
    add_token_name(ch, e->top[i].id, &name);
    for (uint32_t k = 0; k < e->r.n_top && e->top[i].id != e->r.id && !clash; k++) {
        if (k == i || (k > i && e->top[k].id != e->r.id)) continue;
        buf_clear(&other);
        add_token_name(ch, e->top[k].id, &other);
        clash = str_eq(buf_str(&name), buf_str(&other));
    }
    struct str piece = tokenizer_piece(ch->request->serve->o.tokenizer, e->top[i].id);
    if (!clash) buf_add_str(out, buf_str(&name));
    else if (piece.n) json_add_string(out, piece);
    else buf_printf(out, "\"token_id:%d\"", e->top[i].id);
    buf_release(&name);
    buf_release(&other);
}

static void add_top(const struct choice *ch, struct logprob_entry *e, struct buf *out)
{
    with_chosen(e, ch->request->p.n_logprobs);
    buf_add_char(out, '{');
    for (uint32_t i = 0; i < e->r.n_top; i++) {
        if (i) buf_add_char(out, ',');
        add_unique_name(ch, e, i, out);
        buf_add_char(out, ':');
        json_add_f32(out, e->top[i].logprob);
    }
    buf_add_char(out, '}');
}

enum column { COLUMN_TOKENS, COLUMN_LOGPROBS, COLUMN_TOP, COLUMN_OFFSETS, COLUMNS };

static void add_cell(const struct choice *ch, enum column column, struct logprob_entry *e,
                     bool known, struct buf *out)
{
    if (column == COLUMN_TOKENS) add_token_name(ch, e->r.id, out);
    else if (column == COLUMN_OFFSETS) buf_printf(out, "%u", e->r.offset);
    else if (!known) buf_add_c(out, "null");
    else if (column == COLUMN_LOGPROBS) json_add_f32(out, e->r.logprob);
    else add_top(ch, e, out);
}

void openai_write_completion_logprobs(const struct choice *ch, bool with_prompt, struct buf *out)
{
    static const char *const names[COLUMNS] = { "{\"tokens\":[", "],\"token_logprobs\":[",
                                                "],\"top_logprobs\":[", "],\"text_offset\":[" };
    for (enum column column = 0; column < COLUMNS; column++) {
        struct logprob_cursor w = cursor_start(ch, with_prompt);
        struct logprob_entry e;
        bool known;
        buf_add_c(out, names[column]);
        for (bool first = true; cursor_next(&w, &e, &known); first = false) {
            if (!first) buf_add_char(out, ',');
            add_cell(ch, column, &e, known, out);
        }
    }
    buf_add_c(out, "]}");
}

/* ---- prompt_logprobs ---- */

static void add_ranked(const struct choice *ch, struct logprob_pair p, int32_t rank,
                       struct buf *out)
{
    struct buf bytes = { 0 };
    tokenizer_token_bytes(ch->request->serve->o.tokenizer, p.id, false, &bytes);
    buf_printf(out, "\"%d\":{\"logprob\":", p.id);
    json_add_f32(out, p.logprob);
    buf_printf(out, ",\"rank\":%d,\"decoded_token\":", rank);
    json_add_string(out, buf_str(&bytes));
    buf_add_char(out, '}');
    buf_release(&bytes);
}

void openai_write_prompt_logprobs(const struct choice *ch, struct buf *out)
{
    struct str rest = buf_str(&prompt_source(ch)->prompt_logprobs);
    struct logprob_entry e;
    buf_add_c(out, "[null");
    while (next_entry(&rest, &e)) {
        with_chosen(&e, ch->request->p.n_prompt_logprobs);
        buf_add_c(out, ",{");
        for (uint32_t i = 0; i < e.r.n_top; i++) {
            if (i) buf_add_char(out, ',');
            add_ranked(ch, e.top[i], e.top[i].id == e.r.id ? e.r.rank : (int32_t)i + 1, out);
        }
        buf_add_char(out, '}');
    }
    buf_add_char(out, ']');
}
