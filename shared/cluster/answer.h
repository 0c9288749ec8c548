/* answer.h - the answers of a worker that an entry node waits for.
 *
 * An answer that does not fit into the queue takes the link down, so that the entry node does not
 * wait for ever. Thread: loop. */
#ifndef BATON_CLUSTER_ANSWER_H
#define BATON_CLUSTER_ANSWER_H

#include "shared/cluster/cluster.h"
#include "shared/cluster/proto/node.pb-c.h"

void answer_send(struct cluster *c, uint64_t entry, enum frame_type type, uint64_t request,
                 uint32_t attempt, const ProtobufCMessage *body);
/* The attempt failed on this node. `text` is for the client. */
void answer_send_failed(struct cluster *c, uint64_t entry, uint64_t request, uint32_t attempt,
                        enum status st, const char *text);

#endif
