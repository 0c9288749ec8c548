/* tickets.c - see tickets.h. The comparison reads every live ticket in full, so its time reveals
 * nothing about any of them. */
#include "kvtransfer/connect/tickets.h"

#include <string.h>

#include "shared/base/hash/hash.h"

enum { TICKET_FREE, TICKET_CLAIMED, TICKET_LIVE };

enum status kvt_tickets_make(struct kvt_tickets *t, uint64_t now_ms, uint8_t out[KVT_TICKET_BYTES])
{
    for (size_t i = 0; i < KVT_TICKETS_MAX; i++) {
        struct kvt_ticket *s = &t->slots[i];
        uint32_t expected = TICKET_FREE;
        /* acquire: the transfer thread is done with the slot */
        if (!atomic_compare_exchange_strong_explicit(&s->state, &expected, TICKET_CLAIMED,
                                                     memory_order_acquire, memory_order_relaxed))
            continue;
        random_bytes(s->bytes, sizeof s->bytes);
        s->expires_ms = now_ms + KVT_TICKET_MS;
        memcpy(out, s->bytes, sizeof s->bytes);
        /* its bytes are there */
        atomic_store_explicit(&s->state, TICKET_LIVE, memory_order_release);
        return OK;
    }
    return ERR_FULL;
}

static bool is_live(struct kvt_ticket *s)
{
    return atomic_load_explicit(&s->state, memory_order_acquire) == TICKET_LIVE;
}

static void forget(struct kvt_ticket *s)
{
    memset(s->bytes, 0, sizeof s->bytes);
    atomic_store_explicit(&s->state, TICKET_FREE, memory_order_release);
}

enum status kvt_tickets_take(struct kvt_tickets *t, uint64_t now_ms,
                             const uint8_t ticket[KVT_TICKET_BYTES])
{
    struct kvt_ticket *found = NULL;
    for (size_t i = 0; i < KVT_TICKETS_MAX; i++)
        if (is_live(&t->slots[i]) &&
            equal_constant_time(t->slots[i].bytes, ticket, KVT_TICKET_BYTES))
            found = &t->slots[i];
    if (!found) return ERR_UNAUTHORIZED;
    bool expired = now_ms > found->expires_ms;
    forget(found);
    return expired ? ERR_UNAUTHORIZED : OK;
}

void kvt_tickets_tick(struct kvt_tickets *t, uint64_t now_ms)
{
    for (size_t i = 0; i < KVT_TICKETS_MAX; i++)
        if (is_live(&t->slots[i]) && now_ms > t->slots[i].expires_ms) forget(&t->slots[i]);
}
