/* launch_key.c - see launch_key.h. */
#include "deploy/launch/launch_key.h"

#include <stdio.h>
#include <stdlib.h>

#include "shared/base/hash/hash.h"

#define VARIABLE "BATON_API_KEY"

enum { KEY_BYTES = 16 };

const char *launch_key(const struct config *c)
{
    const char *given = config_list(c, "api-key", 0, NULL), *made = getenv(VARIABLE);
    uint8_t bytes[KEY_BYTES];
    char text[2 * KEY_BYTES + 1];
    if (given || !config_is_set(c, "api-keys-file")) return given;
    if (made && made[0]) return made; /* here, before */
    random_bytes(bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    setenv(VARIABLE, text, 1);
    return getenv(VARIABLE);
}
