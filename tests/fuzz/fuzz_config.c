/* fuzz_config.c - arbitrary bytes as config.json and generation_config.json (split at the first
 * zero byte). An accepted configuration must have the properties that binding relies on. */
#include <stdint.h>
#include <string.h>

#include "shared/model/config/config_hf.h"
#include "tests/fuzz/config_properties.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_config c;
    struct model_generation g;
    struct err err = { 0 };
    const uint8_t *zero = size ? memchr(data, 0, size) : NULL;
    size_t n = zero ? (size_t)(zero - data) : size;
    struct str config = { (const char *)data, n }, generation = { "", 0 };
    if (zero) generation = (struct str){ (const char *)zero + 1, size - n - 1 };
    if (config_hf_parse(config, generation, &c, &g, &err) != OK) {
        if (err.text[0] == 0) __builtin_trap();
        return 0;
    }
    config_properties(&c);
    return 0;
}
