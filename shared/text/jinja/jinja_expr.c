/* jinja_expr.c - the parser of expressions.
 *
 * Precedence from low to high:
 *   a if c else b  |  or  |  and  |  not  |  comparisons, in, not in (chainable)  |  + -  |  ~
 *   * / // %  |  **  |  unary - +  |  .name [index] [a:b:c] (args)  |  filters and tests
 * Adjacent string literals are one. Filters and tests are looked up here, so an unknown one is
 * found when the model is loaded. Not covered (ERR_UNSUPPORTED): *args and **kwargs in calls.
 * Thread: any; the state is struct jinja_parser. */
#include "shared/text/jinja/jinja_ast.h"

#include <string.h>

void *jinja_new(struct jinja_parser *p, size_t size) { return arena_alloc(&p->t->arena, size); }

static struct jinja_expr *expr_new(struct jinja_parser *p, enum jinja_expr_kind kind,
                                   struct jinja_expr *base)
{
    struct jinja_expr *e = jinja_new(p, sizeof *e);
    e->kind = kind;
    e->line = p->at->line;
    e->base = base;
    return e;
}

enum status jinja_expected(struct jinja_parser *p, const char *what)
{
    struct str found = p->at->text;
    if (p->at->kind == TOK_NAME || p->at->kind == TOK_INT || p->at->kind == TOK_FLOAT)
        return err_set(p->err, ERR_FORMAT, "chat template line %d: expected %s, found '%.*s'",
                       p->at->line, what, (int)(found.n < 40 ? found.n : 40), found.p);
    return err_set(p->err, ERR_FORMAT, "chat template line %d: expected %s, found %s", p->at->line,
                   what, jinja_tok_name(p->at->kind));
}

enum status jinja_deeper(struct jinja_parser *p)
{
    if (++p->depth > JINJA_DEPTH_MAX)
        return err_set(p->err, ERR_TOO_LONG, "chat template line %d: nested more than %d levels",
                       p->at->line, JINJA_DEPTH_MAX);
    return OK;
}

bool jinja_at_name(const struct jinja_parser *p, const char *name)
{
    return p->at->kind == TOK_NAME && str_eq_c(p->at->text, name);
}

bool jinja_skip(struct jinja_parser *p, enum jinja_tok kind)
{
    if (p->at->kind != kind) return false;
    p->at++; /* never past TOK_EOF: no caller skips it */
    return true;
}

bool jinja_skip_name(struct jinja_parser *p, const char *name)
{
    return jinja_at_name(p, name) && jinja_skip(p, TOK_NAME);
}

enum status jinja_expect(struct jinja_parser *p, enum jinja_tok kind)
{
    return jinja_skip(p, kind) ? OK : jinja_expected(p, jinja_tok_name(kind));
}

static struct jinja_term *expr_add(struct jinja_parser *p, struct jinja_expr *e,
                                   struct jinja_term **last, enum jinja_tok op)
{
    struct jinja_term *t = jinja_new(p, sizeof *t);
    t->op = op;
    if (*last) (*last)->next = t;
    else e->terms = t;
    *last = t;
    e->n_terms++;
    return t;
}

/* ---- literals and names ---- */

static enum status parse_string(struct jinja_parser *p, struct jinja_expr **out)
{
    struct jinja_expr *e = *out = expr_new(p, JX_CONST, NULL);
    struct str s = p->at->text;
    p->at++;
    if (p->at->kind == TOK_STRING) {
        struct buf b = { 0 };
        buf_add_str(&b, s);
        for (; p->at->kind == TOK_STRING; p->at++) buf_add_str(&b, p->at->text);
        s = (struct str){ arena_strndup(&p->t->arena, b.data, b.len), b.len };
        buf_release(&b);
    }
    e->value = jv_str(s);
    return OK;
}

