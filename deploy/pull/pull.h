/* pull.h - brings a model to this host: a repository of Hugging Face or ModelScope, .gguf files of
 * any server, or a folder.
 *
 *     source (what) → hub (addresses) → file_list (what there is) → choose (what is needed)
 *         → folder (what is here) → fetch (the rest) → folder_publish
 *
 * Two pulls into one folder at once: the second waits and finds everything there. One that was
 * stopped, killed or broke off goes on where it was. Nothing counts that did not pass its check.
 * Thread: main; signals that end a process are taken while it runs. */
#ifndef BATON_DEPLOY_PULL_PULL_H
#define BATON_DEPLOY_PULL_PULL_H

#include "deploy/pull/source.h"

/* What the options say unless they are given. */
enum {
    PULL_CONNECTIONS = 8,
    PULL_RETRIES = 10,
    PULL_STALL_MS = 10000,
    PULL_CHUNK_BYTES = 64 << 20
};

struct pull_options {
    const char *what;   /* source.h */
    const char *dir;    /* NULL: a folder for it in the cache (model_cache_folder) */
    enum pull_from hub; /* of names without one */
    const char *hf_endpoint, *modelscope_endpoint;
    const char *revision;                        /* NULL: the hub's usual one */
    const char *const *include, *const *exclude; /* [n_include], [n_exclude] patterns */
    size_t n_include, n_exclude;
    uint32_t n_connections, n_retries, stall_ms;
    uint64_t chunk_bytes;
    bool link;           /* of a folder: links to its files in place of copies */
    bool only_if_absent; /* a complete pull is taken as it is, without asking the source */
    bool quiet;          /* no progress */
};

struct pull_result {
    struct buf path;         /* to give as --model: the folder, or its .gguf file */
    uint64_t bytes, fetched; /* of all files; of those that came now */
    size_t n_files;
    struct pull_source source; /* what `what` was read as */
};

/* ERR_CONFIG: an option or the name; ERR_CANCELED: a signal. Other errors: a sentence that says
 * what to do; what came is kept. The caller frees out->path, which is set on success alone. */
enum status pull_run(const struct pull_options *o, struct pull_result *out,
                     struct err *err) MUST_CHECK;

#endif
