/* prefix_text.c - see prefix_text.h. */
#include "scheduler/prefix/prefix_text.h"

#include <inttypes.h>

/* ---- writing ---- */

/* Ends a list that began at `from`. */
static size_t end_list(struct buf *out, size_t from)
{
    const size_t n = out->len - from;
    buf_add_char(out, 0);
    return n;
}

void prefix_query_write(const struct prefix_query *q, struct buf *out, struct prefix_query_text *t)
{
    size_t n[4], from = out->len;
    const size_t start = out->len;
    for (uint32_t i = 0; i < q->n_rungs; i++)
        buf_printf(out, "%04x%08x%08x", q->rungs[i].slot, q->rungs[i].tag, q->rungs[i].tokens);
    n[0] = end_list(out, from);
    from = out->len;
    for (uint32_t i = 0; i < q->n_uses; i++)
        buf_printf(out, "%016" PRIx64 "%x", q->uses[i].kind, q->uses[i].flags);
    n[1] = end_list(out, from);
    from = out->len;
    for (uint32_t i = 0; i < q->n_avoid; i++) buf_printf(out, "%016" PRIx64, q->avoid[i]);
    n[2] = end_list(out, from);
    from = out->len;
    for (uint32_t i = 0; i < q->n_drops; i++)
        buf_printf(out, "%016" PRIx64 "%08x", q->drops[i].node, q->drops[i].at_s);
    n[3] = end_list(out, from);
    const char *at = out->data + start; /* it does not move any more */
    t->rungs = (struct str){ at, n[0] };
    t->uses = (struct str){ at += n[0] + 1, n[1] };
    t->avoid = (struct str){ at += n[1] + 1, n[2] };
    t->drops = (struct str){ at += n[2] + 1, n[3] };
}

void prefix_placed_write(const struct prefix_placed *p, struct buf *out)
{
    const struct prefix_expected *m = &p->expected;
    buf_printf(out, "%016" PRIx64 " %016" PRIx64 " %u %u %08x %u %08x %016" PRIx64 " %u",
               p->prefill, p->decode, p->tokens, m->compute.tokens, m->compute.at_s,
               m->decode.tokens, m->decode.at_s, m->keeper, m->keeper_tokens);
}

/* ---- reading ---- */

/* Takes a number of `digits` hexadecimal digits from the front of *text. */
static bool next_hex(struct str *text, size_t digits, uint64_t *out)
{
    uint64_t v = 0;
    if (text->n < digits) return false;
    for (size_t i = 0; i < digits; i++) {
        const char c = text->p[i];
        if (c >= '0' && c <= '9') v = v << 4 | (uint64_t)(c - '0');
        else if (c >= 'a' && c <= 'f') v = v << 4 | (uint64_t)(c - 'a' + 10);
        else return false;
    }
    *text = str_sub(*text, digits, text->n - digits);
    *out = v;
    return true;
}

static bool next_hex32(struct str *text, size_t digits, uint32_t *out)
{
    uint64_t v;
    if (!next_hex(text, digits, &v)) return false;
    *out = (uint32_t)v;
    return true;
}

static bool read_rung(struct str *text, struct prefix_rung *r)
{
    uint64_t slot;
    if (!next_hex(text, 4, &slot)) return false;
    r->slot = (uint16_t)slot;
    return next_hex32(text, 8, &r->tag) && next_hex32(text, 8, &r->tokens);
}

static bool read_use(struct str *text, struct prefix_use *u)
{
    uint32_t flags;
    if (!next_hex(text, 16, &u->kind) || !u->kind || !next_hex32(text, 1, &flags)) return false;
    u->flags = (uint8_t)flags;
    return flags <= PREFIX_FLAGS;
}

static bool read_drop(struct str *text, struct prefix_drop *d)
{
    return next_hex(text, 16, &d->node) && next_hex32(text, 8, &d->at_s);
}

/* How many of a list there are; false: not a whole number of them, or too many. */
static bool count(struct str text, size_t width, uint32_t max, uint32_t *n)
{
    if (text.n % width != 0 || text.n / width > max) return false;
    *n = (uint32_t)(text.n / width);
    return true;
}

