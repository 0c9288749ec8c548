/* auth.h - whose API key a request has. Thread: loop. */
#ifndef BATON_SERVE_AUTH_H
#define BATON_SERVE_AUTH_H

#include "shared/serve/tenants.h"

/* Hashes the key of an Authorization header as tenants.h does. False: there is none. */
bool auth_hash_key(struct str authorization, uint8_t out[KEY_HASH_BYTES]);
/* Which tenant sends this Authorization header? Where there are no keys, "default". False: none,
 * which is a 401. `tenant` may be NULL. */
bool auth_tenant(const struct tenants *t, struct str authorization, uint32_t *tenant);

#endif
