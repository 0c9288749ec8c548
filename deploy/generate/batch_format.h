/* batch_format.h - which kind of file a batch is, by its first line that is not blank; for
 * deploy/generate only.
 *
 * A first line that begins with { makes it a file of batch lines, any other one a file of prompts.
 * What is neither is refused with a sentence that says what would be right, since each line of it
 * would become a prompt that nobody meant: a JSON array, an object over several lines or the end of
 * one, UTF-16, a file that is not text, a second line that is a batch line when the first made it a
 * file of prompts. Thread: any. */
#ifndef BATON_DEPLOY_GENERATE_BATCH_FORMAT_H
#define BATON_DEPLOY_GENERATE_BATCH_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"
#include "shared/base/str.h"

/* `name` and `number` are the file's and the line's. *prompts: each line is a prompt. ERR_FORMAT
 * names both. */
enum status batch_format_of(struct str line, const char *name, uint64_t number, bool *prompts,
                            struct err *err) MUST_CHECK;
/* ERR_FORMAT, without the file's and the line's name: in a file of prompts, which line `first` made
 * it, this line is a whole JSON object of a batch. */
enum status batch_format_prompt(struct str line, uint64_t first, struct err *err) MUST_CHECK;
/* Looks at the first two lines, before anything that takes long. OK as well for what is not a
 * regular file, cannot be read or has longer ones: whoever reads it all reports it. */
enum status batch_format_check(const char *path, struct err *err) MUST_CHECK;

/* The line without the byte order mark of UTF-8. */
struct str batch_format_skip_mark(struct str line);

#endif
