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

bool auth_has_key(const uint8_t (*keys)[KEY_HASH_BYTES], size_t n_keys, struct str authorization)
{
    uint8_t hash[KEY_HASH_BYTES];
    bool found = false;
    if (n_keys == 0) return true;
    if (!auth_hash_key(authorization, hash)) return false;
    for (size_t i = 0; i < n_keys; i++) found |= equal_constant_time(hash, keys[i], sizeof hash);
    return found;
}

bool auth_allows(const struct serve *s, struct str authorization)
{
    return auth_has_key(s->keys, s->o.n_api_keys, authorization);
}
