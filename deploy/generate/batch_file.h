/* batch_file.h - the input and the output file of a batch, line by line; for deploy/generate only.
 *
 * Thread: workers, one call at a time: every function may block (a pipe as output for any time, as
 * input for a moment). */
#ifndef BATON_DEPLOY_GENERATE_BATCH_FILE_H
#define BATON_DEPLOY_GENERATE_BATCH_FILE_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { BATCH_LINE_MAX = 64 << 20 /* bytes; a longer line is skipped and reported as malformed */ };

struct batch_file {
    int in, out;        /* file descriptors; -1: none */
    char *input;        /* name */
    char *output;       /* final name; NULL: standard output */
    char *partial;      /* name while incomplete; NULL: written in place */
    struct buf pending; /* read, not yet returned */
    size_t searched;    /* bytes of `pending` known to have no line break */
    bool eof;
    bool begun;    /* a line was read: the next ones are not the file's first */
    bool skipping; /* inside a line that is too long */
};

/* Refuses what would destroy data, with ERR_INVALID and before anything is opened to be written: an
 * output that is the input, a partial file that has the answers of an earlier run. OK for files
 * that cannot be looked at: batch_file_open reports them. */
enum status batch_file_check(const char *input, const char *output, struct err *err) MUST_CHECK;
/* Checks and opens both files; ERR_IO and ERR_NOT_FOUND name the file. The output gets a temporary
 * name only when it is a regular file or does not exist: a device, pipe or link must not be
 * replaced. Does not wait for the other end of a named pipe. */
enum status batch_file_open(struct batch_file *f, const char *input, const char *output,
                            struct err *err) MUST_CHECK;
/* Before the first read. ERR_TIMEOUT: nobody reads the named pipe of the output yet, call again. */
enum status batch_file_await_reader(struct batch_file *f, struct err *err) MUST_CHECK;
/* Reads the next line, without its line break, into `line` (cleared first). ERR_TOO_LONG: the line
 * exceeds BATCH_LINE_MAX and was skipped. ERR_CANCELED: end of input. ERR_TIMEOUT: no complete line
 * yet, call again. */
enum status batch_file_read(struct batch_file *f, struct buf *line, struct err *err) MUST_CHECK;
enum status batch_file_write(struct batch_file *f, struct str text, struct err *err) MUST_CHECK;
/* Closes both; with `complete` gives the output its final name. The partial file of a failed run
 * stays, and no later run overwrites it. */
enum status batch_file_close(struct batch_file *f, bool complete, struct err *err) MUST_CHECK;

#endif
