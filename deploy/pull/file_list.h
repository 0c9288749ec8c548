/* file_list.h - the files that a model's source has: a hub's answer, or a folder here.
 *
 * Answers are untrusted. A list is refused as a whole when one of its names could leave the folder
 * that is pulled into (absolute, "..", empty parts, control characters, this program's own), when
 * two names collide, or when it is larger than any model's. Names and sums are what the hub says;
 * whether the bytes agree is for part.h to find out.
 * Life cycle: file_list_read_* fills an empty list, file_list_release. Thread: any. */
#ifndef BATON_DEPLOY_PULL_FILE_LIST_H
#define BATON_DEPLOY_PULL_FILE_LIST_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/mem.h"

enum {
    FILE_NAME_MAX = 1024, /* bytes of a name with its folders */
    LIST_FILES_MAX = 20000,
    LIST_BYTES_MAX = 32 << 20, /* of a hub's answer */
    SUM_BYTES_MAX = 32,
    VERSION_MAX = 80 /* of a commit, or of what stands for one */
};
#define FILE_SIZE_UNKNOWN UINT64_MAX

enum sum_kind {
    SUM_NONE,
    SUM_SHA256, /* of the content */
    SUM_GIT     /* git's name of the content: SHA-1 of "blob SIZE\0" and the content */
};

struct sum {
    enum sum_kind kind;
    uint8_t bytes[SUM_BYTES_MAX]; /* SUM_GIT: the first 20 */
};

struct pull_file {
    const char *name;    /* with '/' between folders; of the list's arena, as the others are */
    const char *url;     /* where it is; NULL: the source's usual place (hub.h) */
    const char *version; /* changes with the content where there is no sum; "" unknown */
    const char *tag;     /* of answers about it: another one is of another content; NULL: unknown */
    const char *modified; /* of answers without a tag, likewise */
    uint64_t size;        /* FILE_SIZE_UNKNOWN: not said */
    struct sum sum;
    bool chosen; /* choose.h */
};

struct file_list {
    struct arena arena;
    struct pull_file *files; /* [n], by name */
    size_t n, cap;
    char commit[VERSION_MAX]; /* "" where the source has none */
};

/* ERR_FORMAT names what is wrong. Hugging Face: the answer about a revision (sha, siblings);
 * ModelScope: about the files of a repository (Data.Files). */
enum status file_list_read_hugging_face(struct str json, struct file_list *out,
                                        struct err *err) MUST_CHECK;
enum status file_list_read_modelscope(struct str json, struct file_list *out,
                                      struct err *err) MUST_CHECK;
/* The regular files of a folder, links followed, hidden ones and deep folders left out. With the
 * sums of an earlier pull into it (marker.h) where the files are still those. ERR_IO. */
enum status file_list_read_folder(const char *folder, struct file_list *out,
                                  struct err *err) MUST_CHECK;
void file_list_release(struct file_list *l);
/* Parses a stranger's JSON with a bounded number of values. */
enum status file_list_parse_json(struct str json, cJSON **out, struct err *err) MUST_CHECK;

/* Adds a file; the name is checked and, as url and version, copied. ERR_FORMAT, ERR_TOO_LONG. */
enum status file_list_add(struct file_list *l, const struct pull_file *f,
                          struct err *err) MUST_CHECK;
/* Sorts by name. ERR_FORMAT: two files of one name, or one that another needs as a folder. */
enum status file_list_finish(struct file_list *l, struct err *err) MUST_CHECK;
/* NULL: there is none of that name. After file_list_finish. */
struct pull_file *file_list_find(const struct file_list *l, const char *name);

/* Is `name` one that may be made below a folder? */
bool file_name_is_safe(struct str name);
/* Reads 64 (SUM_SHA256) or 40 (SUM_GIT) hexadecimal digits, else leaves `out` SUM_NONE. */
void sum_read(struct str hex, enum sum_kind kind, struct sum *out);
bool sum_eq(const struct sum *a, const struct sum *b);
/* Appends "sha256:..." or "git:..."; nothing for SUM_NONE. */
void sum_add(const struct sum *s, struct buf *out);

#endif