static enum status parse_name(struct jinja_parser *p, struct jinja_expr **out)
{
    static const struct {
        const char *name;
        enum jv_kind kind;
        bool b;
    } words[] = { { "true", JV_BOOL, true },   { "True", JV_BOOL, true },
                  { "false", JV_BOOL, false }, { "False", JV_BOOL, false },
                  { "none", JV_NONE, false },  { "None", JV_NONE, false } };
    struct jinja_expr *e = *out = expr_new(p, JX_NAME, NULL);
    e->name = p->at->text;
    for (size_t i = 0; i < COUNT_OF(words); i++) {
        if (!str_eq_c(e->name, words[i].name)) continue;
        e->kind = JX_CONST;
        e->value = words[i].kind == JV_NONE ? jv_none() : jv_bool(words[i].b);
    }
    p->at++;
    return OK;
}

static enum status parse_list(struct jinja_parser *p, struct jinja_expr **out)
{
    struct jinja_expr *e = *out = expr_new(p, JX_LIST, NULL);
    struct jinja_term *last = NULL;
    p->at++;
    while (p->at->kind != TOK_RBRACKET) {
        if (last) TRY(jinja_expect(p, TOK_COMMA));
        if (p->at->kind == TOK_RBRACKET) break;
        TRY(jinja_parse_expr(p, true, &expr_add(p, e, &last, TOK_COMMA)->expr));
    }
    return jinja_expect(p, TOK_RBRACKET);
}

static enum status parse_dict(struct jinja_parser *p, struct jinja_expr **out)
{
    struct jinja_expr *e = *out = expr_new(p, JX_DICT, NULL);
    struct jinja_term *last = NULL;
    p->at++;
    while (p->at->kind != TOK_RBRACE) {
        if (last) TRY(jinja_expect(p, TOK_COMMA));
        if (p->at->kind == TOK_RBRACE) break;
        struct jinja_term *t = expr_add(p, e, &last, TOK_COLON);
        TRY(jinja_parse_expr(p, true, &t->key));
        TRY(jinja_expect(p, TOK_COLON));
        TRY(jinja_parse_expr(p, true, &t->expr));
    }
    return jinja_expect(p, TOK_RBRACE);
}

static enum status parse_parens(struct jinja_parser *p, struct jinja_expr **out)
{
    p->at++;
    if (p->at->kind == TOK_RPAREN) *out = expr_new(p, JX_TUPLE, NULL);
    else TRY(jinja_parse_tuple(p, true, out));
    return jinja_expect(p, TOK_RPAREN);
}

static enum status parse_primary(struct jinja_parser *p, struct jinja_expr **out)
{
    switch (p->at->kind) {
    case TOK_NAME: return parse_name(p, out);
    case TOK_STRING: return parse_string(p, out);
    case TOK_LPAREN: return parse_parens(p, out);
    case TOK_LBRACKET: return parse_list(p, out);
    case TOK_LBRACE: return parse_dict(p, out);
    case TOK_INT:
    case TOK_FLOAT:
        *out = expr_new(p, JX_CONST, NULL);
        (*out)->value = p->at->value;
        p->at++;
        return OK;
    default: return jinja_expected(p, "an expression");
    }
}

/* ---- links: attributes, indices, calls, filters, tests ---- */

static enum status parse_args(struct jinja_parser *p, struct jinja_args *args)
{
    struct jinja_arg **tail = &args->first;
    TRY(jinja_expect(p, TOK_LPAREN));
    while (p->at->kind != TOK_RPAREN) {
        if (args->first) TRY(jinja_expect(p, TOK_COMMA));
        if (p->at->kind == TOK_RPAREN) break;
        if (p->at->kind == TOK_MUL || p->at->kind == TOK_POW)
            return err_set(p->err, ERR_UNSUPPORTED,
                           "chat template line %d: calls with *args or **kwargs are not supported",
                           p->at->line);
        struct jinja_arg *a = *tail = jinja_new(p, sizeof *a);
        tail = &a->next;
        if (p->at->kind == TOK_NAME && p->at[1].kind == TOK_ASSIGN) {
            a->name = p->at->text;
            p->at += 2;
            args->n_named++;
        } else if (args->n_named) {
            return jinja_expected(p, "a named argument");
        } else {
            args->n_pos++;
        }
        TRY(jinja_parse_expr(p, true, &a->expr));
    }
    return jinja_expect(p, TOK_RPAREN);
}

