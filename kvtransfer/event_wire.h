/* event_wire.h - an event of a transfer as bytes, for the process that leads this one: a follower
 * of a tensor-parallel node tells its leader what happened to its parts.
 *
 * Decoding accepts exactly what encoding produces. Thread: any (values). */
#ifndef BATON_KVTRANSFER_EVENT_WIRE_H
#define BATON_KVTRANSFER_EVENT_WIRE_H

#include "kvtransfer/kvtransfer.h"

/* Events of transfers, not of peers: RECEIVED to SEND_FAILED. */
void kvt_event_encode(const struct kvt_event *ev, struct buf *out);
/* ERR_FORMAT; ERR_PEER_MISMATCH: of another release. out->transport is static, "" for one that this
 * release does not know. */
enum status kvt_event_decode(struct str in, struct kvt_event *out) MUST_CHECK;

#endif
