/* nccl.h - the part of NCCL's interface that Baton uses, for builds with the emulated GPU.
 *
 * It replaces NVIDIA's header of the same name: names, values and signatures are NCCL's (user
 * guide, version 2.28). A test that links tests/conformance/ep_nccl_fake.c has the functions; other
 * programs of such a build find no NCCL. Thread: any. */
#ifndef BATON_TESTS_SIMT_NCCL_H
#define BATON_TESTS_SIMT_NCCL_H

#include <limits.h>
#include <stddef.h>

#include "tests/simt/include/cuda_runtime_api.h"

#define NCCL_IN_PROGRAM      1
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_CONFIG_INITIALIZER                                                                    \
    {                                                                                              \
        1                                                                                          \
    }

enum ncclResult {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress
};
enum ncclDataType { ncclInt8 = 0, ncclInt32 = 2 };
struct ncclUniqueId_st {
    char internal[NCCL_UNIQUE_ID_BYTES];
};
struct ncclConfig_st {
    int blocking;
};
typedef enum ncclResult ncclResult_t;        /* (NCCL's) */
typedef enum ncclDataType ncclDataType_t;    /* (NCCL's) */
typedef struct ncclComm *ncclComm_t;         /* (NCCL's) */
typedef struct ncclUniqueId_st ncclUniqueId; /* (NCCL's) */
typedef struct ncclConfig_st ncclConfig_t;   /* (NCCL's) */

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
const char *ncclGetErrorString(ncclResult_t result);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);

#endif
