/* jinja_value.h - the values of the template language and the state of one rendering (internal to
 * shared/text/jinja_*).
 *
 * Values are small structs passed by copy; what they point to lives in the arena of the rendering
 * (or of the template, or in the caller's JSON) and dies with it. Semantics are Python's: strings
 * are sequences of code points, dicts keep the order of insertion, lists are shared by reference.
 * All memory and all work is counted: see jinja_run_alloc and jinja_run_spend. Thread: the one that
 * renders. */
#ifndef BATON_TEXT_JINJA_JINJA_VALUE_H
#define BATON_TEXT_JINJA_JINJA_VALUE_H

#include "shared/base/mem.h"
#include "shared/text/jinja/jinja.h"

/* One rendering may hold this much, intermediate strings included (they are not reused before the
 * end). */
enum { JINJA_MEMORY_MAX = 256 << 20, JINJA_PARAMS_MAX = 4 };

enum jv_kind {
    JV_UNDEFINED,
    JV_NONE,
    JV_BOOL,
    JV_INT,
    JV_FLOAT,
    JV_STRING,
    JV_LIST,
    JV_DICT,
    JV_NAMESPACE,
    JV_LOOP,
    JV_MACRO,
    JV_FUNC,
    JV_METHOD
};
/* What Python type a list stands for: it decides equality, truth and how it prints. */
enum jv_form {
    JV_FORM_LIST,
    JV_FORM_TUPLE,
    JV_FORM_ITERATOR,
    JV_FORM_ITEMS,
    JV_FORM_KEYS,
    JV_FORM_VALUES
};

struct jv {
    enum jv_kind kind;
    union {
        bool b;
        int64_t i;
        double f;
        struct str s; /* JV_STRING; for JV_UNDEFINED the name that was looked up */
        struct jv_list *list;
        struct jv_dict *dict; /* JV_DICT, JV_NAMESPACE */
        struct jinja_loop *loop;
        struct jinja_macro *macro;
        const struct jinja_fn *fn;
        struct jinja_method *method;
    };
};

struct jv_list {
    struct jv *items;
    size_t len, cap;
    enum jv_form form;
};

struct jv_pair {
    struct jv key, value;
};

struct jv_dict {
    struct jv_pair *pairs;
    size_t len, cap;
};

struct jinja_method {
    struct jv self;
    const struct jinja_fn *fn;
};

/* The `loop` variable. */
struct jinja_loop {
    const struct jv *items;
    size_t n, i;
    struct jv changed; /* last argument of loop.changed */
};

enum jinja_flow { JINJA_FLOW_NORMAL, JINJA_FLOW_BREAK, JINJA_FLOW_CONTINUE };

/* One rendering. */
struct jinja_run {
    struct arena arena;
    struct buf *out; /* where output goes now: the caller's, or that of a macro or a block
                      * being captured */
    size_t written;  /* bytes written to all of these */
    uint64_t steps;
    int depth; /* nested evaluations */
    int calls; /* nested macro calls */
    int line;
    enum jinja_flow flow;
    int64_t now;
    struct err *err;
};

/* A call of a filter, test, method or function. Named and positional arguments are bound to the
 * parameters of the function's table row; a NULL `arg` was not given. Rows without parameter names
 * read `pos` and `named` themselves. */
struct jinja_call {
    struct jinja_run *run;
    const char *name;
    struct jv self;
    const struct jv *pos, *named;
    size_t n_pos, n_named;
    const struct str *names;
    const struct jv *arg[JINJA_PARAMS_MAX];
};

typedef enum status jinja_call_fn(const struct jinja_call *c, struct jv *out);

struct jinja_fn {
    const char *name;
    jinja_call_fn *call;
    int n_min; /* arguments that must be given */
    bool open; /* takes any arguments */
    const char *params[JINJA_PARAMS_MAX];
};

