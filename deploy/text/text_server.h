/* text_server.h - a node's answers to GET /cluster/v1/text (text_bundle.h).
 *
 * The files are read on a worker and sent piece by piece as the other side takes them; at most
 * TEXT_ANSWERS_MAX at once, others get 503. The caller has checked who asks. A zeroed struct with
 * `loop` is ready for use, and lives as long as the loop runs. Thread: loop. */
#ifndef BATON_DEPLOY_TEXT_TEXT_SERVER_H
#define BATON_DEPLOY_TEXT_TEXT_SERVER_H

#include "deploy/text/text_bundle.h"
#include "shared/net/http/http_server.h"

enum { TEXT_ANSWERS_MAX = 2 };

struct text_server {
    struct loop *loop;
    uint32_t n_answers;
};

/* What `from` points to, and the secret, are kept until the loop ends. */
void text_server_answer(struct text_server *s, const struct text_source *from, struct str secret,
                        struct http_exchange *x);

#endif
