/* output_parser.h - a chat answer taken apart while it comes: what the model thought, what it says,
 * which tools it calls.
 *
 *     detok ─text─▶ reasoning.h ─rest─▶ tool_parser.h ─▶ choice's text
 *                        └─ thoughts         └─ calls
 *
 * Made only where there is something to find: the model's family thinks aloud, or the request has
 * tools. A streamed answer's parts are written as what is new since the last chunk, a whole one's
 * as they are at the end: both come from the same parsers. Owner: a choice. Thread: loop (the
 * writers: whoever has the call). */
#ifndef BATON_SERVE_OUTPUT_PARSER_H
#define BATON_SERVE_OUTPUT_PARSER_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/buf.h"

struct completion_request;
struct output_parser;

/* NULL when all text is the answer. */
struct output_parser *output_parser_create(const struct completion_request *c);
void output_parser_free(struct output_parser *p);

/* Where the detokeniser's text goes before output_parser_push. */
struct buf *output_parser_input(struct output_parser *p);
/* Special token `id` is a tag that the parsers must see. */
bool output_parser_needs_token(const struct output_parser *p, int32_t id);
/* The text of one more token is there. What is certain to be said is appended to `content`. False:
 * no more is wanted. */
bool output_parser_push(struct output_parser *p, struct buf *content);
/* The last text is there. cut: ended by length, a stop string or this side. */
void output_parser_finish(struct output_parser *p, bool cut, struct buf *content);

uint32_t output_parser_n_tool_calls(const struct output_parser *p); /* that are no failures */
uint32_t output_parser_n_reasoning_tokens(const struct output_parser *p);
/* Thoughts or calls: an empty content is then none at all. NULL: no. */
bool output_parser_has_output(const struct output_parser *p);

/* Members of a whole message, each with a comma before it. */
void output_parser_write(const struct output_parser *p, bool reasoning, struct buf *out);
/* Members of a delta; first: none stands before them. */
void output_parser_write_delta(const struct output_parser *p, bool reasoning, bool first,
                               struct buf *out);
/* Whether the delta would have any. */
bool output_parser_has_delta(const struct output_parser *p, bool reasoning);
/* The delta went out. */
void output_parser_delta_sent(struct output_parser *p);

#endif