/* "a", "a:b", "a:b:c" with every part optional; a comma makes a tuple index. */
static enum status parse_index(struct jinja_parser *p, struct jinja_link *link)
{
    link->kind = JINJA_LINK_ITEM;
    int i = 0;
    for (; i < 3; i++) {
        enum jinja_tok k = p->at->kind;
        if (k != TOK_COLON && k != TOK_RBRACKET) {
            if (i == 0) TRY(jinja_parse_tuple(p, true, &link->arg[i]));
            else TRY(jinja_parse_expr(p, true, &link->arg[i]));
        }
        if (!jinja_skip(p, TOK_COLON)) break;
        link->kind = JINJA_LINK_SLICE;
    }
    if (link->kind == JINJA_LINK_ITEM && !link->arg[0]) return jinja_expected(p, "an index");
    return jinja_expect(p, TOK_RBRACKET);
}

static struct jinja_link *link_new(struct jinja_parser *p, enum jinja_link_kind kind)
{
    struct jinja_link *l = jinja_new(p, sizeof *l);
    l->kind = kind;
    l->line = p->at->line;
    return l;
}

/* Parses a dotted name, as filters and tests may have. */
static enum status parse_dotted(struct jinja_parser *p, struct str *name)
{
    *name = p->at->text;
    TRY(jinja_expect(p, TOK_NAME));
    if (p->at->kind == TOK_DOT) return jinja_expected(p, "the end of the filter or test");
    return OK;
}

static enum status parse_filter(struct jinja_parser *p, struct jinja_link **out)
{
    struct jinja_link *l = *out = link_new(p, JINJA_LINK_FILTER);
    TRY(parse_dotted(p, &l->name));
    l->fn = jinja_filter_find(l->name);
    if (!l->fn)
        return err_set(p->err, ERR_UNSUPPORTED,
                       "chat template line %d: the filter '%.*s' is not supported", l->line,
                       STR_ARG(l->name));
    return p->at->kind == TOK_LPAREN ? parse_args(p, &l->args) : OK;
}

enum status jinja_parse_filters(struct jinja_parser *p, struct jinja_link **out)
{
    struct jinja_link **tail = out;
    jinja_skip(p, TOK_PIPE);
    do {
        TRY(parse_filter(p, tail));
        tail = &(*tail)->next;
    } while (jinja_skip(p, TOK_PIPE));
    return OK;
}

static enum status parse_links(struct jinja_parser *p, bool filters, struct jinja_expr **e);

/* Does a test's single argument without parentheses start here? */
static bool at_test_arg(const struct jinja_parser *p)
{
    static const char *const not_args[] = { "else", "or", "and", "if",
                                            "is",   "in", "not", "recursive" };
    switch (p->at->kind) {
    case TOK_STRING:
    case TOK_INT:
    case TOK_FLOAT:
    case TOK_LPAREN:
    case TOK_LBRACKET:
    case TOK_LBRACE: return true;
    case TOK_NAME:
        for (size_t i = 0; i < COUNT_OF(not_args); i++)
            if (jinja_at_name(p, not_args[i])) return false;
        return true;
    default: return false;
    }
}

static enum status parse_test(struct jinja_parser *p, struct jinja_link **out)
{
    struct jinja_link *l = *out = link_new(p, JINJA_LINK_TEST);
    l->negated = jinja_skip_name(p, "not");
    TRY(parse_dotted(p, &l->name));
    l->fn = jinja_test_find(l->name);
    if (!l->fn)
        return err_set(p->err, ERR_UNSUPPORTED,
                       "chat template line %d: the test '%.*s' is not supported", l->line,
                       STR_ARG(l->name));
    if (str_eq_c(l->name, "string")) p->t->tests_string = true;
    if (p->at->kind == TOK_LPAREN) return parse_args(p, &l->args);
    if (!at_test_arg(p)) return OK;
    l->args.n_pos = 1;
    l->args.first = jinja_new(p, sizeof *l->args.first);
    TRY(jinja_deeper(p));
    TRY(parse_primary(p, &l->args.first->expr));
    TRY(parse_links(p, false, &l->args.first->expr));
    p->depth--;
    return OK;
}

