/* infer_request.h - reads a ModelInferRequest of KServe's protocol: what it asks of the API server.
 *
 *     input IN, BYTES [1]: a JSON list of one request      in FastDeploy's native form; output OUT
 *     input text_input, BYTES [1], and streaming, BOOL [1]  a completion; outputs text_output and
 *                                                           finish_reason
 *
 * A BYTES tensor is in raw_input_contents, with the length (4 bytes, little endian) before it, or
 * in its typed contents. Parameters of a completion are those of the request; in both forms
 * `priority` and `timeout` are Triton's. Memory is bounded by a small multiple of the message's.
 * Thread: any; the names are not written meanwhile. */
#ifndef BATON_SERVE_GRPC_INFER_REQUEST_H
#define BATON_SERVE_GRPC_INFER_REQUEST_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum infer_form { INFER_NO_FORM /* it was refused before it had one */, INFER_NATIVE, INFER_TEXT };

/* Outputs that the client asked for; all when it named none. */
enum { INFER_TEXT_OUTPUT = 1, INFER_FINISH_REASON = 2 };

struct infer_request {
    enum infer_form form;
    struct buf model, id; /* as the client gave them; filled in also where the rest is not */
    struct buf body;      /* JSON, for the API server */
    bool streams;         /* of a completion: each token is a response */
    unsigned outputs;     /* of a completion */
    bool empty_final;     /* triton_enable_empty_final_response */
    uint32_t timeout_ms;  /* 0: none */
};

struct infer_reading {
    struct str message;
    bool is_stream; /* it came by ModelStreamInfer */
    /* Is this a model's name? */
    bool (*has_model)(const void *arg, const char *name);
    const void *arg;
};

/* Fills in *out, which the caller releases also after an error. ERR_NOT_FOUND: the model; other
 * errors name what is wrong with which field, and what would be right. */
enum status infer_request_read(const struct infer_reading *r, struct infer_request *out,
                               struct err *err) MUST_CHECK;
void infer_request_release(struct infer_request *r);

#endif
