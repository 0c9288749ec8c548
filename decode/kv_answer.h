/* kv_answer.h - answers a prefill process that wants a data connection to this one.
 * Thread: loop. */
#ifndef BATON_DECODE_KV_ANSWER_H
#define BATON_DECODE_KV_ANSWER_H

#include "kvtransfer/kvtransfer.h"
#include "shared/cluster/cluster.h"

/* m is a KVT_HELLO. kvt NULL: this process receives no KV. */
void kv_answer_send(struct cluster *c, struct kvt *kvt, const struct cluster_message *m);

#endif
