/* fuzz_kvt_fault.c - arbitrary text as a fault plan: it is refused with a sentence, or is the same
 * after being written and read again. */
#include <stdint.h>
#include <string.h>

#include "kvtransfer/fault/fault.h"
#include "shared/base/assert.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvt_fault_plan plan, again;
    struct err err = { 0 };
    struct buf text = { 0 };
    memset(&plan, 0x5a, sizeof plan);
    memset(&again, 0x5a, sizeof again);
    if (kvt_fault_parse((struct str){ (const char *)data, size }, &plan, &err) != OK) {
        ASSERT(err.text[0] != 0);
        return 0;
    }
    for (uint32_t i = 0; i < plan.n_at; i++)
        ASSERT(kvt_fault_applies(plan.at[i].step, plan.at[i].kind));
    kvt_fault_write(&plan, &text);
    ASSERT(kvt_fault_parse(buf_str(&text), &again, NULL) == OK);
    ASSERT(memcmp(&plan, &again, sizeof plan) == 0);
    buf_release(&text);
    return 0;
}
