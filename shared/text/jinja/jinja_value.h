/* jinja_value.h - the values of the template language and the state of one rendering (internal to
 * shared/text/jinja).
 *
 * Values are small structs passed by copy. Their data lives in the arena of the rendering, in the
 * template's arena or in the caller's JSON. Semantics are Python's: strings are sequences of code
 * points, dicts keep the order of insertion, lists are shared by reference.
 * All memory and all work is counted: see jinja_run_alloc and jinja_run_spend.
 * Thread: the one that renders. */
#ifndef BATON_TEXT_JINJA_JINJA_VALUE_H
#define BATON_TEXT_JINJA_JINJA_VALUE_H

#include "shared/base/mem.h"
#include "shared/text/jinja/jinja.h"

enum {
    JINJA_MEMORY_MAX = 256 << 20, /* of one rendering; nothing is freed before its end */
    JINJA_PARAMS_MAX = 4
};

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

/* The Python type that a list stands for: it decides equality, truth and printing. */
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
        struct str s; /* JV_STRING; JV_UNDEFINED: the name that was looked up */
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

/* The `loop` variable: item i of n is being visited. */
struct jinja_loop {
    const struct jv *items;
    size_t n, i;
    struct jv changed; /* argument of the last call of loop.changed */
};

enum jinja_flow { JINJA_FLOW_NORMAL, JINJA_FLOW_BREAK, JINJA_FLOW_CONTINUE };

/* One rendering. */
struct jinja_run {
    struct arena arena;
    struct buf *out; /* current output: the caller's, a macro's or a captured block's */
    size_t written;  /* bytes written to all of these */
    uint64_t steps;
    int depth; /* nested evaluations */
    int calls; /* nested macro calls */
    int line;
    enum jinja_flow flow;
    int64_t now;
    struct err *err;
};

/* A call of a filter, test, method or function. jinja_invoke binds the arguments to the parameters
 * of fn; a NULL `arg` was not given. Functions with `open` read `pos` and `named` themselves. */
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
    int n_min; /* required arguments */
    bool open; /* takes any arguments */
    const char *params[JINJA_PARAMS_MAX];
};

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

/* ---- jinja_value.c: limits, containers, comparison ---- */

