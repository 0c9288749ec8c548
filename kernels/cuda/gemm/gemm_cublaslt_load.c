/* gemm_cublaslt_load.c - finding cublasLt and its functions. Thread: loading thread. */
#include "kernels/cuda/gemm/gemm_cublaslt_load.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static const char *const NAMES[] = { "libcublasLt.so.13", "libcublasLt.so.12" };
/* "": where the dynamic loader looks */
static const char *const FOLDERS[] = { "", "/usr/local/cuda/lib64/", "/usr/local/cuda/lib/" };
enum { N_NAMES = sizeof NAMES / sizeof NAMES[0], N_FOLDERS = sizeof FOLDERS / sizeof FOLDERS[0] };

#define CALL_NAME(name) #name,
static const char *const CALLS[] = { GEMM_CUBLASLT_CALLS(CALL_NAME) };

/* `why` keeps what the loader said. */
static bool open_at(const char *folder, const char *file, struct gemm_cublaslt_loaded *l, char *why,
                    size_t room)
{
    snprintf(l->path, sizeof l->path, "%s%s", folder, file);
    l->handle = dlopen(l->path, RTLD_NOW | RTLD_LOCAL);
    if (!l->handle) snprintf(why, room, "%s", dlerror());
    return l->handle != NULL;
}

static bool open_usual(struct gemm_cublaslt_loaded *l, char *why, size_t room)
{
    for (size_t i = 0; i < N_FOLDERS; i++)
        for (size_t j = 0; j < N_NAMES; j++)
            if (open_at(FOLDERS[i], NAMES[j], l, why, room)) return true;
    return false;
}

static bool open_named(const char *named, struct gemm_cublaslt_loaded *l, char *why, size_t room)
{
    struct stat at;
    char folder[PATH_MAX];
    if (stat(named, &at) != 0 || !S_ISDIR(at.st_mode)) return open_at("", named, l, why, room);
    snprintf(folder, sizeof folder, "%s/", named);
    for (size_t i = 0; i < N_NAMES; i++)
        if (open_at(folder, NAMES[i], l, why, room)) return true;
    return false;
}

static enum status find_calls(struct gemm_cublaslt_loaded *l, struct err *err)
{
    for (size_t i = 0; i < GEMM_CUBLASLT_N_CALLS; i++) {
        l->calls[i] = dlsym(l->handle, CALLS[i]);
        if (!l->calls[i])
            return err_set(err, ERR_UNSUPPORTED,
                           "%s is not a cublasLt that is known here: it has no %s", l->path,
                           CALLS[i]);
    }
    return OK;
}

enum status gemm_cublaslt_load(const char *named, struct gemm_cublaslt_loaded *out, struct err *err)
{
    struct gemm_cublaslt_loaded l = { .handle = NULL };
    char why[ERR_TEXT_MAX / 2] = "";
    if (named && strcmp(named, "off") == 0)
        return err_set(err, ERR_UNSUPPORTED, "BATON_CUBLASLT is off");
    if (!(named && *named ? open_named(named, &l, why, sizeof why)
                          : open_usual(&l, why, sizeof why)))
        return err_set(err, ERR_NOT_FOUND, "no cublasLt%s%s: %s", named && *named ? " at " : "",
                       named && *named ? named : "", why);
    enum status st = find_calls(&l, err);
    if (st != OK) {
        gemm_cublaslt_unload(&l);
        return st;
    }
    *out = l;
    return OK;
}

void gemm_cublaslt_unload(struct gemm_cublaslt_loaded *l)
{
    if (l->handle) dlclose(l->handle);
    l->handle = NULL;
}
