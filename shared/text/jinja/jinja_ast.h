/* jinja_ast.h - tokens and the syntax tree of a template (internal to shared/text/jinja).
 *
 * Everything lives in the arena of struct jinja and is read-only after jinja_parse. Operators at
 * one level of precedence form a list, not nested nodes: the tree is as deep as the source is
 * nested, which the parser bounds by JINJA_DEPTH_MAX.
 * Thread: parse on one, read on any. */
#ifndef BATON_TEXT_JINJA_JINJA_AST_H
#define BATON_TEXT_JINJA_JINJA_AST_H

#include "shared/text/jinja/jinja_value.h"

enum jinja_tok {
    TOK_EOF,
    TOK_DATA,
    TOK_VAR_BEGIN,
    TOK_VAR_END,
    TOK_BLOCK_BEGIN,
    TOK_BLOCK_END,
    TOK_NAME,
    TOK_STRING,
    TOK_INT,
    TOK_FLOAT,
    TOK_ADD,
    TOK_SUB,
    TOK_MUL,
    TOK_DIV,
    TOK_FLOORDIV,
    TOK_MOD,
    TOK_POW,
    TOK_TILDE,
    TOK_EQ,
    TOK_NE,
    TOK_LT,
    TOK_LE,
    TOK_GT,
    TOK_GE,
    TOK_IN,
    TOK_NOT_IN,
    TOK_LPAREN,
    TOK_RPAREN,
    TOK_LBRACKET,
    TOK_RBRACKET,
    TOK_LBRACE,
    TOK_RBRACE,
    TOK_COMMA,
    TOK_COLON,
    TOK_DOT,
    TOK_PIPE,
    TOK_ASSIGN
};

struct jinja_token {
    enum jinja_tok kind;
    int line;
    struct str text; /* names and operators as written; strings decoded */
    struct jv value; /* numbers */
};

/* Cuts normalised source into tokens, ending with TOK_EOF; white space control is applied. The
 * caller frees *tokens (mem_free). */
enum status jinja_lex(struct str source, struct arena *arena, struct jinja_token **tokens,
                      struct err *err) MUST_CHECK;
const char *jinja_tok_name(enum jinja_tok kind);

enum jinja_expr_kind {
    JX_CONST,
    JX_NAME,
    JX_LIST,
    JX_TUPLE,
    JX_DICT,  /* terms have key and expr */
    JX_CHAIN, /* base, then links */
    JX_NEG,
    JX_POS,
    JX_NOT, /* base */
    JX_ARITH,
    JX_CONCAT,
    JX_COMPARE,
    JX_AND,
    JX_OR,  /* base, then terms with their operators */
    JX_COND /* base if terms[0] else terms[1], which may be absent */
};

struct jinja_term {
    enum jinja_tok op;
    struct jinja_expr *key, *expr;
    struct jinja_term *next;
};

struct jinja_arg {
    struct str name; /* p is NULL: positional */
    struct jinja_expr *expr;
    struct jinja_arg *next;
};

struct jinja_args {
    struct jinja_arg *first;
    size_t n_pos, n_named;
};

enum jinja_link_kind {
    JINJA_LINK_ATTR,
    JINJA_LINK_ITEM,
    JINJA_LINK_SLICE,
    JINJA_LINK_CALL,
    JINJA_LINK_FILTER,
    JINJA_LINK_TEST
};

struct jinja_link {
    enum jinja_link_kind kind;
    int line;
    bool negated;              /* is not */
    struct str name;           /* of the attribute, filter or test */
    struct jinja_expr *arg[3]; /* the index, or the bounds of a slice */
    struct jinja_args args;
    const struct jinja_fn *fn;
    struct jinja_link *next;
};

struct jinja_expr {
    enum jinja_expr_kind kind;
    int line;
    struct jv value;
    struct str name;
    struct jinja_expr *base;
    struct jinja_term *terms;
    size_t n_terms;
    struct jinja_link *links;
};

/* Target of `for` and `set`. */
struct jinja_target {
    struct str name, attr;      /* attr.p NULL: a plain name */
    struct jinja_target *parts; /* not NULL: a tuple */
    size_t n_parts;
    struct jinja_target *next;
};

enum jinja_stmt_kind {
    JS_TEXT,
    JS_PRINT,
    JS_IF,
    JS_FOR,
    JS_SET,
    JS_SET_BLOCK,
    JS_MACRO,
    JS_SCOPE,
    JS_BREAK,
    JS_CONTINUE
};

struct jinja_stmt {
    enum jinja_stmt_kind kind;
    int line;
    struct str text;            /* JS_TEXT; name of a JS_MACRO */
    struct jinja_expr *expr;    /* printed, assigned or iterated; the condition of JS_IF */
    struct jinja_expr *test;    /* for ... if test */
    struct jinja_link *filters; /* JS_SET_BLOCK */
    struct jinja_target *target;
    struct jinja_arg *params; /* JS_MACRO: name and default */
    /* else_ of JS_IF: another JS_IF, with expr NULL for a plain else; of JS_FOR: a body. */
    struct jinja_stmt *body, *else_;
    struct jinja_stmt *next;
};

struct jinja {
    struct arena arena;
    struct jinja_stmt *body;
    bool reads_parts;  /* loops over the parts of a message's content */
    bool tests_string; /* uses "is string" somewhere */
    bool tests_none;   /* tests whether a message's content is none */
};

/* The parser's state: jinja_parse.c parses statements, jinja_expr.c expressions. */
struct jinja_parser {
    struct jinja *t;
    const struct jinja_token *at;
    int depth, loops;
    struct err *err;
};

void *jinja_new(struct jinja_parser *p, size_t size);
/* ERR_FORMAT "line N: expected WHAT, found TOKEN". */
enum status jinja_expected(struct jinja_parser *p, const char *what) MUST_CHECK;
/* Counts one more level of nesting; ERR_TOO_LONG beyond JINJA_DEPTH_MAX. */
enum status jinja_deeper(struct jinja_parser *p) MUST_CHECK;
/* Is the current token this name? jinja_skip*: if it is the one named, step over it. */
bool jinja_at_name(const struct jinja_parser *p, const char *name);
bool jinja_skip(struct jinja_parser *p, enum jinja_tok kind);
bool jinja_skip_name(struct jinja_parser *p, const char *name);
enum status jinja_expect(struct jinja_parser *p, enum jinja_tok kind) MUST_CHECK;
enum status jinja_parse_expr(struct jinja_parser *p, bool ternary,
                             struct jinja_expr **out) MUST_CHECK;
/* Parses expressions separated by commas; more than one, or a trailing comma, make a tuple. */
enum status jinja_parse_tuple(struct jinja_parser *p, bool ternary,
                              struct jinja_expr **out) MUST_CHECK;
/* Parses one or more "| name(args)"; the first '|' may have been read already. */
enum status jinja_parse_filters(struct jinja_parser *p, struct jinja_link **out) MUST_CHECK;
/* Is this a message's content: x.content, x['content'] or a variable named content? */
bool jinja_is_content(const struct jinja_expr *e);

#endif
