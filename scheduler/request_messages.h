/* request_messages.h - the messages that the nodes of an attempt send to its request (request.h).
 *
 * Messages of other attempts and of other nodes than the attempt's are ignored. Each function may
 * end and free the request. Thread: loop. */
#ifndef BATON_SCHEDULER_REQUEST_MESSAGES_H
#define BATON_SCHEDULER_REQUEST_MESSAGES_H

#include "scheduler/request.h"

void request_on_message(struct entry *e, struct request *r, const struct cluster_message *m);
/* Hands the next output token to the sink. */
void request_deliver_token(struct entry *e, struct request *r, uint32_t index,
                           const struct token_logprobs *t);
void request_on_token(struct entry *e, struct request *r, uint64_t from, uint32_t attempt,
                      uint32_t index, const struct token_logprobs *t);

#endif
