/* jinja_parse.c - the parser of statements, and the life of a template.
 *
 *   covered       if / elif / else; for (tuple targets, `if` filter, else); set (name, namespace
 *                 attribute, tuple, block form with filters); macro; break, continue; generation
 *                 (opens a scope, nothing else); raw and comments (in the lexer)
 *   unsupported   call, filter, with, block, extends, include, import, from, autoescape, do, trans,
 *                 recursive loops (ERR_UNSUPPORTED)
 * The source is normalised first: \r\n and \r become \n, and one final newline is removed.
 * Thread: jinja_parse and jinja_free on one thread; a parsed template is read-only. */
#include "shared/text/jinja/jinja_ast.h"

#include <string.h>

static enum status parse_body(struct jinja_parser *p, const char *const *ends,
                              struct jinja_stmt **out);

static struct jinja_stmt *stmt_new(struct jinja_parser *p, enum jinja_stmt_kind kind)
{
    struct jinja_stmt *s = jinja_new(p, sizeof *s);
    s->kind = kind;
    s->line = p->at->line;
    return s;
}

static enum status end_tag(struct jinja_parser *p) { return jinja_expect(p, TOK_BLOCK_END); }

/* Parses the rest of an opening tag, the body, and "{%" of the end; stops at the end's name. */
static enum status parse_until(struct jinja_parser *p, const char *const *ends,
                               struct jinja_stmt **body)
{
    jinja_skip(p, TOK_COLON);
    TRY(end_tag(p));
    return parse_body(p, ends, body);
}

/* Parses a body and its end tag. */
static enum status parse_block(struct jinja_parser *p, const char *end, struct jinja_stmt **body)
{
    const char *const ends[] = { end, NULL };
    TRY(parse_until(p, ends, body));
    p->at++;
    return end_tag(p);
}

static enum status parse_if(struct jinja_parser *p, struct jinja_stmt *s)
{
    static const char *const ends[] = { "elif", "else", "endif", NULL };
    for (;;) {
        TRY(jinja_parse_tuple(p, false, &s->expr));
        TRY(parse_until(p, ends, &s->body));
        if (jinja_skip_name(p, "elif")) {
            s = s->else_ = stmt_new(p, JS_IF);
            continue;
        }
        if (jinja_skip_name(p, "else")) {
            s->else_ = stmt_new(p, JS_IF);
            return parse_block(p, "endif", &s->else_->body);
        }
        p->at++;
        return end_tag(p);
    }
}

/* Parses a name, or with `members` also name.attr. */
static enum status parse_target_one(struct jinja_parser *p, bool members, struct jinja_target **out)
{
    static const char *const reserved[] = {
        "true", "false", "none", "True", "False", "None", "loop"
    };
    struct jinja_target *t = *out = jinja_new(p, sizeof *t);
    for (size_t i = 0; i < COUNT_OF(reserved); i++)
        if (jinja_at_name(p, reserved[i]))
            return jinja_expected(p, "a variable that can be assigned");
    t->name = p->at->text;
    TRY(jinja_expect(p, TOK_NAME));
    if (!members || !jinja_skip(p, TOK_DOT)) return OK;
    t->attr = p->at->text;
    return jinja_expect(p, TOK_NAME);
}

/* Parses a target: a | a, b | (a, b) | ns.a; parentheses nest. */
static enum status parse_target(struct jinja_parser *p, bool members, struct jinja_target **out)
{
    struct jinja_target *first = NULL, **tail = &first;
    size_t n = 0;
    bool comma = false;
    TRY(jinja_deeper(p));
    do {
        if (n && p->at->kind != TOK_NAME && p->at->kind != TOK_LPAREN) break;
        if (n && jinja_at_name(p, "in")) break;
        if (jinja_skip(p, TOK_LPAREN)) {
            TRY(parse_target(p, members, tail));
            TRY(jinja_expect(p, TOK_RPAREN));
        } else {
            TRY(parse_target_one(p, members, tail));
        }
        tail = &(*tail)->next;
        n++;
    } while (jinja_skip(p, TOK_COMMA) && (comma = true));
    p->depth--;
    *out = first;
    if (!comma) return OK;
    *out = jinja_new(p, sizeof **out);
    (*out)->parts = first;
    (*out)->n_parts = n;
    return OK;
}

