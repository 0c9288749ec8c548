/* infer_answer.h - what the API server says to a request, as responses of KServe's protocol.
 *
 *     infer_answer_begin ──▶ infer_answer_add, any number of times ──▶ infer_answer_end
 *                       └──▶ infer_answer_add_whole, once ───────────────▲
 *
 * In a stream each item gives a response, and ModelInfer's single one is made at the end. The last
 * item of a stream is marked as final, unless its client asked for an empty response after it
 * (triton_enable_empty_final_response), which is then the final one. Thread: loop. */
#ifndef BATON_SERVE_GRPC_INFER_ANSWER_H
#define BATON_SERVE_GRPC_INFER_ANSWER_H

#include "shared/net/grpc/grpc_status.h"
#include "shared/serve/grpc/infer_request.h"

struct infer_answer {
    const struct infer_request *request; /* borrowed */
    bool is_stream;
    bool is_final_sent;  /* a response was marked as final */
    struct buf response; /* to be sent, and then emptied by the caller */
    struct buf last;     /* of a native ModelInfer: the last item */
    bool failed;         /* the API server has said so: */
    enum grpc_status code;
    struct buf why; /* a sentence */
};

void infer_answer_begin(struct infer_answer *a, const struct infer_request *r, bool is_stream);
void infer_answer_release(struct infer_answer *a);
/* One item of a streamed answer. */
void infer_answer_add(struct infer_answer *a, struct str json);
/* The whole answer, or an error, with its HTTP status (which a native one holds itself). */
void infer_answer_add_whole(struct infer_answer *a, int http, struct str json);
void infer_answer_end(struct infer_answer *a);
/* Instead of all this: the response of a stream that ends a request with an error of this layer, in
 * the form that those of the API server have. */
void infer_answer_add_error(struct infer_answer *a, enum status st, const char *why);

#endif
