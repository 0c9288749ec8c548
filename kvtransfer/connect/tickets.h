/* tickets.h - one-time tickets: 128 random bits that the control plane gives to a sender, and that
 * open one data connection. Any thread claims a slot by compare-and-swap (kvt_answer); the transfer
 * thread takes it or lets it expire. */
#ifndef BATON_KVTRANSFER_CONNECT_TICKETS_H
#define BATON_KVTRANSFER_CONNECT_TICKETS_H

#include <stdatomic.h>

#include "kvtransfer/wire.h"

enum { KVT_TICKETS_MAX = 256, KVT_TICKET_MS = 10000 };

struct kvt_tickets {
    struct kvt_ticket {
        _Atomic uint32_t state; /* free, claimed, live */
        uint8_t bytes[KVT_TICKET_BYTES];
        uint64_t expires_ms;
    } slots[KVT_TICKETS_MAX];
};

/* Any thread. ERR_FULL. */
enum status kvt_tickets_make(struct kvt_tickets *t, uint64_t now_ms,
                             uint8_t out[KVT_TICKET_BYTES]) MUST_CHECK;
/* Uses the ticket up. ERR_UNAUTHORIZED: unknown, used or expired. Transfer thread. */
enum status kvt_tickets_take(struct kvt_tickets *t, uint64_t now_ms,
                             const uint8_t ticket[KVT_TICKET_BYTES]) MUST_CHECK;
/* Frees expired tickets. Transfer thread. */
void kvt_tickets_tick(struct kvt_tickets *t, uint64_t now_ms);

#endif