static enum status parse_for(struct jinja_parser *p, struct jinja_stmt *s)
{
    static const char *const ends[] = { "else", "endfor", NULL };
    TRY(parse_target(p, false, &s->target));
    if (!jinja_skip_name(p, "in")) return jinja_expected(p, "'in'");
    TRY(jinja_parse_tuple(p, false, &s->expr));
    if (jinja_is_content(s->expr)) p->t->reads_parts = true;
    if (jinja_skip_name(p, "if")) TRY(jinja_parse_expr(p, true, &s->test));
    if (jinja_at_name(p, "recursive"))
        return err_set(p->err, ERR_UNSUPPORTED,
                       "chat template line %d: recursive loops are not supported", s->line);
    p->loops++;
    TRY(parse_until(p, ends, &s->body));
    p->loops--;
    if (jinja_skip_name(p, "else")) return parse_block(p, "endfor", &s->else_);
    p->at++;
    return end_tag(p);
}

/* Parses a body that is captured or called: break and continue cannot leave it. */
static enum status parse_sealed(struct jinja_parser *p, const char *end, struct jinja_stmt **body)
{
    int loops = p->loops;
    p->loops = 0;
    TRY(parse_block(p, end, body));
    p->loops = loops;
    return OK;
}

static enum status parse_set(struct jinja_parser *p, struct jinja_stmt *s)
{
    TRY(parse_target(p, true, &s->target));
    if (jinja_skip(p, TOK_ASSIGN)) {
        TRY(jinja_parse_tuple(p, true, &s->expr));
        return end_tag(p);
    }
    s->kind = JS_SET_BLOCK;
    if (s->target->parts) return jinja_expected(p, "'='");
    if (p->at->kind == TOK_PIPE) TRY(jinja_parse_filters(p, &s->filters));
    return parse_sealed(p, "endset", &s->body);
}

static enum status parse_macro(struct jinja_parser *p, struct jinja_stmt *s)
{
    struct jinja_arg **tail = &s->params;
    bool defaults = false;
    s->text = p->at->text;
    TRY(jinja_expect(p, TOK_NAME));
    TRY(jinja_expect(p, TOK_LPAREN));
    while (p->at->kind != TOK_RPAREN) {
        if (s->params) TRY(jinja_expect(p, TOK_COMMA));
        struct jinja_arg *a = *tail = jinja_new(p, sizeof *a);
        tail = &a->next;
        a->name = p->at->text;
        TRY(jinja_expect(p, TOK_NAME));
        if (jinja_skip(p, TOK_ASSIGN)) {
            defaults = true;
            TRY(jinja_parse_expr(p, true, &a->expr));
        } else if (defaults) {
            return jinja_expected(p, "'=' and a default, as the parameter before has one");
        }
    }
    p->at++;
    return parse_sealed(p, "endmacro", &s->body);
}

static enum status parse_jump(struct jinja_parser *p, struct jinja_stmt *s)
{
    if (!p->loops)
        return err_set(p->err, ERR_FORMAT,
                       "chat template line %d: break or continue outside a loop", s->line);
    return end_tag(p);
}

static enum status parse_scope(struct jinja_parser *p, struct jinja_stmt *s)
{
    return parse_sealed(p, "endgeneration", &s->body);
}

static enum status unknown_tag(struct jinja_parser *p)
{
    static const char *const jinja_tags[] = { "call",       "filter",  "with",   "block",
                                              "extends",    "include", "import", "from",
                                              "autoescape", "do",      "trans",  "debug" };
    for (size_t i = 0; i < COUNT_OF(jinja_tags); i++)
        if (jinja_at_name(p, jinja_tags[i]))
            return err_set(p->err, ERR_UNSUPPORTED,
                           "chat template line %d: the tag '%s' is not supported", p->at->line,
                           jinja_tags[i]);
    return jinja_expected(p, "a tag name such as if, for or set");
}

