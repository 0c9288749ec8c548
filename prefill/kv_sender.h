/* kv_sender.h - this process's transfers of prompts and of blocks that are lent: opens them once
 * the data connections to all their receivers are up. Leaders and followers of a node use it alike.
 *
 * Of the prompts that wait for a connection that is doubted (kv_route.h), the oldest stays, so that
 * somebody finds out; the others end with ERR_BUSY, to go elsewhere at once.
 *
 * Thread: loop. Owner: prefill_worker or prefill_follower. */
#ifndef BATON_PREFILL_KV_SENDER_H
#define BATON_PREFILL_KV_SENDER_H

#include "prefill/kv_route.h"
#include "shared/base/mem.h"
#include "shared/cluster/proto/node.pb-c.h"
#include "shared/kv/kv_parts.h"

/* One part of a prompt that this process sends. */
struct kv_send {
    uint32_t part;    /* its number in the list of all ranks */
    uint64_t process; /* that receives it */
    struct str grant;
};

/* All that this process sends of one prompt. Embedded in its record. */
struct kv_sends {
    uint64_t id; /* of the prompt: kvt_send_ready names it. Part i has the id that is i more */
    struct kv_send send[KV_PARTS_MAX];
    uint32_t n;
    uint32_t open;     /* bit i: part i was opened, SENT or SEND_FAILED will come */
    struct list queue; /* a route's waiting list; else unlinked */
};

enum { KV_SENDER_FIRST = 3 };

struct kv_sender {
    struct kv_routes routes;
    struct kvt *kvt;
    struct cluster *cluster;
    /* Every transfer is open. Called by start too. */
    void (*on_open)(void *arg, struct kv_sends *s);
    /* They cannot be opened: none waits any more, those that were opened must be cancelled. */
    void (*on_failed)(void *arg, struct kv_sends *s, enum status st, const char *text);
    void *arg;
};

void kv_sender_init(struct kv_sender *k);
void kv_sender_release(struct kv_sender *k);
void kv_sends_init(struct kv_sends *s, uint64_t id);
/* The grant is copied to `arena`. */
void kv_sends_add(struct kv_sends *s, uint32_t part, uint64_t process, ProtobufCBinaryData grant,
                  struct arena *arena);
uint32_t kv_sends_all(const struct kv_sends *s); /* bits of its parts */
/* Learns where a process is, after a check of the address. */
enum status kv_sender_learn(struct kv_sender *k, const Baton__NodeAddress *a,
                            struct err *err) MUST_CHECK;
/* Opens the transfers now or when their connections are up: on_open or on_failed follows, unless
 * kv_sender_cancel comes first. True: `s` waits for a connection, and at most KV_SENDER_FIRST - 1
 * before it; false: others do, or one of the two was called and `s` may be gone. */
bool kv_sender_start(struct kv_sender *k, struct kv_sends *s);
/* Those that were opened end with SENT or SEND_FAILED. */
void kv_sender_cancel(struct kv_sender *k, struct kv_sends *s);
/* Those of `id` are open: sends all layers of blocks [n] that are complete, and nothing after. */
void kv_sender_write(struct kv_sender *k, const struct kv_layout *l, uint64_t id,
                     const int32_t *blocks, uint32_t n);
void kv_sender_on_answer(struct kv_sender *k, const struct cluster_message *m);
/* An event of a peer; false: of a transfer. */
bool kv_sender_on_kvt(struct kv_sender *k, const struct kvt_event *ev);
void kv_sender_on_lost(struct kv_sender *k, uint64_t process);
/* Ends routes that did not come up in time, and sends back who waits for doubted ones. Called every
 * KV_ROUTE_DOUBT_AGAIN_MS. */
void kv_sender_sweep(struct kv_sender *k, uint64_t now_ms);

#endif