static enum status parse_attr(struct jinja_parser *p, struct jinja_link **out)
{
    struct jinja_link *l = *out = link_new(p, JINJA_LINK_ATTR);
    l->name = p->at->text;
    if (p->at->kind == TOK_INT) {
        l->kind = JINJA_LINK_ITEM;
        l->arg[0] = expr_new(p, JX_CONST, NULL);
        l->arg[0]->value = p->at->value;
        p->at++;
        return OK;
    }
    return jinja_expect(p, TOK_NAME);
}

static bool is_content_link(const struct jinja_link *l)
{
    if (l->kind == JINJA_LINK_ATTR) return str_eq_c(l->name, "content");
    return l->kind == JINJA_LINK_ITEM && l->arg[0]->kind == JX_CONST &&
           l->arg[0]->value.kind == JV_STRING && str_eq_c(l->arg[0]->value.s, "content");
}

/* Wraps *e with the links that follow it. No attribute or index may follow a filter or test. */
static enum status parse_links(struct jinja_parser *p, bool filters, struct jinja_expr **e)
{
    struct jinja_link *first = NULL, **tail = &first, *last = NULL;
    bool plain = true;
    for (;; last = *tail, tail = &(*tail)->next) {
        if (plain && jinja_skip(p, TOK_DOT)) {
            TRY(parse_attr(p, tail));
        } else if (plain && p->at->kind == TOK_LBRACKET) {
            *tail = link_new(p, JINJA_LINK_ITEM);
            p->at++;
            TRY(parse_index(p, *tail));
        } else if (p->at->kind == TOK_LPAREN) {
            *tail = link_new(p, JINJA_LINK_CALL);
            TRY(parse_args(p, &(*tail)->args));
        } else if (filters && jinja_skip(p, TOK_PIPE)) {
            plain = false;
            TRY(parse_filter(p, tail));
        } else if (filters && jinja_skip_name(p, "is")) {
            plain = false;
            TRY(parse_test(p, tail));
            if (str_eq_c((*tail)->name, "none") &&
                (last ? is_content_link(last) : jinja_is_content(*e)))
                p->t->tests_none = true;
        } else {
            break;
        }
    }
    if (!first) return OK;
    struct jinja_expr *base = *e;
    *e = expr_new(p, JX_CHAIN, base);
    (*e)->line = first->line;
    (*e)->links = first;
    return OK;
}

/* ---- operators ---- */

static enum status parse_unary(struct jinja_parser *p, bool filters, struct jinja_expr **out)
{
    if (p->at->kind == TOK_SUB || p->at->kind == TOK_ADD) {
        TRY(jinja_deeper(p));
        *out = expr_new(p, p->at->kind == TOK_SUB ? JX_NEG : JX_POS, NULL);
        p->at++;
        TRY(parse_unary(p, false, &(*out)->base));
        p->depth--;
    } else {
        TRY(parse_primary(p, out));
    }
    return parse_links(p, filters, out);
}

/* Is `op` a left-associative binary operator of this level? The last level binds tightest. */
static bool level_has(int level, enum jinja_tok op)
{
    switch (level) {
    case 0: return op == TOK_ADD || op == TOK_SUB;
    case 1: return op == TOK_TILDE;
    case 2: return op == TOK_MUL || op == TOK_DIV || op == TOK_FLOORDIV || op == TOK_MOD;
    default: return op == TOK_POW;
    }
}

static enum status parse_binary(struct jinja_parser *p, int level, struct jinja_expr **out)
{
    if (level == 4) return parse_unary(p, true, out);
    TRY(parse_binary(p, level + 1, out));
    struct jinja_expr *e = NULL;
    struct jinja_term *last = NULL;
    while (level_has(level, p->at->kind)) {
        if (!e) e = expr_new(p, level == 1 ? JX_CONCAT : JX_ARITH, *out);
        struct jinja_term *t = expr_add(p, e, &last, p->at->kind);
        p->at++;
        TRY(parse_binary(p, level + 1, &t->expr));
    }
    if (e) *out = e;
    return OK;
}

