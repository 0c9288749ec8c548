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

/* ERR_FORMAT and ERR_INVALID say what is wrong; custom_id may be set even then. ignore_model: the
 * body's own model name is dropped, so that the one model there is answers. */
enum status batch_line_parse(struct str text, bool ignore_model, struct batch_line *out,
                             struct err *err) MUST_CHECK;
/* Makes the request of a line of plain text, which is a prompt: as a message of a chat, or with
 * `raw` as it is. custom_id becomes the line's number. */
void batch_line_from_prompt(struct str prompt, uint64_t number, bool raw, struct batch_line *out);
void batch_line_release(struct batch_line *l);

/* Appends an output line, with its line break. `body` is JSON text without line breaks; unless the
 * status is 200, the line's "error" has its message. */
void batch_line_answer(struct buf *out, const char *id, const char *custom_id, int status,
                       struct str body);
/* Appends the message of an answer that is an error. Both paths exist, so 404 is another model. */
void batch_line_message(int status, struct str body, struct buf *out);
/* Appends the output line of an input line that never became a request. */
void batch_line_error(struct buf *out, const char *id, const char *custom_id, const char *message);

#endif
