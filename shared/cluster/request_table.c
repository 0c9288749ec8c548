/* request_table.c - see request_table.h. */
#include "shared/cluster/request_table.h"

/* The key's bytes; valid as long as *k. The struct has no padding. */
static struct str key_bytes(const struct request_key *k)
{
    return (struct str){ (const char *)k, sizeof *k };
}

void *request_table_find(const struct request_table *t, struct request_key key)
{
    return map_get(&t->by_key, key_bytes(&key));
}

void request_table_add(struct request_table *t, struct request_key key, void *record)
{
    map_put(&t->by_key, key_bytes(&key), record);
}

void request_table_remove(struct request_table *t, struct request_key key, const void *record)
{
    if (request_table_find(t, key) == record) map_del(&t->by_key, key_bytes(&key));
}

void request_table_release(struct request_table *t) { map_release(&t->by_key); }
