/* auth.c - see auth.h. */
#include "shared/serve/auth.h"

#include <strings.h>

#include "shared/base/hash/hash.h"

bool auth_hash_key(struct str authorization, uint8_t out[KEY_HASH_BYTES])
{
    static const struct str scheme = { "bearer", 6 };
    struct str text = str_trim(authorization);
    if (text.n <= scheme.n || strncasecmp(text.p, scheme.p, scheme.n) != 0 ||
        text.p[scheme.n] != ' ')
        return false;
    struct str key = str_trim(str_sub(text, scheme.n, SIZE_MAX));
    sha256(key.p, key.n, out);
    return true;
}

bool auth_tenant(const struct tenants *t, struct str authorization, uint32_t *tenant)
{
    uint8_t hash[KEY_HASH_BYTES];
    uint32_t found = 0;
    bool is_known = t->n_keys == 0 ||
                    (auth_hash_key(authorization, hash) && tenants_find(t, hash, &found));
    if (tenant && is_known) *tenant = found;
    return is_known;
}
