/* marker.h - what is known of files that were pulled: the file .baton-pull.json, which says that a
 * folder is complete, and the same of a pull that has not ended.
 *
 *     {"baton-pull": 1, "source": "...", "commit": "...", "files": [
 *       {"name": "...", "size": N, "changed_ns": "N", "sha256": "...", "identity": "..."}]}
 *
 * changed_ns is the file's modification time: a file of that size and time is the one whose sum was
 * computed. identity is what the source said of the content (its sum, or its version): equal ones
 * need no transfer.
 * Life cycle: marker_init, marker_read, marker_put, marker_write, marker_release. Thread: main. */
#ifndef BATON_DEPLOY_PULL_MARKER_H
#define BATON_DEPLOY_PULL_MARKER_H

#include "deploy/pull/file_list.h"
#include "shared/base/map.h"
#include "shared/model/load/model_files.h"

#define MARKER_NAME MODEL_PULLED

struct marker_file {
    const char *name;     /* of the marker's arena */
    const char *identity; /* "" : the source said nothing that a later pull could compare */
    uint64_t size;
    int64_t changed_ns;
    struct sum sha256; /* SUM_NONE: a link */
};

struct marker {
    struct arena arena;
    struct map files; /* name: struct marker_file */
    const char *source, *commit;
};

void marker_init(struct marker *m);
void marker_release(struct marker *m);
/* Adds what the file says, over what is there. OK and nothing where there is no such file;
 * ERR_FORMAT: it is none of ours or was damaged. */
enum status marker_read(struct marker *m, const char *path, struct err *err) MUST_CHECK;
/* Replaces the file at once: after a crash it is the old one or the new one. ERR_IO. */
enum status marker_write(const struct marker *m, const char *path, struct err *err) MUST_CHECK;
const struct marker_file *marker_find(const struct marker *m, const char *name);
/* Copies f and its texts; an older one of the name is forgotten. */
void marker_put(struct marker *m, const struct marker_file *f);
void marker_set_source(struct marker *m, const char *source, const char *commit);

/* Writes a file in one step, with its bytes on the disk: to PATH.new, then renamed. ERR_IO. */
enum status marker_write_file(const char *path, struct str bytes, struct err *err) MUST_CHECK;
/* The folder of a path, for fsync: what was renamed into it is there after a loss of power. */
void marker_sync_folder_of(const char *path);

#endif
