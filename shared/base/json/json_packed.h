/* json_packed.h - parses a stranger's JSON in bounded memory.
 *
 * cJSON takes 64 bytes for each value, so a prompt of token ids would need many times its text.
 * Arrays of integers below chosen members of the top level are therefore stored as int32_t and
 * leave an empty array in the tree; every other value is counted and the parse stops at the limit.
 * With n bytes of text, v values in the tree and i packed integers a parse takes at most
 * n (strings) + 128 v + 8 i bytes beside the text. Thread: the caller's. */
#ifndef BATON_BASE_JSON_JSON_PACKED_H
#define BATON_BASE_JSON_JSON_PACKED_H

#include "shared/base/json/json.h"

enum { JSON_PACKED_NAMES_MAX = 4 };

struct json_limits {
    /* Members of the top level whose value is an array of integers, or an array of such arrays.
     * NULL: fewer. */
    const char *packed_names[JSON_PACKED_NAMES_MAX];
    size_t n_values; /* most values in the tree */
    size_t n_ints;   /* most integers of one packed array */
    bool keep_last;  /* of a longer array the last n_ints are kept; else it ends the parse */
};

struct json_ints {
    const cJSON *array; /* the empty array in the tree; NULL: the tree has none for it */
    int32_t *v;         /* [n], mem_free */
    size_t n;
    uint32_t name, child; /* where it was: the member, and the number in its array */
    bool is_child;
};

struct json_packed {
    struct json_ints *arrays; /* [n_arrays] in the order of the text */
    size_t n_arrays, cap;
    size_t next; /* where json_packed_take begins to look */
};

/* As json_parse without unique_keys; `text` changes (what was packed is overwritten with blanks).
 * ERR_INVALID: more values than n_values; ERR_TOO_LONG: more integers than n_ints, with err->field
 * the member. `packed` must be { 0 } and is released by the caller, also after an
 * error. */
enum status json_parse_packed(struct buf *text, const struct json_limits *limits, cJSON **out,
                              struct json_packed *packed, struct err *err) MUST_CHECK;
/* The same where nothing is packed, of a text that stays as it is. */
enum status json_parse_bounded(struct str text, size_t n_values, cJSON **out,
                               struct err *err) MUST_CHECK;
/* Moves the integers of `array` out to the caller (mem_free); false when it was not packed, or was
 * taken before. */
bool json_packed_take(struct json_packed *p, const cJSON *array, int32_t **v, size_t *n);
/* Returns whether `array` was packed and has not been taken. */
bool json_packed_has(const struct json_packed *p, const cJSON *array);
void json_packed_release(struct json_packed *p);

#endif