static bool skip_comparison(struct jinja_parser *p, enum jinja_tok *op)
{
    *op = p->at->kind;
    if (*op >= TOK_EQ && *op <= TOK_GE) return jinja_skip(p, *op);
    *op = TOK_IN;
    if (jinja_skip_name(p, "in")) return true;
    *op = TOK_NOT_IN;
    if (!jinja_at_name(p, "not") || p->at[1].kind != TOK_NAME || !str_eq_c(p->at[1].text, "in"))
        return false;
    p->at += 2;
    return true;
}

static enum status parse_compare(struct jinja_parser *p, struct jinja_expr **out)
{
    TRY(parse_binary(p, 0, out));
    struct jinja_expr *e = NULL;
    struct jinja_term *last = NULL;
    for (enum jinja_tok op; skip_comparison(p, &op);) {
        if (!e) e = expr_new(p, JX_COMPARE, *out);
        TRY(parse_binary(p, 0, &expr_add(p, e, &last, op)->expr));
    }
    if (e) *out = e;
    return OK;
}

/* Repeated `not`s are reduced to one or two, so they do not nest. */
static enum status parse_not(struct jinja_parser *p, struct jinja_expr **out)
{
    int n = 0;
    while (jinja_skip_name(p, "not")) n++;
    TRY(parse_compare(p, out));
    for (int i = n > 2 ? 2 - n % 2 : n; i > 0; i--) *out = expr_new(p, JX_NOT, *out);
    return OK;
}

static enum status parse_logic(struct jinja_parser *p, bool is_or, struct jinja_expr **out)
{
    TRY(is_or ? parse_logic(p, false, out) : parse_not(p, out));
    struct jinja_expr *e = NULL;
    struct jinja_term *last = NULL;
    while (jinja_skip_name(p, is_or ? "or" : "and")) {
        if (!e) e = expr_new(p, is_or ? JX_OR : JX_AND, *out);
        struct jinja_expr **to = &expr_add(p, e, &last, TOK_NAME)->expr;
        TRY(is_or ? parse_logic(p, false, to) : parse_not(p, to));
    }
    if (e) *out = e;
    return OK;
}

enum status jinja_parse_expr(struct jinja_parser *p, bool ternary, struct jinja_expr **out)
{
    TRY(jinja_deeper(p));
    TRY(parse_logic(p, true, out));
    for (int n = 0; ternary && jinja_skip_name(p, "if"); n++) {
        if (n == JINJA_DEPTH_MAX) return jinja_expected(p, "fewer conditions in one expression");
        struct jinja_expr *e = expr_new(p, JX_COND, *out);
        struct jinja_term *last = NULL;
        TRY(parse_logic(p, true, &expr_add(p, e, &last, TOK_NAME)->expr));
        if (jinja_skip_name(p, "else"))
            TRY(jinja_parse_expr(p, true, &expr_add(p, e, &last, TOK_NAME)->expr));
        *out = e;
    }
    p->depth--;
    return OK;
}

/* Does an unparenthesised tuple end here, after a comma? */
static bool at_tuple_end(const struct jinja_parser *p)
{
    switch (p->at->kind) {
    case TOK_VAR_END:
    case TOK_BLOCK_END:
    case TOK_RPAREN:
    case TOK_RBRACKET:
    case TOK_EOF: return true;
    default: return jinja_at_name(p, "recursive") || jinja_at_name(p, "if");
    }
}

enum status jinja_parse_tuple(struct jinja_parser *p, bool ternary, struct jinja_expr **out)
{
    TRY(jinja_parse_expr(p, ternary, out));
    if (p->at->kind != TOK_COMMA) return OK;
    struct jinja_expr *e = expr_new(p, JX_TUPLE, NULL), *first = *out;
    struct jinja_term *last = NULL;
    expr_add(p, e, &last, TOK_COMMA)->expr = first;
    while (jinja_skip(p, TOK_COMMA) && !at_tuple_end(p))
        TRY(jinja_parse_expr(p, ternary, &expr_add(p, e, &last, TOK_COMMA)->expr));
    *out = e;
    return OK;
}

bool jinja_is_content(const struct jinja_expr *e)
{
    if (e->kind == JX_NAME) return str_eq_c(e->name, "content");
    if (e->kind != JX_CHAIN) return false;
    const struct jinja_link *l = e->links;
    while (l->next) l = l->next;
    return is_content_link(l);
}
