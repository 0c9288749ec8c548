/* infer_response.h - writes ModelInferResponse and ModelStreamInferResponse. Thread: any. */
#ifndef BATON_SERVE_GRPC_INFER_RESPONSE_H
#define BATON_SERVE_GRPC_INFER_RESPONSE_H

#include "shared/base/buf.h"

/* What Triton's parameter triton_final_response says; ModelInfer's only response has none. */
enum infer_final { INFER_ONLY, INFER_MORE, INFER_FINAL };

/* Of which request; borrowed for a call. */
struct infer_reply {
    const char *model, *id;
    enum infer_final final; /* INFER_ONLY: a ModelInferResponse; else that of a stream */
};

/* An output tensor BYTES [1]. */
struct infer_output {
    const char *name;
    struct str bytes;
};

enum { INFER_OUTPUTS_MAX = 2 };

/* Appends a response with these outputs; none: only that it was the last one. */
void infer_response_write(const struct infer_reply *r, const struct infer_output *outputs, size_t n,
                          struct buf *out);
/* Appends the response of a stream that says why a request failed. */
void infer_response_write_error(const struct infer_reply *r, const char *why, struct buf *out);

#endif