/* Make values. */
static inline struct jv jv_undefined(struct str name)
{
    return (struct jv){ .kind = JV_UNDEFINED, .s = name };
}
static inline struct jv jv_none(void) { return (struct jv){ .kind = JV_NONE }; }
static inline struct jv jv_bool(bool b) { return (struct jv){ .kind = JV_BOOL, .b = b }; }
static inline struct jv jv_int(int64_t i) { return (struct jv){ .kind = JV_INT, .i = i }; }
static inline struct jv jv_float(double f) { return (struct jv){ .kind = JV_FLOAT, .f = f }; }
static inline struct jv jv_str(struct str s) { return (struct jv){ .kind = JV_STRING, .s = s }; }
static inline bool jv_is_number(const struct jv *v)
{
    return v->kind == JV_BOOL || v->kind == JV_INT || v->kind == JV_FLOAT;
}
static inline bool jv_is_whole(const struct jv *v)
{
    return v->kind == JV_BOOL || v->kind == JV_INT;
}
static inline int64_t jv_whole(const struct jv *v) { return v->kind == JV_BOOL ? v->b : v->i; }
static inline double jv_number(const struct jv *v)
{
    return v->kind == JV_FLOAT ? v->f : (double)jv_whole(v);
}

/* jinja_value.c: limits, containers, comparison. */
enum status jinja_fail(struct jinja_run *run, enum status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Count n units of work that the steps of the template do not show (bytes compared or copied are
 * 1/64 each). */
static inline void jinja_run_spend(struct jinja_run *run, size_t n) { run->steps += n; }
enum status jinja_run_step(struct jinja_run *run) MUST_CHECK;
/* one level deeper; pair with jinja_run_leave */
enum status jinja_run_enter(struct jinja_run *run) MUST_CHECK;
void jinja_run_leave(struct jinja_run *run);
enum status jinja_run_alloc(struct jinja_run *run, size_t n, size_t size, void *out) MUST_CHECK;
enum status jinja_run_write(struct jinja_run *run, struct str s) MUST_CHECK;
/* Copy into the arena. jv_take also releases the buffer, whatever happens. */
enum status jv_copy(struct jinja_run *run, struct str s, struct jv *out) MUST_CHECK;
enum status jv_take(struct jinja_run *run, struct buf *b, struct jv *out) MUST_CHECK;
enum status jv_concat(struct jinja_run *run, struct str a, struct str b, struct jv *out) MUST_CHECK;
enum status jv_list_new(struct jinja_run *run, enum jv_form form, size_t cap,
                        struct jv *out) MUST_CHECK;
enum status jv_list_push(struct jinja_run *run, struct jv_list *l, struct jv v) MUST_CHECK;
/* a tuple */
enum status jv_pair_new(struct jinja_run *run, struct jv a, struct jv b, struct jv *out) MUST_CHECK;
enum status jv_dict_new(struct jinja_run *run, enum jv_kind kind, size_t cap,
                        struct jv *out) MUST_CHECK;
enum status jv_dict_put(struct jinja_run *run, struct jv_dict *d, struct jv key,
                        struct jv value) MUST_CHECK;
enum status jv_dict_find(struct jinja_run *run, const struct jv_dict *d, const struct jv *key,
                         struct jv **out) MUST_CHECK;
struct jv *jv_dict_get(struct jinja_run *run, const struct jv_dict *d, struct str key);
enum status jv_of_json(struct jinja_run *run, const cJSON *j, bool copy, struct jv *out) MUST_CHECK;
bool jv_truth(const struct jv *v);
const char *jv_type_name(const struct jv *v);
enum status jv_equal(struct jinja_run *run, const struct jv *a, const struct jv *b,
                     bool *out) MUST_CHECK;
/* *out is -1, 0, 1, or 2 where a NaN makes them unordered; types that have no order are an
 * error. */
enum status jv_compare(struct jinja_run *run, const struct jv *a, const struct jv *b,
                       int *out) MUST_CHECK;
/* Fails for what Python cannot hash: lists and dicts, alone or in a tuple. */
enum status jv_check_hashable(struct jinja_run *run, const struct jv *v) MUST_CHECK;
bool jv_is_iterator(const struct jv *v); /* a lazy sequence: it is used up by what goes
                                          * through it, and has no length */
enum status jv_contains(struct jinja_run *run, const struct jv *container, const struct jv *item,
                        bool *out) MUST_CHECK;
/* The elements that a for loop over `v` sees; an iterator is empty afterwards. */
enum status jv_elements(struct jinja_run *run, const struct jv *v, const struct jv **items,
                        size_t *n) MUST_CHECK;

/* jinja_print.c: values as text. */
/* Python's str() */
enum status jv_print(struct jinja_run *run, const struct jv *v, struct buf *b) MUST_CHECK;
/* the same, in the arena */
enum status jv_text(struct jinja_run *run, const struct jv *v, struct str *out) MUST_CHECK;
void jv_print_float(double f, struct buf *b);

/* jinja_string.c: strings as sequences of code points. */
/* bytes; an invalid byte counts as one U+FFFD */
size_t jinja_utf8_next(struct str s, size_t at, int32_t *cp);
size_t jinja_utf8_prev(struct str s, size_t end, int32_t *cp);
size_t jinja_utf8_len(struct str s);
size_t jinja_utf8_offset(struct str s, size_t index); /* byte offset of the code point; s.n
                                                       * past the end */
bool jinja_is_space(int32_t cp);
/* Take a line off *rest; *n_end is the length of its end, of any kind Python knows (\n, \r\n,
 * U+2028, ...); false at the end. */
bool jinja_next_line(struct str *rest, struct str *line, size_t *n_end);
/* chars NULL: white space */
struct str jinja_strip(struct str s, const struct str *chars, bool left, bool right);
enum status jv_replace(struct jinja_run *run, struct str s, struct str from, struct str to,
                       int64_t count, struct jv *out) MUST_CHECK;
enum jinja_case { JINJA_LOWER, JINJA_UPPER, JINJA_CAPITALIZE, JINJA_TITLE, JINJA_TITLE_FILTER };
enum status jv_recase(struct jinja_run *run, struct str s, enum jinja_case to,
                      struct jv *out) MUST_CHECK;
enum status jv_join(struct jinja_run *run, struct str glue, const struct jv *items, size_t n,
                    bool strings_only, struct jv *out) MUST_CHECK;
/* Python's v[start:stop:step] for strings and lists; absent bounds are NULL. */
enum status jv_slice(struct jinja_run *run, const struct jv *v, const struct jv *const bound[3],
                     struct jv *out) MUST_CHECK;

/* jinja_attr.c: members, methods and functions. */
enum status jv_attr(struct jinja_run *run, const struct jv *v, struct str name,
                    struct jv *out) MUST_CHECK;
enum status jv_item(struct jinja_run *run, const struct jv *v, const struct jv *key,
                    struct jv *out) MUST_CHECK;
/* binds, then calls */
enum status jinja_invoke(struct jinja_call *c, const struct jinja_fn *fn,
                         struct jv *out) MUST_CHECK;
const struct jinja_fn *jinja_fn_find(const struct jinja_fn *table, size_t n, struct str name);
enum status jinja_bad_arg(const struct jinja_call *c, const char *want,
                          const struct jv *got) MUST_CHECK;

/* The tables: filters and tests by name, methods of strings, of lists and dicts, and the global
 * functions. */
const struct jinja_fn *jinja_filter_find(struct str name);
const struct jinja_fn *jinja_filter_sequence_find(struct str name);
const struct jinja_fn *jinja_test_find(struct str name);
const struct jinja_fn *jinja_string_method_find(struct str name);
const struct jinja_fn *jinja_global_find(struct str name);
enum status jinja_tojson(const struct jinja_call *c, struct jv *out) MUST_CHECK;

#endif
