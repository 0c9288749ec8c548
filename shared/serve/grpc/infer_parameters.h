/* infer_parameters.h - the parameters of a ModelInferRequest. Thread: any. */
#ifndef BATON_SERVE_GRPC_INFER_PARAMETERS_H
#define BATON_SERVE_GRPC_INFER_PARAMETERS_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/serve/grpc/proto/kserve.pb-c.h"

/* Reads those that Triton reserves: triton_enable_empty_final_response, and timeout (microseconds).
 * The others that it reserves (sequence_*, priority, ...) say nothing to a model without sequences,
 * and are left alone. */
enum status infer_parameters_read(Inference__Parameter *const *p, size_t n, bool *empty_final,
                                  uint32_t *timeout_ms, struct err *err) MUST_CHECK;
/* Appends those of a completion as members of its JSON, each with a comma before it. ERR_INVALID:
 * one is not known, or has another type. */
enum status infer_parameters_add(Inference__Parameter *const *p, size_t n, struct buf *out,
                                 struct err *err) MUST_CHECK;

#endif
