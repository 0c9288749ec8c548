/* fuzz_gguf.c - arbitrary bytes as a GGUF file: parses it, then reads everything that the accessors
 * return. */
#include <stdint.h>
#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/model/config/config_gguf.h"
#include "tests/fuzz/config_properties.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink;

/* Reads every byte, so that AddressSanitizer detects a range outside the input. */
static void hash_sink(const void *p, size_t n) { sink = sink + hash_64(p, n, 0); }

static void read_value(const struct gguf *g, const char *key)
{
    struct err err;
    struct str s = { 0 }, *strs = NULL;
    int32_t *ids = NULL;
    size_t n;
    uint64_t u = 0;
    double d = 0;
    bool b = false;
    enum status st = gguf_get_str(g, key, &s, &err);
    if (st == OK && s.n) hash_sink(s.p, s.n);
    st = gguf_get_strs(g, key, &strs, &n, &err);
    for (size_t i = 0; st == OK && i < n; i++) hash_sink(strs[i].p, strs[i].n);
    st = gguf_get_i32s(g, key, &ids, &n, &err);
    if (st == OK && n) hash_sink(ids, n * sizeof *ids);
    mem_free(strs);
    mem_free(ids);
    if (gguf_get_u64(g, key, 0, UINT64_MAX, &u, &err) != OK ||
        gguf_get_f64(g, key, -1e9, 1e9, &d, &err) != OK || gguf_get_bool(g, key, &b, &err) != OK)
        return;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct gguf *g;
    struct err err;
    struct model_config config;
    struct model_generation generation;
    if (gguf_parse((struct str){ (const char *)data, size }, &g, &err) != OK) return 0;
    for (size_t i = 0; i < g->n_kvs; i++) {
        char *key = mem_strndup(g->kvs[i].key.p, g->kvs[i].key.n);
        read_value(g, key);
        mem_free(key);
    }
    for (size_t i = 0; i < g->n_tensors; i++) hash_sink(g->tensors[i].data, g->tensors[i].bytes);
    err.text[0] = 0;
    if (config_gguf_parse(g, &config, &generation, &err) == OK) config_properties(&config);
    else if (err.text[0] == 0) __builtin_trap();
    gguf_close(g);
    return 0;
}
