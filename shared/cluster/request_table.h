/* request_table.h - finds a worker's record of an attempt at a request.
 *
 * The entry node names the request, so its own id is part of the key. Prefill and decode workers
 * each have one table. Thread: loop. */
#ifndef BATON_CLUSTER_REQUEST_TABLE_H
#define BATON_CLUSTER_REQUEST_TABLE_H

#include "shared/base/map.h"
#include "shared/cluster/cluster.h"

struct request_key {
    uint64_t request, entry, attempt; /* entry: the id of the entry node */
};

struct request_table {
    struct map by_key;
};

static inline struct request_key request_key_of(const struct cluster_message *m)
{
    return (struct request_key){ m->request, m->from, m->attempt };
}

/* NULL: there is none. */
void *request_table_find(const struct request_table *t, struct request_key key);
void request_table_add(struct request_table *t, struct request_key key, void *record);
/* Does nothing when another record, or none, is in the table under this key. */
void request_table_remove(struct request_table *t, struct request_key key, const void *record);
void request_table_release(struct request_table *t);

#endif
