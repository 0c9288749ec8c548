/* file_map.h - a file as read-only memory, and small files read whole.
 *
 * A mapping stays valid until file_map_close. LIMIT: a file that another program shortens while it
 * is mapped ends this process with SIGBUS; model files are expected to be replaced, not rewritten.
 * Thread: any, one owner. */
#ifndef BATON_MODEL_LOAD_FILE_MAP_H
#define BATON_MODEL_LOAD_FILE_MAP_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

struct file_map {
    const uint8_t *data; /* NULL when nothing is mapped or the file is empty */
    size_t bytes;
    uint64_t changed_ns; /* time of the last change, since 1970; wraps: compare for equality only */
};

enum status file_map_open(const char *path, struct file_map *out, struct err *err) MUST_CHECK;
void file_map_close(struct file_map *m);
/* Takes the file's pages out of this process's memory until they are read again. */
void file_map_unload(const struct file_map *m);

/* Appends the whole file to `out`. ERR_NOT_FOUND; ERR_TOO_LONG over `limit` bytes. */
enum status file_read(const char *path, size_t limit, struct buf *out, struct err *err) MUST_CHECK;
bool file_is_folder(const char *path);
bool file_is_regular(const char *path);

#endif
