/* fuzz_safetensors.c - arbitrary bytes as a safetensors file; every tensor of an accepted one is
 * read. */
#include <stdint.h>

#include "shared/base/hash/hash.h"
#include "shared/model/load/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors *s;
    struct err err;
    if (safetensors_parse((struct str){ (const char *)data, size }, &s, &err) != OK) {
        if (err.text[0] == 0) __builtin_trap();
        return 0;
    }
    for (size_t i = 0; i < s->n_tensors; i++)
        sink = sink + hash_64(s->tensors[i].data, s->tensors[i].bytes, 0);
    safetensors_close(s);
    return 0;
}
