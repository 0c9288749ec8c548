/* request_key.h - names one attempt at a request on a worker node: by the entry node's own id of
 * the request. Prefill and decode workers find their records by it. Thread: loop. */
#ifndef BATON_CLUSTER_REQUEST_KEY_H
#define BATON_CLUSTER_REQUEST_KEY_H

#include <stdint.h>

#include "shared/base/str.h"

struct request_key {
    uint64_t request, entry, attempt; /* entry: the id of the entry node */
};

/* The key's bytes, for a map; valid as long as *k. */
static inline struct str request_key_str(const struct request_key *k)
{
    return (struct str){ (const char *)k, sizeof *k };
}

#endif
