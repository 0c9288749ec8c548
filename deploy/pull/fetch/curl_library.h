/* curl_library.h - libcurl, loaded when a model is pulled and only then: a node that serves has no
 * use for it and the twenty libraries that it brings.
 *
 *     struct curl_library curl; TRY(curl_library_load(&curl, err));
 *     CURL *easy = curl.easy_init();
 *
 * It stays loaded until the process ends. Thread: main. */
#ifndef BATON_DEPLOY_PULL_FETCH_CURL_LIBRARY_H
#define BATON_DEPLOY_PULL_FETCH_CURL_LIBRARY_H

/* Options are passed through pointers, which the header's checking macros do not know. */
#define CURL_DISABLE_TYPECHECK 1
#include <curl/curl.h>

#include "shared/base/err.h"

#define CURL_FUNCTIONS(X)                                                                          \
    X(global_init)                                                                                 \
    X(easy_init)                                                                                   \
    X(easy_cleanup)                                                                                \
    X(easy_reset)                                                                                  \
    X(easy_setopt)                                                                                 \
    X(easy_getinfo)                                                                                \
    X(easy_strerror)                                                                               \
    X(multi_init)                                                                                  \
    X(multi_cleanup)                                                                               \
    X(multi_setopt)                                                                                \
    X(multi_add_handle)                                                                            \
    X(multi_remove_handle)                                                                         \
    X(multi_perform)                                                                               \
    X(multi_poll)                                                                                  \
    X(multi_wakeup)                                                                                \
    X(multi_info_read)                                                                             \
    X(slist_append)                                                                                \
    X(slist_free_all)

struct curl_library {
#define X(name) __typeof__(&curl_##name) name;
    CURL_FUNCTIONS(X)
#undef X
};

/* Fills *out. ERR_UNSUPPORTED: this host has no libcurl, or one that is too old. */
enum status curl_library_load(struct curl_library *out, struct err *err) MUST_CHECK;

#endif
