/* auth.h - who may ask: API keys. Thread: loop. */
#ifndef BATON_SERVE_AUTH_H
#define BATON_SERVE_AUTH_H

#include "shared/serve/serve_state.h"

/* Whether the Authorization header carries one of the keys (always true when there are none). The
 * time taken does not depend on which key it was nor on how much of one was guessed: hashes are
 * compared, all of them. */
bool auth_allows(const struct serve *s, struct str authorization);

#endif
