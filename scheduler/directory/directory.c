/* directory.c - the list of backends, and the calls through their ops (directory.h). Thread:
 * loop. */
#include "scheduler/directory/directory.h"

#include <string.h>

#include "scheduler/directory/backends.h"
#include "scheduler/directory/wire.h"
#include "shared/base/assert.h"

/* Three renewals fit into a lease; a dead node is gone within 3 s. */
enum { RENEW_MS = 700, LEASE_MS = 2400 };

const struct directory_ops *const DIRECTORY_BACKENDS[] = { &directory_local_ops,
                                                           &directory_http_ops,
                                                           &directory_redis_ops, NULL };

const char *directory_why_down(const struct directory *d) { return d->ops->why_down(d); }

const char *node_role_name(enum node_role r)
{
    static const char *const names[] = { "mixed", "prefill", "decode" };
    ASSERT(r <= ROLE_DECODE);
    return names[r];
}

bool node_role_from_name(const char *name, enum node_role *out)
{
    for (enum node_role r = ROLE_MIXED; r <= ROLE_DECODE; r++) {
        if (strcmp(name, node_role_name(r)) != 0) continue;
        *out = r;
        return true;
    }
    return false;
}

enum status directory_open(const char *backend, const struct directory_options *o,
                           struct directory **out, struct err *err)
{
    struct directory_options filled = *o;
    if (!filled.renew_ms) filled.renew_ms = RENEW_MS;
    if (!filled.lease_ms) filled.lease_ms = LEASE_MS;
    if (!directory_topic_is_valid(filled.topic))
        return err_field(
            err, ERR_CONFIG, "topic",
            "the topic \"%s\" must be 1 to %d printable characters without blanks and braces",
            filled.topic ? filled.topic : "", NODE_NAME_MAX - 1);
    for (size_t i = 0; DIRECTORY_BACKENDS[i]; i++)
        if (strcmp(DIRECTORY_BACKENDS[i]->name, backend) == 0)
            return DIRECTORY_BACKENDS[i]->open(&filled, out, err);
    return err_set(err, ERR_CONFIG, "there is no directory \"%s\"; it is local, http or redis",
                   backend);
}

void directory_close(struct directory *d)
{
    if (d) d->ops->close(d);
}

void directory_publish(struct directory *d, const struct node_record *me)
{
    ASSERT(me->node != 0);
    d->ops->publish(d, me);
}

void directory_leave(struct directory *d, uint64_t node) { d->ops->leave(d, node); }

enum status directory_snapshot(struct directory *d, directory_snapshot_fn *cb, void *arg)
{
    return d->ops->snapshot(d, cb, arg);
}

enum status directory_reserve(struct directory *d, const struct placement *p,
                              directory_reserve_fn *cb, void *arg)
{
    return d->ops->reserve(d, p, cb, arg);
}

void directory_computed(struct directory *d, uint64_t request) { d->ops->computed(d, request); }

void directory_release(struct directory *d, uint64_t request) { d->ops->release(d, request); }

enum status directory_meter(struct directory *d, const struct meter_report *r,
                            directory_meter_fn *cb, void *arg)
{
    ASSERT(r->entry != 0 && r->number != 0 && r->number < METER_NUMBER_END);
    ASSERT(r->n_uses <= METER_TENANTS_MAX);
    return d->ops->meter(d, r, cb, arg);
}
