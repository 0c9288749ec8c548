/* curl_library.c - see curl_library.h. Thread: main. */
#include "deploy/pull/fetch/curl_library.h"

#include <dlfcn.h>
#include <string.h>

#include "shared/base/mem.h"

/* Of both flavours: the name in use since 2006. */
static const char FILE_NAME[] = "libcurl.so.4";

static const char *const NAMES[] = {
#define X(name) "curl_" #name,
    CURL_FUNCTIONS(X)
#undef X
};

enum status curl_library_load(struct curl_library *out, struct err *err)
{
    void *handle = dlopen(FILE_NAME, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return err_set(err, ERR_UNSUPPORTED,
                       "models are pulled with libcurl, which cannot be loaded (%s); Debian: apt "
                       "install libcurl4",
                       dlerror());
    void **to = (void **)out; /* a struct of as many pointers to functions */
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        to[i] = dlsym(handle, NAMES[i]);
        if (to[i]) continue;
        return err_set(err, ERR_UNSUPPORTED, "%s of this host is too old: it lacks %s", FILE_NAME,
                       NAMES[i]);
    }
    if (out->global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        return err_set(err, ERR_INTERNAL, "%s cannot be initialised", FILE_NAME);
    return OK;
}
