/* text_bundle.h - what an entry node needs of a model to read and write text, as one run of bytes:
 * tokenizer, chat template and configs, no weights. A node gives it to routers that have no model
 * of their own (GET /cluster/v1/text).
 *
 *     { "version": 1, "model": "<id>", "max_model_len": n, "dummy": false, "names": [...],
 *       "reasoning_parser": "auto", "tool_parser": "hermes",
 *       "files": [{ "name": "config.json", "bytes": n, "size": n }, ...] } "\n"
 *     the bytes of the files, one after the other
 *     64 hexadecimal digits: HMAC-SHA256(cluster secret, all bytes before)
 *
 * Of a GGUF file `bytes` is the part before the tensors and `size` the file's; of all others they
 * are equal. Names are those of a fixed list, so none leads out of a folder. Parsers are as the
 * node's options say; nodes of older versions do not, which is as "auto". Thread: any; it takes
 * milliseconds, so not the loop. */
#ifndef BATON_DEPLOY_TEXT_TEXT_BUNDLE_H
#define BATON_DEPLOY_TEXT_TEXT_BUNDLE_H

#include <stdbool.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum {
    TEXT_BUNDLE_MAX = 192 << 20, /* all of it; tokenizers of today take up to 40 MiB */
    TEXT_FILES_MAX = 256,
    TEXT_NAMES_MAX = 16, /* under which a model is served */
    TEXT_NAME_MAX = 256
};

/* Written as it is. Strings are borrowed. */
struct text_source {
    const char *model_path;    /* a folder, or a .gguf file */
    const char *chat_template; /* the file of --chat-template, or NULL */
    uint64_t model;            /* fingerprint */
    uint32_t max_model_len;
    bool dummy; /* --load-format dummy: a folder without a tokenizer is served too */
    const char *reasoning_parser, *tool_parser; /* as in node_options.h */
    const char *const *names;
    size_t n_names; /* 1 .. TEXT_NAMES_MAX */
};

/* Appends the bundle. ERR_TOO_LONG, ERR_NOT_FOUND and the errors of the readers. */
enum status text_bundle_write(const struct text_source *from, struct str secret, struct buf *out,
                              struct err *err) MUST_CHECK;

struct text_file {
    const char *name;
    struct str bytes;
    uint64_t size;
};

/* A bundle that was read; its strings lie in the bytes and in `doc`. */
struct text_bundle {
    uint64_t model;
    uint32_t max_model_len;
    bool dummy;
    const char *reasoning_parser, *tool_parser; /* known ones */
    const char *names[TEXT_NAMES_MAX];
    size_t n_names;
    struct text_file *files; /* [n_files] */
    size_t n_files;
    void *doc;
};

/* Checks all of it before anything of it is used: ERR_UNAUTHORIZED when the HMAC is another,
 * ERR_FORMAT or ERR_INVALID for what is not as above. The caller releases `out` after OK. */
enum status text_bundle_read(struct str bytes, struct str secret, struct text_bundle *out,
                             struct err *err) MUST_CHECK;
void text_bundle_release(struct text_bundle *b);

/* Writes the files into an empty folder of this process alone. model_path receives the path of the
 * model, chat_template that of the template to use instead of the model's ("": its own). */
enum status text_bundle_unpack(const struct text_bundle *b, const char *folder,
                               struct buf *model_path, struct buf *chat_template,
                               struct err *err) MUST_CHECK;
/* Removes the folder and what unpack wrote. */
void text_bundle_remove(const char *folder);

#endif
