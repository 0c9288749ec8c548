/* nccl_api.h - NCCL's functions as they are found when they are first needed: the program starts on
 * hosts without it. Thread: loading thread. */
#ifndef BATON_KERNELS_EP_NCCL_API_H
#define BATON_KERNELS_EP_NCCL_API_H

#include <nccl.h>

#include "shared/base/err.h"

/* X(name): nccl##name, with the signature that the header gives it. */
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

/* ERR_NODEV with a sentence where there is no library, or an older one than the header's major
 * number or 2.14 (first with communicators that do not block). BATON_NCCL_LIBRARY names another
 * file than libnccl.so.2. Once loaded it stays. */
enum status nccl_load(struct nccl_api *out, struct err *err) MUST_CHECK;

#endif
