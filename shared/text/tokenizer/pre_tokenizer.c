/* pre_tokenizer.c - see pre_tokenizer.h.
 *
 * A stage reads the spans of the pieces and writes those of the next stage; only stages that insert
 * characters copy text. Patterns are JIT compiled where the host allows it. The text is known to be
 * valid UTF-8: if PCRE2 checked it again for every match, splitting would be quadratic.
 * Thread: run on any, with its own pieces. */
#include "shared/text/tokenizer/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/text/tokenizer/regex_translate.h"

/* Limit on PCRE2's steps per match, against hostile patterns. */
enum {
    MATCH_STEPS_BASE = 1000 * 1000,
    MATCH_STEPS_PER_BYTE = 16,
    MATCH_HEAP_KIB = 128 * 1024 /* of one match; a long word takes some hundred bytes for each */
};
/* Length of a pattern after regex_translate. */
enum { TRANSLATED_MAX = 64 * PRE_TOKENIZER_PATTERN_MAX };

enum stage_kind { STAGE_SPLIT, STAGE_PREFIX_SPACE, STAGE_METASPACE };

struct pre_tokenizer_stage {
    enum stage_kind kind;
    pcre2_code *code; /* STAGE_SPLIT */
    enum pre_tokenizer_behavior behavior;
    bool invert;
    struct buf replacement; /* STAGE_METASPACE */
    enum pre_tokenizer_prepend prepend;
};

/* ---- building ---- */

static enum status add_stage(struct pre_tokenizer *p, enum stage_kind kind,
                             struct pre_tokenizer_stage **out, struct err *err)
{
    if (p->n == PRE_TOKENIZER_STAGES_MAX)
        return err_set(err, ERR_UNSUPPORTED, "the pre-tokenizer has more than %d stages",
                       PRE_TOKENIZER_STAGES_MAX);
    /* Models have one; several could make a text grow without bound. */
    for (size_t i = 0; i < p->n; i++)
        if (kind != STAGE_SPLIT && p->stages[i]->kind != STAGE_SPLIT)
            return err_set(err, ERR_UNSUPPORTED,
                           "the pre-tokenizer has more than one stage that inserts characters");
    struct pre_tokenizer_stage *s = MEM_NEW(struct pre_tokenizer_stage);
    s->kind = kind;
    p->stages[p->n++] = s;
    *out = s;
    return OK;
}

static enum status compile(struct str pattern, uint32_t options, pcre2_code **out, struct err *err)
{
    int code = 0;
    PCRE2_SIZE at = 0;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context) return err_set(err, ERR_NOMEM, "not enough memory for a pattern");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    pcre2_set_max_pattern_length(context, TRANSLATED_MAX);
    *out = pcre2_compile((PCRE2_SPTR)pattern.p, pattern.n, options, &code, &at, context);
    pcre2_compile_context_free(context);
    if (*out) {
        /* If it fails (no executable memory), the interpreter gives the same results. */
        (void)pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
        return OK;
    }
    PCRE2_UCHAR why[128] = "";
    pcre2_get_error_message(code, why, sizeof why);
    return err_set(err, ERR_UNSUPPORTED,
                   "the pre-tokenizer's pattern cannot be used: %s (at byte %zu)", (char *)why, at);
}

static enum status add_pattern(struct pre_tokenizer *p, struct str pattern, uint32_t options,
                               enum pre_tokenizer_behavior behavior, bool invert, struct err *err)
{
    pcre2_code *code = NULL;
    struct pre_tokenizer_stage *s = NULL;
    TRY(compile(pattern, options, &code, err));
    enum status st = add_stage(p, STAGE_SPLIT, &s, err);
    if (st != OK) {
        pcre2_code_free(code);
        return st;
    }
    s->code = code;
    s->behavior = behavior;
    s->invert = invert;
    return OK;
}

enum status pre_tokenizer_add_split(struct pre_tokenizer *p, struct str regex,
                                    enum pre_tokenizer_behavior behavior, bool invert,
                                    struct err *err)
{
    struct buf pattern = { 0 };
    enum status st = regex.n > PRE_TOKENIZER_PATTERN_MAX
                         ? err_set(err, ERR_UNSUPPORTED,
                                   "the pre-tokenizer's pattern has over %d bytes",
                                   PRE_TOKENIZER_PATTERN_MAX)
                         : regex_translate(regex, &pattern, err);
    /* MULTILINE: in Oniguruma ^ and $ match at lines. */
    if (st == OK)
        st = add_pattern(p, buf_str(&pattern),
                         PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                         behavior, invert, err);
    buf_release(&pattern);
    return st;
}

