/* batch_file.h - the two files of a batch: lines in, lines out. For shared/offline only.
 *
 * Every function may block (a pipe as output; as input, for a moment), so they run on worker
 * threads, one at a time. */
#ifndef BATON_DEPLOY_GENERATE_BATCH_FILE_H
#define BATON_DEPLOY_GENERATE_BATCH_FILE_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { BATCH_LINE_MAX = 64 << 20 /* bytes; a longer line is skipped and reported as malformed */ };

struct batch_file {
    int in, out;        /* file descriptors; -1: none */
    char *input;        /* name */
    char *output;       /* final name; NULL: standard output */
    char *partial;      /* the name until then; NULL: written in place */
    struct buf pending; /* read, not yet given out */
    size_t searched;    /* of pending, without a line break */
    bool eof;
    bool skipping; /* the rest of a line that is too long */
};

/* ERR_IO / ERR_NOT_FOUND name the file. Only a regular file, or a name that is free, is written
 * under another name first: a device, a pipe or a link must not be replaced. */
enum status batch_file_open(struct batch_file *f, const char *input, const char *output,
                            struct err *err) MUST_CHECK;
/* The next line without its break into `line` (cleared first). ERR_TOO_LONG: there was one that is
 * too long. ERR_CANCELED: there are no more. ERR_TIMEOUT: whoever writes the input takes its
 * time. */
enum status batch_file_read(struct batch_file *f, struct buf *line, struct err *err) MUST_CHECK;
enum status batch_file_write(struct batch_file *f, struct str text, struct err *err) MUST_CHECK;
/* Close; with `complete` give the output its final name. A partial file of a failed run is left for
 * inspection. */
enum status batch_file_close(struct batch_file *f, bool complete, struct err *err) MUST_CHECK;

#endif
