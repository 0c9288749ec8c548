/* fuzz_tenants.c - arbitrary text as a key file: it is refused with a sentence, or every tenant and
 * limit in it is within its bounds and every key belongs to one of them; and as what a client sends
 * for a promise (x-baton-retry), which no text but the one that was written for it is. */
#include <stdint.h>
#include <string.h>

#include "scheduler/admission/retry_text.h"
#include "shared/base/assert.h"
#include "shared/serve/auth.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_tenant(const struct tenant *t)
{
    ASSERT(t->name[0] && strlen(t->name) < TENANT_NAME_MAX && t->id);
    ASSERT(!strpbrk(t->name, " \t\r\n\"\\{}"));
    ASSERT(t->weight >= 1 && t->weight <= TENANT_WEIGHT_MAX && t->class_ < TENANT_N_CLASSES);
}

static void try_file(struct str text)
{
    struct tenants t;
    struct err err = { 0 };
    uint32_t tenant = UINT32_MAX;
    tenants_init(&t);
    if (tenants_parse(&t, text, "keys", &err) != OK) {
        ASSERT(err.text[0] && err.field[0] && strstr(err.text, "keys"));
    } else {
        ASSERT(t.n >= 1 && t.n <= TENANTS_MAX && t.n_keys >= 1 && t.n_keys <= TENANT_KEYS_MAX);
        for (uint32_t i = 0; i < t.n; i++) check_tenant(&t.list[i]);
        for (uint32_t i = 0; i < t.n_keys; i++) {
            ASSERT(tenants_find(&t, t.keys[i].hash, &tenant));
            ASSERT(tenant == t.keys[i].tenant && tenant < t.n);
        }
        ASSERT(!auth_tenant(&t, STR(""), NULL));
        (void)auth_tenant(&t, text, &tenant);
    }
    tenants_release(&t);
}

static void try_retry(struct str text)
{
    const struct retry_secret secret = { { 7 } };
    char right[GEN_RETRY_MAX];
    uint64_t due = 0, again = 0;
    if (retry_text_read(&secret, 5, text, &due)) ASSERT(due < UINT64_C(1) << 48);
    retry_text_write(&secret, 5, text.n, (uint32_t)text.n, right);
    ASSERT(retry_text_read(&secret, 5, str_of(right), &again) && again == text.n);
    ASSERT(!retry_text_read(&secret, 6, str_of(right), &again));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct str text = { (const char *)data, size };
    try_file(text);
    try_retry(text);
    return 0;
}