static bool read_uses(struct str text, struct prefix_use *room, uint32_t *n)
{
    if (!count(text, PREFIX_USE_TEXT, PREFIX_USES_MAX, n)) return false;
    for (uint32_t i = 0; i < *n; i++)
        if (!read_use(&text, &room[i])) return false;
    return true;
}

static bool read_avoid(struct str text, uint64_t *room, uint32_t *n)
{
    if (!count(text, PREFIX_AVOID_TEXT, PREFIX_AVOID_MAX, n)) return false;
    for (uint32_t i = 0; i < *n; i++)
        if (!next_hex(&text, 16, &room[i])) return false;
    return true;
}

static bool read_rungs(struct str text, struct prefix_rung *room, uint32_t *n)
{
    if (!count(text, PREFIX_RUNG_TEXT, PREFIX_RUNGS_MAX, n)) return false;
    for (uint32_t i = 0; i < *n; i++)
        if (!read_rung(&text, &room[i])) return false;
    return true;
}

static bool read_drops(struct str text, struct prefix_drop *room, uint32_t *n)
{
    if (!count(text, PREFIX_DROP_TEXT, PREFIX_DROPS_MAX, n)) return false;
    for (uint32_t i = 0; i < *n; i++)
        if (!read_drop(&text, &room[i])) return false;
    return true;
}

static enum status invalid(struct err *err, const char *list)
{
    return err_field(err, ERR_INVALID, list,
                     "%s of a placement's prefix must be the text that "
                     "scheduler/prefix/prefix_text.h describes",
                     list);
}

static enum status too_large(struct err *err, const char *name, uint32_t v, int max)
{
    return err_field(err, ERR_INVALID, name, "%s is %u; with a prefix at most %d", name, v, max);
}

enum status prefix_query_read(const struct prefix_query_text *t, struct prefix_query_room *room,
                              struct prefix_query *q, struct err *err)
{
    if (q->n_tokens > PREFIX_LOAD_MAX)
        return too_large(err, "tokens", q->n_tokens, PREFIX_LOAD_MAX);
    if (q->ns > PREFIX_COST_MAX) return too_large(err, "ns", q->ns, PREFIX_COST_MAX);
    if (!read_rungs(t->rungs, room->rungs, &q->n_rungs)) return invalid(err, "rungs");
    if (!read_uses(t->uses, room->uses, &q->n_uses)) return invalid(err, "uses");
    if (!read_avoid(t->avoid, room->avoid, &q->n_avoid)) return invalid(err, "avoid");
    if (!read_drops(t->drops, room->drops, &q->n_drops)) return invalid(err, "drops");
    q->rungs = room->rungs;
    q->uses = room->uses;
    q->avoid = room->avoid;
    q->drops = room->drops;
    return OK;
}

static bool word_hex(struct str *text, size_t digits, uint64_t *out)
{
    struct str word;
    return str_split(text, ' ', &word) && word.n == digits && next_hex(&word, digits, out);
}

static bool word_tokens(struct str *text, uint32_t *out)
{
    struct str word;
    int64_t v;
    if (!str_split(text, ' ', &word) || str_to_i64(word, &v) != OK) return false;
    if (v < 0 || v > PREFIX_LOAD_MAX) return false;
    *out = (uint32_t)v;
    return true;
}

static bool word_kept(struct str *text, struct prefix_kept *out)
{
    uint64_t at_s;
    if (!word_tokens(text, &out->tokens) || !word_hex(text, 8, &at_s)) return false;
    out->at_s = (uint32_t)at_s;
    return true;
}

enum status prefix_placed_read(struct str text, struct prefix_placed *out)
{
    struct prefix_placed p = { .expected.known = true };
    const bool is_read = word_hex(&text, 16, &p.prefill) && word_hex(&text, 16, &p.decode) &&
                         word_tokens(&text, &p.tokens) && word_kept(&text, &p.expected.compute) &&
                         word_kept(&text, &p.expected.decode) &&
                         word_hex(&text, 16, &p.expected.keeper) &&
                         word_tokens(&text, &p.expected.keeper_tokens) && !text.p;
    if (!is_read || !p.decode || p.prefill == p.decode) return ERR_FORMAT;
    *out = p;
    return OK;
}
