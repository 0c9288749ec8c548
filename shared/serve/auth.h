/* auth.h - checks API keys. Thread: loop. */
#ifndef BATON_SERVE_AUTH_H
#define BATON_SERVE_AUTH_H

#include "shared/serve/serve_state.h"

/* Hashes the key of an Authorization header as the server hashes its own. False: there is none. */
bool auth_hash_key(struct str authorization, uint8_t out[KEY_HASH_BYTES]);
/* Returns whether the Authorization header has one of the keys (true when there are none). Compares
 * the hashes of all keys, so that the time depends neither on the key nor on a partial guess. */
bool auth_has_key(const uint8_t (*keys)[KEY_HASH_BYTES], size_t n_keys, struct str authorization);
/* The same with the keys of the API server. */
bool auth_allows(const struct serve *s, struct str authorization);

#endif