enum status pre_tokenizer_add_split_literal(struct pre_tokenizer *p, struct str text,
                                            enum pre_tokenizer_behavior behavior, bool invert,
                                            struct err *err)
{
    if (text.n == 0) return err_set(err, ERR_FORMAT, "the pre-tokenizer splits at an empty string");
    return add_pattern(p, text, PCRE2_UTF | PCRE2_LITERAL, behavior, invert, err);
}

enum status pre_tokenizer_add_prefix_space(struct pre_tokenizer *p, struct err *err)
{
    struct pre_tokenizer_stage *s = NULL;
    return add_stage(p, STAGE_PREFIX_SPACE, &s, err);
}

enum status pre_tokenizer_add_metaspace(struct pre_tokenizer *p, struct str replacement,
                                        enum pre_tokenizer_prepend prepend, bool split,
                                        struct err *err)
{
    struct pre_tokenizer_stage *s = NULL;
    if (replacement.n == 0)
        return err_set(err, ERR_FORMAT, "the pre-tokenizer replaces spaces by an empty string");
    TRY(add_stage(p, STAGE_METASPACE, &s, err));
    s->prepend = prepend;
    buf_add_str(&s->replacement, replacement);
    return split ? pre_tokenizer_add_split_literal(p, replacement, PRE_TOKENIZER_MERGED_WITH_NEXT,
                                                   false, err)
                 : OK;
}

void pre_tokenizer_release(struct pre_tokenizer *p)
{
    for (size_t i = 0; i < p->n; i++) {
        pcre2_code_free(p->stages[i]->code);
        buf_release(&p->stages[i]->replacement);
        mem_free(p->stages[i]);
    }
    *p = (struct pre_tokenizer){ 0 };
}

/* ---- running ---- */

static void add_span(struct pre_tokenizer_pieces *w, size_t at, size_t n)
{
    if (w->n_next == w->cap_next) {
        w->cap_next = w->cap_next ? w->cap_next * 2 : 64;
        w->next = mem_realloc(w->next, w->cap_next, sizeof *w->next);
    }
    w->next[w->n_next++] = (struct pre_tokenizer_span){ at, n };
}

/* State of cutting one piece. */
struct cut {
    const struct pre_tokenizer_stage *stage;
    struct pre_tokenizer_pieces *pieces;
    size_t n_before; /* spans made from earlier pieces */
    bool was_match;  /* the previous part was a match */
};

static void add_part(struct cut *c, size_t at, size_t n, bool matched)
{
    bool is_match = matched != c->stage->invert, joins = false;
    bool has_previous = c->pieces->n_next > c->n_before;
    switch (c->stage->behavior) {
    case PRE_TOKENIZER_ISOLATED: break;
    case PRE_TOKENIZER_REMOVED: break;
    case PRE_TOKENIZER_MERGED_WITH_PREVIOUS: joins = is_match && !c->was_match; break;
    case PRE_TOKENIZER_MERGED_WITH_NEXT: joins = !is_match && c->was_match; break;
    case PRE_TOKENIZER_CONTIGUOUS: joins = is_match == c->was_match; break;
    }
    c->was_match = is_match;
    if (joins && has_previous) c->pieces->next[c->pieces->n_next - 1].n += n;
    else if (c->stage->behavior != PRE_TOKENIZER_REMOVED || !is_match) add_span(c->pieces, at, n);
}

bool pre_tokenizer_keeps_all(const struct pre_tokenizer *p)
{
    for (size_t i = 0; i < p->n; i++) {
        const struct pre_tokenizer_stage *s = p->stages[i];
        if (s->kind == STAGE_SPLIT && s->behavior == PRE_TOKENIZER_REMOVED) return false;
        if (s->kind == STAGE_METASPACE && s->replacement.len == 0) return false;
    }
    return true;
}

