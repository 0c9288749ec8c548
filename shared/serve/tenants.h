/* tenants.h - whose requests these are: tenants, their API keys, and what each of them may use.
 *
 * A tenant is whoever has one of its keys. Those of --api-key belong to the tenant "default", which
 * is there in any case; without any key everybody is that tenant. A key file (docs/admission.md)
 * has a line for each key:
 *
 *     NAME KEY [FIELD=VALUE ...]     # a comment
 *
 * NAME: of letters, digits, '.', '_' and '-', 63 at most. KEY: as clients send it, or "sha256:" and
 * the 64 hexadecimal digits of its hash. Fields, in the first line of a tenant only, and all
 * optional: weight, class, requests_per_minute, tokens_per_minute, concurrent. Further lines of the
 * same name are further keys of that tenant. Thread: main fills it in; then any, as it is
 * constant. */
#ifndef BATON_SERVE_TENANTS_H
#define BATON_SERVE_TENANTS_H

#include "shared/base/err.h"
#include "shared/base/str.h"

enum {
    TENANTS_MAX = 256,
    TENANT_NAME_MAX = 64, /* 63 characters and a 0 */
    TENANT_KEYS_MAX = 1024,
    TENANT_KEY_BYTES_MAX = 512,
    TENANT_WEIGHT_MAX = 1000,
    TENANT_FILE_MAX = 1 << 20, /* bytes */
    KEY_HASH_BYTES = 32        /* SHA-256 */
};

/* While a request of a higher class waits, none of a lower one is placed. */
enum tenant_class { TENANT_LOW, TENANT_NORMAL, TENANT_HIGH, TENANT_N_CLASSES };
const char *tenant_class_name(enum tenant_class c);

struct tenant {
    char name[TENANT_NAME_MAX];
    uint64_t id; /* a hash of the name, equal on all entry nodes; never 0 */
    enum tenant_class class_;
    uint32_t weight; /* 1 .. TENANT_WEIGHT_MAX: its share of tokens among those of its class */
    /* Limits; 0: none. */
    uint32_t requests_per_minute;
    uint64_t tokens_per_minute; /* of prompts and answers */
    uint32_t concurrent;        /* sequences that wait or run */
};

struct tenant_key {
    uint8_t hash[KEY_HASH_BYTES];
    uint32_t tenant; /* index */
};

struct tenants {
    struct tenant *list; /* [n]; the first is "default" */
    struct tenant_key *keys;
    uint32_t n, n_keys; /* n_keys 0: no key is needed */
};

/* "default" alone, without a key. */
void tenants_init(struct tenants *t);
void tenants_release(struct tenants *t);
/* Gives "default" one more key. ERR_CONFIG: it is empty, or there are too many. */
enum status tenants_add_key(struct tenants *t, const char *key, struct err *err) MUST_CHECK;
/* Adds what is in a key file; `name` is the file's, for errors, which name line, field and value.
 * ERR_CONFIG; then `t` is good for tenants_release alone. */
enum status tenants_parse(struct tenants *t, struct str text, const char *name,
                          struct err *err) MUST_CHECK;
enum status tenants_read(struct tenants *t, const char *path, struct err *err) MUST_CHECK;
/* Which tenant's key is this hash? False: nobody's. Compares with all keys, so that the time
 * depends neither on the key nor on a partial guess. */
bool tenants_find(const struct tenants *t, const uint8_t hash[KEY_HASH_BYTES], uint32_t *tenant);

#endif