/* Sets run->err to "chat template line N: ..."; returns `code`. */
enum status jinja_fail(struct jinja_run *run, enum status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Counts n units of work beyond the template's own steps (64 bytes copied or compared are one). */
static inline void jinja_run_spend(struct jinja_run *run, size_t n) { run->steps += n; }
/* Counts one step; ERR_TOO_LONG beyond JINJA_STEPS_MAX. */
enum status jinja_run_step(struct jinja_run *run) MUST_CHECK;
/* Goes one level deeper and counts a step; pair with jinja_run_leave. */
enum status jinja_run_enter(struct jinja_run *run) MUST_CHECK;
void jinja_run_leave(struct jinja_run *run);
/* Allocates n * size bytes in the arena and stores the pointer in *out (any pointer type).
 * ERR_TOO_LONG beyond JINJA_MEMORY_MAX. */
enum status jinja_run_alloc(struct jinja_run *run, size_t n, size_t size, void *out) MUST_CHECK;
/* Appends to the current output; ERR_TOO_LONG beyond JINJA_OUTPUT_MAX. */
enum status jinja_run_write(struct jinja_run *run, struct str s) MUST_CHECK;
/* Makes a string value from a copy in the arena. jv_take also releases the buffer, even on error.
 * */
enum status jv_copy(struct jinja_run *run, struct str s, struct jv *out) MUST_CHECK;
enum status jv_take(struct jinja_run *run, struct buf *b, struct jv *out) MUST_CHECK;
enum status jv_concat(struct jinja_run *run, struct str a, struct str b, struct jv *out) MUST_CHECK;
/* `cap` is a hint; lists and dicts grow. */
enum status jv_list_new(struct jinja_run *run, enum jv_form form, size_t cap,
                        struct jv *out) MUST_CHECK;
enum status jv_list_push(struct jinja_run *run, struct jv_list *l, struct jv v) MUST_CHECK;
/* Makes the tuple (a, b). */
enum status jv_pair_new(struct jinja_run *run, struct jv a, struct jv b, struct jv *out) MUST_CHECK;
enum status jv_dict_new(struct jinja_run *run, enum jv_kind kind, size_t cap,
                        struct jv *out) MUST_CHECK;
/* Inserts or replaces; ERR_FORMAT for a key that Python cannot hash. */
enum status jv_dict_put(struct jinja_run *run, struct jv_dict *d, struct jv key,
                        struct jv value) MUST_CHECK;
/* Finds the value of `key`; *out is NULL when there is none. jv_dict_get: for a string key. */
enum status jv_dict_find(struct jinja_run *run, const struct jv_dict *d, const struct jv *key,
                         struct jv **out) MUST_CHECK;
struct jv *jv_dict_get(struct jinja_run *run, const struct jv_dict *d, struct str key);
/* Converts JSON; copy false: the strings are borrowed from `j`. */
enum status jv_of_json(struct jinja_run *run, const cJSON *j, bool copy, struct jv *out) MUST_CHECK;
bool jv_truth(const struct jv *v);
const char *jv_type_name(const struct jv *v);
enum status jv_equal(struct jinja_run *run, const struct jv *a, const struct jv *b,
                     bool *out) MUST_CHECK;
/* *out is -1, 0 or 1, or 2 when a NaN makes them unordered. ERR_FORMAT for types without order. */
enum status jv_compare(struct jinja_run *run, const struct jv *a, const struct jv *b,
                       int *out) MUST_CHECK;
/* ERR_FORMAT for what Python cannot hash: lists and dicts, alone or in a tuple. */
enum status jv_check_hashable(struct jinja_run *run, const struct jv *v) MUST_CHECK;
/* True for a lazy sequence: it has no length, and iterating uses it up. */
bool jv_is_iterator(const struct jv *v);
enum status jv_contains(struct jinja_run *run, const struct jv *container, const struct jv *item,
                        bool *out) MUST_CHECK;
/* Lists the elements that a for loop over `v` sees; an iterator is empty afterwards. */
enum status jv_elements(struct jinja_run *run, const struct jv *v, const struct jv **items,
                        size_t *n) MUST_CHECK;

/* ---- jinja_print.c: values as text ---- */

/* Appends Python's str(v); nothing when undefined. */
enum status jv_print(struct jinja_run *run, const struct jv *v, struct buf *b) MUST_CHECK;
/* Python's str(v) in the arena; a string's own text is not copied. */
enum status jv_text(struct jinja_run *run, const struct jv *v, struct str *out) MUST_CHECK;
/* The tojson filter. */
enum status jinja_tojson(const struct jinja_call *c, struct jv *out) MUST_CHECK;

/* ---- jinja_utf8.c: code points ---- */

/* Length in bytes of the code point at `at` (or ending at `end`), which goes to *cp. An invalid
 * byte is one U+FFFD. */
size_t jinja_utf8_next(struct str s, size_t at, int32_t *cp);
size_t jinja_utf8_prev(struct str s, size_t end, int32_t *cp);
/* Number of code points. */
size_t jinja_utf8_len(struct str s);
/* Byte offset of code point `index`; s.n past the end. */
size_t jinja_utf8_offset(struct str s, size_t index);
bool jinja_is_space(int32_t cp);

/* ---- jinja_string.c: strings as sequences of code points ---- */

/* Takes a line off *rest; false when *rest is empty. *n_end is the length of the line end, of any
 * kind that Python knows (\n, \r\n, U+2028, ...). */
bool jinja_next_line(struct str *rest, struct str *line, size_t *n_end);
/* Strips the code points of `chars` (NULL: white space) from the given sides. */
struct str jinja_strip(struct str s, const struct str *chars, bool left, bool right);
/* Replaces the first `count` occurrences; negative: all. */
enum status jv_replace(struct jinja_run *run, struct str s, struct str from, struct str to,
                       int64_t count, struct jv *out) MUST_CHECK;
enum jinja_case { JINJA_LOWER, JINJA_UPPER, JINJA_CAPITALIZE, JINJA_TITLE, JINJA_TITLE_FILTER };
enum status jv_recase(struct jinja_run *run, struct str s, enum jinja_case to,
                      struct jv *out) MUST_CHECK;
/* Joins the texts of the items; strings_only: ERR_FORMAT for an item of another type. */
enum status jv_join(struct jinja_run *run, struct str glue, const struct jv *items, size_t n,
                    bool strings_only, struct jv *out) MUST_CHECK;
/* Python's v[start:stop:step] for strings and lists; absent bounds are NULL. */
enum status jv_slice(struct jinja_run *run, const struct jv *v, const struct jv *const bound[3],
                     struct jv *out) MUST_CHECK;

/* ---- jinja_attr.c: members ---- */

/* v.name and v[key]; undefined when there is no such member. ERR_FORMAT for an undefined v. */
enum status jv_attr(struct jinja_run *run, const struct jv *v, struct str name,
                    struct jv *out) MUST_CHECK;
enum status jv_item(struct jinja_run *run, const struct jv *v, const struct jv *key,
                    struct jv *out) MUST_CHECK;

/* ---- jinja_call.c: calls ---- */

/* Binds the arguments to the parameters of `fn`, then calls it. */
enum status jinja_invoke(struct jinja_call *c, const struct jinja_fn *fn,
                         struct jv *out) MUST_CHECK;
const struct jinja_fn *jinja_fn_find(const struct jinja_fn *table, size_t n, struct str name);
/* ERR_FORMAT "NAME needs WANT, not a TYPE". */
enum status jinja_bad_arg(const struct jinja_call *c, const char *want,
                          const struct jv *got) MUST_CHECK;

/* ---- tables of functions, each in the file of that name; NULL for an unknown name ---- */

const struct jinja_fn *jinja_filter_find(struct str name);
const struct jinja_fn *jinja_filter_sequence_find(struct str name);
const struct jinja_fn *jinja_test_find(struct str name); /* jinja_filters.c */
const struct jinja_fn *jinja_string_method_find(struct str name);
const struct jinja_fn *jinja_global_find(struct str name); /* jinja_attr.c */

#endif
