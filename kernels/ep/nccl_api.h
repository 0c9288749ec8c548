/* nccl_api.h - NCCL's functions, loaded when they are first needed: the program starts on hosts
 * without NCCL. Thread: loading. */
#ifndef BATON_KERNELS_EP_NCCL_API_H
#define BATON_KERNELS_EP_NCCL_API_H

#include <nccl.h>

#include "shared/base/err.h"

/* X(name): nccl##name, with the signature in the header. */
#define NCCL_FUNCTIONS(X)                                                                          \
    X(GetVersion)                                                                                  \
    X(GetUniqueId)                                                                                 \
    X(CommInitRankConfig)                                                                          \
    X(CommFinalize)                                                                                \
    X(CommDestroy)                                                                                 \
    X(CommAbort)                                                                                   \
    X(CommGetAsyncError) X(GetErrorString) X(GroupStart) X(GroupEnd) X(Send) X(Recv) X(AllGather)

struct nccl_api {
    int version;
#define X(name) __typeof__(&nccl##name) name;
    NCCL_FUNCTIONS(X)
#undef X
};

/* Loads NCCL once. ERR_NODEV with a sentence: there is no library, or it is older than the header's
 * major version or 2.14 (the first with non-blocking communicators). BATON_NCCL_LIBRARY names
 * another file than libnccl.so.2. */
enum status nccl_load(struct nccl_api *out, struct err *err) MUST_CHECK;

#endif
