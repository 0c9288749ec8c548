/* nccl_load.c - loads NCCL: the file that BATON_NCCL_LIBRARY names, or libnccl.so.2 on the loader's
 * path or in CUDA's usual folder. Thread: as ep.h says. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ep/ep_backend.h"
#include "kernels/ep/nccl_api.h"
#include "shared/base/mem.h"

enum { VERSION_MIN = 21400 };

#ifdef NCCL_IN_PROGRAM /* the header of tests: the functions are the program's own, if it has
                        * them */
static void *open_library(void) { return dlopen(NULL, RTLD_NOW); }
#else
static void *open_library(void)
{
    static const char *const USUAL[] = { "libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2",
                                         "/usr/local/cuda/lib/libnccl.so.2" };
    const char *given = getenv("BATON_NCCL_LIBRARY");
    void *h = NULL;
    if (given && *given) return dlopen(given, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    for (size_t i = 0; !h && i < COUNT_OF(USUAL); i++)
        h = dlopen(USUAL[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    return h;
}
#endif

/* Stores a function pointer from dlsym; C has no conversion for it. */
static bool find(void *library, const char *name, void *to)
{
    void *p = dlsym(library, name);
    memcpy(to, &p, sizeof p);
    return p != NULL;
}

enum status nccl_load(struct nccl_api *out, struct err *err)
{
    struct nccl_api api = { 0 };
    void *library = open_library();
    if (!library) return err_set(err, ERR_NODEV, "NCCL is not on this host: %s", dlerror());
#define X(name)                                                                                    \
    if (!find(library, "nccl" #name, &api.name))                                                   \
        return err_set(err, ERR_NODEV, "NCCL here has no nccl" #name);
    NCCL_FUNCTIONS(X)
#undef X
    if (api.GetVersion(&api.version) != ncclSuccess || api.version < VERSION_MIN)
        return err_set(err, ERR_NODEV, "NCCL here is version %d; %d or later is needed",
                       api.version, VERSION_MIN);
    *out = api;
    return OK;
}

int ep_nccl_find(void)
{
    struct nccl_api api;
    return nccl_load(&api, NULL) == OK ? api.version : 0;
}