/* After "{%": parse one statement and its end tag. */
static enum status parse_statement(struct jinja_parser *p, struct jinja_stmt **out)
{
    static const struct {
        const char *name;
        enum jinja_stmt_kind kind;
        enum status (*parse)(struct jinja_parser *p, struct jinja_stmt *s);
    } tags[] = {
        { "if", JS_IF, parse_if },
        { "for", JS_FOR, parse_for },
        { "set", JS_SET, parse_set },
        { "macro", JS_MACRO, parse_macro },
        { "generation", JS_SCOPE, parse_scope },
        { "break", JS_BREAK, parse_jump },
        { "continue", JS_CONTINUE, parse_jump },
    };
    for (size_t i = 0; i < COUNT_OF(tags); i++) {
        if (!jinja_at_name(p, tags[i].name)) continue;
        *out = stmt_new(p, tags[i].kind);
        p->at++;
        return tags[i].parse(p, *out);
    }
    return unknown_tag(p);
}

static bool at_end_of_body(const struct jinja_parser *p, const char *const *ends)
{
    for (; ends && *ends; ends++)
        if (jinja_at_name(p, *ends)) return true;
    return false;
}

/* Parses statements up to the name of one of `ends`; ends NULL: up to the end of the template. */
static enum status parse_body(struct jinja_parser *p, const char *const *ends,
                              struct jinja_stmt **out)
{
    struct jinja_stmt **tail = out;
    TRY(jinja_deeper(p));
    for (; p->at->kind != TOK_EOF; tail = &(*tail)->next) {
        if (p->at->kind == TOK_DATA) {
            *tail = stmt_new(p, JS_TEXT);
            (*tail)->text = p->at->text;
            p->at++;
        } else if (jinja_skip(p, TOK_VAR_BEGIN)) {
            *tail = stmt_new(p, JS_PRINT);
            TRY(jinja_parse_tuple(p, true, &(*tail)->expr));
            TRY(jinja_expect(p, TOK_VAR_END));
        } else {
            TRY(jinja_expect(p, TOK_BLOCK_BEGIN));
            if (at_end_of_body(p, ends)) {
                p->depth--;
                return OK;
            }
            TRY(parse_statement(p, tail));
        }
    }
    p->depth--;
    return ends ? jinja_expected(p, ends[0]) : OK;
}

/* Copies the source into the template's arena and makes its newlines uniform. */
static struct str normalise(struct jinja *t, struct str source)
{
    char *to = arena_alloc(&t->arena, source.n + 1);
    size_t n = 0;
    for (size_t i = 0; i < source.n; i++) {
        if (source.p[i] == '\r' && i + 1 < source.n && source.p[i + 1] == '\n') continue;
        to[n++] = source.p[i] == '\r' ? '\n' : source.p[i];
    }
    if (n && to[n - 1] == '\n') n--;
    return (struct str){ to, n };
}

enum status jinja_parse(struct str source, struct jinja **out, struct err *err)
{
    if (source.n > JINJA_SOURCE_MAX)
        return err_set(err, ERR_TOO_LONG, "the chat template has %zu bytes, more than %d", source.n,
                       JINJA_SOURCE_MAX);
    struct jinja *t = mem_try_calloc(1, sizeof *t);
    if (!t) return err_set(err, ERR_NOMEM, "no memory for the chat template");
    arena_init(&t->arena);
    struct jinja_token *tokens = NULL;
    enum status st = jinja_lex(normalise(t, source), &t->arena, &tokens, err);
    if (st == OK) {
        struct jinja_parser p = { .t = t, .at = tokens, .err = err };
        st = parse_body(&p, NULL, &t->body);
    }
    mem_free(tokens);
    if (st != OK) {
        jinja_free(t);
        return st;
    }
    *out = t;
    return OK;
}

void jinja_free(struct jinja *t)
{
    if (!t) return;
    arena_release(&t->arena);
    mem_free(t);
}
