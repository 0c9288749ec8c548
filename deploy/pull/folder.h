/* folder.h - the folder that a model is pulled into. What is not complete lies apart, so that a
 * folder with a config.json, and a .gguf file, is complete:
 *
 *     DIR/.baton-pull/lock            flock of the pull at work; ends with its process
 *     DIR/.baton-pull/HASH.part       a file in the making, HASH of its name (part.h)
 *     DIR/.baton-pull/HASH.journal    how far it is
 *     DIR/.baton-pull/checked.json    what is whole already, as in the marker
 *     DIR/.baton-pull.json            the marker: the folder is complete, with these files
 *
 * folder_publish takes marker and config.json away, moves the files to their places, config.json
 * last, and writes the marker. After a crash at any point the next pull finds each file at one of
 * its two places; until then nothing can load half a model.
 * Life cycle: folder_open, folder_lock, ..., folder_publish, folder_close. Thread: main. */
#ifndef BATON_DEPLOY_PULL_FOLDER_H
#define BATON_DEPLOY_PULL_FOLDER_H

#include "deploy/pull/marker.h"

#define FOLDER_STAGING ".baton-pull"

struct pull_folder {
    struct buf path, staging;
    int lock_fd;         /* -1: not locked */
    bool is_new;         /* folder_open made it */
    struct marker known; /* what is whole: of the marker, and of a pull that has not ended */
};

/* Where a file is. */
enum folder_place {
    FOLDER_ABSENT,   /* not there, or in the making */
    FOLDER_STAGED,   /* whole and checked in .baton-pull */
    FOLDER_AT_PLACE, /* whole and checked at its place */
    FOLDER_UNKNOWN   /* something is at its place that no pull has put there, or that changed */
};

/* Makes the folder where it is not there. ERR_IO. */
enum status folder_open(const char *path, struct pull_folder *out, struct err *err) MUST_CHECK;
/* Takes the lock and reads what is known. ERR_BUSY: another pull has it; *pid (may be 0) is its
 * process. */
enum status folder_lock(struct pull_folder *f, int *pid, struct err *err) MUST_CHECK;
/* Leaves nothing behind where nothing was kept. */
void folder_close(struct pull_folder *f);

/* What a source says of a file, for comparison with what was pulled: its sum, or else its version;
 * "" when it says nothing. */
void folder_identity(const struct pull_file *file, struct buf *out);
enum folder_place folder_find(const struct pull_folder *f, const struct pull_file *file);
/* The paths of a file at its place, of it in the making, and of its journal. */
void folder_path_of(const struct pull_folder *f, const char *name, struct buf *out);
void folder_part_of(const struct pull_folder *f, const char *name, struct buf *out);
void folder_journal_of(const struct pull_folder *f, const char *name, struct buf *out);
/* Writes down that the file at `path` (its place, or its part) is whole, with this sum. ERR_IO. */
enum status folder_add_checked(struct pull_folder *f, const struct pull_file *file,
                               const char *path, const struct sum *sha256,
                               struct err *err) MUST_CHECK;
/* Moves the chosen files of `list`, all of them whole, to their places, removes those of an earlier
 * pull that the list has no more, or has otherwise, and writes the marker. ERR_IO: the next pull
 * goes on. */
enum status folder_publish(struct pull_folder *f, const struct file_list *list, const char *source,
                           struct err *err) MUST_CHECK;

/* Bytes that the file system has left for this user. */
uint64_t folder_free_bytes(const struct pull_folder *f);

#endif
