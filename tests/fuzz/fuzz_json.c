/* fuzz_json.c - arbitrary bytes for json_parse: cJSON must accept whatever json_check accepts. */
#include <stdlib.h>

#include "shared/base/json/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

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
    }
    return 0;
}
