/* fuzz_json.c - arbitrary bytes for json_parse: cJSON must accept whatever json_check accepts. And
 * for json_parse_packed, which must agree with it and give every packed integer back. */
#include <stdlib.h>

#include "shared/base/json/json_packed.h"
#include "shared/base/mem.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Takes every packed array out, by the empty array that it left in the tree. */
static void take_all(struct json_packed *p, size_t n_max)
{
    for (size_t i = 0; i < p->n_arrays; i++) {
        const cJSON *array = p->arrays[i].array;
        int32_t *v = NULL;
        size_t n = 0;
        if (!array || !cJSON_IsArray(array) || array->child || !json_packed_take(p, array, &v, &n))
            abort();
        if (n == 0 || n > n_max) abort();
        mem_free(v);
    }
}

static void parse_packed(struct str text, bool plain_ok)
{
    for (int keep_last = 0; keep_last < 2; keep_last++) {
        const struct json_limits limits = {
            .packed_names = { "prompt", "a" }, .n_values = 64, .n_ints = 8, .keep_last = keep_last
        };
        struct json_packed packed = { 0 };
        struct buf copy = { 0 };
        struct err err = { 0 };
        cJSON *doc = NULL;
        buf_add_str(&copy, text);
        enum status st = json_parse_packed(&copy, &limits, &doc, &packed, &err);
        if ((st == OK) != (doc != NULL) || (st == OK && !plain_ok)) abort();
        if (st == ERR_FORMAT && plain_ok) abort();
        if (st == ERR_TOO_LONG && (keep_last || !err.field[0])) abort();
        if (st == OK) take_all(&packed, limits.n_ints);
        cJSON_Delete(doc);
        json_packed_release(&packed);
        buf_release(&copy);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct str text = { (const char *)data, size };
    for (int unique = 0; unique < 2; unique++) {
        cJSON *doc = NULL;
        struct err err = { 0 };
        enum status st = json_parse(text, unique, &doc, &err);
        if (st != OK && st != ERR_FORMAT) abort();
        if ((st == OK) != (doc != NULL)) abort();
        cJSON_Delete(doc);
        if (!unique) parse_packed(text, st == OK);
    }
    return 0;
}
