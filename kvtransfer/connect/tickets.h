/* tickets.h - one-time tickets: 128 random bits that the control plane hands to a sender, and that
 * open one data connection.
 *
 * A slot is claimed by compare-and-swap on any thread (kvt_answer), and taken or expired on the
 * transfer thread. */
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
/* Transfer thread. OK uses it up; ERR_UNAUTHORIZED. */
enum status kvt_tickets_take(struct kvt_tickets *t, uint64_t now_ms,
                             const uint8_t ticket[KVT_TICKET_BYTES]) MUST_CHECK;
/* Transfer thread: forget what has expired. */
void kvt_tickets_tick(struct kvt_tickets *t, uint64_t now_ms);

#endif
