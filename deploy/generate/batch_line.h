/* batch_line.h - parses one line of a batch file and writes its output line; for deploy/generate
 * only. Thread: any. */
#ifndef BATON_DEPLOY_GENERATE_BATCH_LINE_H
#define BATON_DEPLOY_GENERATE_BATCH_LINE_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

struct batch_line {
    char *custom_id; /* mem_free; NULL when the line names none */
    const char *url; /* one of two constants */
    struct buf body; /* JSON text */
};

/* ERR_FORMAT and ERR_INVALID say what is wrong; custom_id may be set even then. */
enum status batch_line_parse(struct str text, struct batch_line *out, struct err *err) MUST_CHECK;
void batch_line_release(struct batch_line *l);

/* Appends an output line, with its line break. `body` is JSON text without line breaks. */
void batch_line_answer(struct buf *out, const char *id, const char *custom_id, int status,
                       struct str body);
/* Appends the output line of an input line that never became a request. */
void batch_line_error(struct buf *out, const char *id, const char *custom_id, const char *message);

#endif
