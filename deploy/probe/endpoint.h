/* endpoint.h - one side of a test transfer: a KV pool, a kvt on top of it, and blocking calls.
 *
 * An endpoint is what a node has, without engine and requests: a shared pool, a transfer thread and
 * one allowed transport. Real bytes move and checksums are compared; the receiver also checks a
 * byte at both edges of every piece.
 *
 * Life cycle: open; as sender hello, connect, send, or as receiver answer, expect, take; close.
 * Every call returns within PROBE_WAIT_MS.
 * Thread: one at a time (a worker of the probe server); events come from the kvt's thread through a
 * mailbox. */
#ifndef BATON_DEPLOY_PROBE_ENDPOINT_H
#define BATON_DEPLOY_PROBE_ENDPOINT_H

#include "deploy/probe/probe_wire.h"
#include "kvtransfer/kvtransfer.h"

enum { PROBE_WAIT_MS = 20000, PROBE_CONNECT_MS = 5000 };

struct probe_endpoint;

/* Makes a layout in which one (layer, block) has exactly `piece_bytes`. ERR_INVALID: no number of
 * tokens, heads and head size gives that. */
enum status probe_layout(uint32_t piece_bytes, uint32_t n_layers, uint32_t n_blocks,
                         struct kv_layout *out, struct err *err) MUST_CHECK;

/* Opens for `r`, an OPEN. Transports listen on `host`, and peers are told that address.
 * ERR_UNSUPPORTED, ERR_CONFIG as kvt_create; ERR_NOMEM. */
enum status probe_endpoint_open(const struct probe_request *r, const char *host,
                                const struct kvt_tuning *tuning, struct probe_endpoint **out,
                                struct err *err) MUST_CHECK;
void probe_endpoint_close(struct probe_endpoint *e); /* NULL is fine */
void probe_endpoint_hello(const struct probe_endpoint *e, struct buf *out);
enum status probe_endpoint_answer(struct probe_endpoint *e, struct str hello, struct buf *out,
                                  struct err *err) MUST_CHECK;
/* Waits for CONNECTED. *transport is static, *link_speed in bytes per second, 0: unknown. */
enum status probe_endpoint_connect(struct probe_endpoint *e, struct str answer,
                                   const char **transport, uint64_t *link_speed,
                                   struct err *err) MUST_CHECK;
/* Appends `n` grants of `n_blocks` blocks each, every one after its length. */
enum status probe_endpoint_expect(struct probe_endpoint *e, uint32_t n, uint32_t n_blocks,
                                  struct buf *grants, struct err *err) MUST_CHECK;
/* Sends one transfer per grant, one after the other; ns[i]: from kvt_send_open to SENT. */
enum status probe_endpoint_send(struct probe_endpoint *e, uint32_t n, uint32_t n_blocks,
                                struct str grants, uint64_t *ns, struct err *err) MUST_CHECK;
/* Waits until the n expected transfers have arrived and checks their bytes. */
enum status probe_endpoint_take(struct probe_endpoint *e, uint32_t n, struct err *err) MUST_CHECK;
/* KV bytes of one transfer of n_blocks blocks. */
uint64_t probe_endpoint_bytes(const struct probe_endpoint *e, uint32_t n_blocks);

#endif
