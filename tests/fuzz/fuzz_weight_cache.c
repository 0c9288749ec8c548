/* fuzz_weight_cache.c - arbitrary bytes as head and table of a weight cache: an accepted table must
 * be the one that the plan gives.
 *
 * The first byte says whether the hash over head and table is corrected before the check. */
#include <stdlib.h>
#include <string.h>

#include "kernels/host/pages.h"
#include "shared/model/load/weight_cache.h"

enum { N = 3 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct weight_cache_key KEY = { 0x1122334455667788u, 0x99aabbccddeeff00u };
    const size_t page = pages_round(1);
    const struct weight plan[N] = {
        { .layout = 2, .n_out = 16, .n_in = 8, .bytes = page },
        { .layout = 4, .paired = true, .n_out = 96, .n_in = 64, .bytes = 2 * page },
        { .layout = 0, .n_out = 1, .n_in = 1, .bytes = page }
    };
    struct {
        struct weight_cache_header head;
        struct weight_cache_entry table[N];
    } file = { 0 }, want;
    struct err err = { 0 };
    if (size == 0) return 0;
    size_t n = size - 1 < sizeof file ? size - 1 : sizeof file;
    memcpy(&file, data + 1, n);
    if (data[0] & 1 && file.head.n_weights == N) weight_cache_seal(&file.head, file.table);
    weight_cache_lay_out(&want.head, want.table, &KEY, plan, N);
    if (weight_cache_check(&file, n < sizeof file ? n : (size_t)file.head.bytes, &KEY, plan, N,
                           &err) != OK) {
        if (err.code == OK || err.text[0] == 0) abort();
        return 0;
    }
    /* the hashes of the weights are not checked here */
    for (size_t i = 0; i < N; i++) want.table[i].hash = file.table[i].hash;
    if (file.head.bytes != want.head.bytes ||
        memcmp(file.table, want.table, sizeof want.table) != 0)
        abort();
    return 0;
}