/* Finds the next non-empty match from *start on; 0 or a PCRE2 error (PCRE2_ERROR_NOMATCH: none). */
static int next_match(const pcre2_code *code, struct str s, size_t *start, size_t *stop,
                      pcre2_match_data *data, pcre2_match_context *context)
{
    const uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int rc = pcre2_match(code, (PCRE2_SPTR)s.p, s.n, *start, options, data, context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(code, (PCRE2_SPTR)s.p, s.n, *start, options | PCRE2_NO_JIT, data, context);
    if (rc < 0) return rc;
    const PCRE2_SIZE *at = pcre2_get_ovector_pointer(data);
    if (at[0] < *start || at[1] <= at[0]) return PCRE2_ERROR_INTERNAL; /* \K moved the start */
    *start = at[0];
    *stop = at[1];
    return 0;
}

static enum status split_span(struct cut *c, struct pre_tokenizer_span span, pcre2_match_data *data,
                              pcre2_match_context *context, struct err *err)
{
    struct str s = { c->pieces->text.data + span.at, span.n };
    size_t done = 0, stop = 0;
    int rc = 0;
    c->n_before = c->pieces->n_next;
    c->was_match = false;
    while (done < s.n) {
        size_t start = done;
        rc = next_match(c->stage->code, s, &start, &stop, data, context);
        if (rc < 0) break;
        if (start > done) add_part(c, span.at + done, start - done, false);
        add_part(c, span.at + start, stop - start, true);
        done = stop;
    }
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
        PCRE2_UCHAR why[128] = "";
        pcre2_get_error_message(rc, why, sizeof why);
        return err_set(err, ERR_INVALID,
                       "this text cannot be split by the model's pre-tokenizer: %s", (char *)why);
    }
    if (done < s.n) add_part(c, span.at + done, s.n - done, false);
    return OK;
}

static enum status split_all(const struct pre_tokenizer_stage *s, struct pre_tokenizer_pieces *w,
                             struct err *err)
{
    struct cut cut = { .stage = s, .pieces = w };
    enum status st = ERR_NOMEM;
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    pcre2_match_context *context = pcre2_match_context_create(NULL);
    if (data && context) {
        size_t steps = MATCH_STEPS_BASE + w->text.len * MATCH_STEPS_PER_BYTE;
        pcre2_set_match_limit(context, steps > UINT32_MAX ? UINT32_MAX : (uint32_t)steps);
        pcre2_set_heap_limit(context, MATCH_HEAP_KIB);
        st = OK;
    }
    for (size_t i = 0; i < w->n && st == OK; i++)
        st = split_span(&cut, w->spans[i], data, context, err);
    if (!data || !context) err_set(err, st, "not enough memory to split a text");
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    return st;
}

static void copy_text(const struct pre_tokenizer_stage *s, bool is_start, struct str piece,
                      struct buf *out)
{
    if (s->kind == STAGE_PREFIX_SPACE) {
        if (!str_starts(piece, " ")) buf_add_char(out, ' ');
        buf_add_str(out, piece);
        return;
    }
    bool has_replacement = str_starts(piece, " ") || str_starts(piece, s->replacement.data);
    if (!has_replacement &&
        (s->prepend == PRE_TOKENIZER_ALWAYS || (s->prepend == PRE_TOKENIZER_FIRST && is_start)))
        buf_add_str(out, buf_str(&s->replacement));
    struct str rest = piece, part;
    for (bool first = true; str_split(&rest, ' ', &part); first = false) {
        if (!first) buf_add_str(out, buf_str(&s->replacement));
        buf_add_str(out, part);
    }
}

/* Runs a stage that inserts characters: writes a new text. */
static void rewrite_all(const struct pre_tokenizer_stage *s, bool is_start,
                        struct pre_tokenizer_pieces *w)
{
    buf_clear(&w->scratch);
    for (size_t i = 0; i < w->n; i++) {
        size_t at = w->scratch.len;
        struct str piece = { w->text.data + w->spans[i].at, w->spans[i].n };
        copy_text(s, is_start && i == 0, piece, &w->scratch);
        add_span(w, at, w->scratch.len - at);
    }
    struct buf text = w->text;
    w->text = w->scratch;
    w->scratch = text;
}

/* The next stage reads the spans that this one wrote. */
static void swap_spans(struct pre_tokenizer_pieces *w)
{
    struct pre_tokenizer_span *spans = w->spans;
    size_t cap = w->cap;
    w->spans = w->next;
    w->cap = w->cap_next;
    w->n = w->n_next;
    w->next = spans;
    w->cap_next = cap;
    w->n_next = 0;
}

enum status pre_tokenizer_run(const struct pre_tokenizer *p, bool is_start,
                              struct pre_tokenizer_pieces *pieces, struct err *err)
{
    pieces->n = pieces->n_next = 0;
    if (pieces->text.len == 0) return OK;
    add_span(pieces, 0, pieces->text.len);
    swap_spans(pieces);
    for (size_t i = 0; i < p->n; i++) {
        if (p->stages[i]->kind == STAGE_SPLIT) TRY(split_all(p->stages[i], pieces, err));
        else rewrite_all(p->stages[i], is_start, pieces);
        swap_spans(pieces);
    }
    return OK;
}

void pre_tokenizer_pieces_release(struct pre_tokenizer_pieces *pieces)
{
    buf_release(&pieces->text);
    buf_release(&pieces->scratch);
    mem_free(pieces->spans);
    mem_free(pieces->next);
    *pieces = (struct pre_tokenizer_pieces){ 0 };
}
