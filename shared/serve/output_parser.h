/* output_parser.h - a chat answer taken apart while it comes: what the model thought, what it says, which tools it calls.
 *
 *     detok ─text─▶ reasoning.h ─rest─▶ tool_parser.h ─▶ choice's text
 *                        └─ thoughts         └─ calls
 *
 * Made only where there is something to find: the model's family thinks aloud, or the request has tools. A streamed answer's
 * parts are written as what is new since the last chunk, a whole one's as they are at the end: both come from the same parsers.
 * Owner: a choice. Thread: loop (the writers: whoever has the call). */
#ifndef BATON_SERVE_OUTPUT_PARSER_H
#define BATON_SERVE_OUTPUT_PARSER_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/buf.h"

struct call;
struct parts;

/* NULL when all text is the answer. */
struct parts *parts_create(const struct call *c);
void          parts_free(struct parts *p);

/* Where the detokeniser's text goes before parts_take. */
struct buf   *parts_text(struct parts *p);
/* Special token `id` is a tag that the parsers must see. */
bool          parts_show(const struct parts *p, int32_t id);
/* The text of one more token is there. What is certain to be said is appended to `content`. False: no more is wanted. */
bool          parts_take(struct parts *p, struct buf *content);
/* The last text is there. cut: ended by length, a stop string or this side. */
void          parts_finish(struct parts *p, bool cut, struct buf *content);

uint32_t      parts_n_calls(const struct parts *p); /* that are no failures */
uint32_t      parts_n_reasoning_tokens(const struct parts *p);
/* Thoughts or calls: an empty content is then none at all. NULL: no. */
bool          parts_are_there(const struct parts *p);

/* Members of a whole message, each with a comma before it. */
void          parts_write(const struct parts *p, bool reasoning, struct buf *out);
/* Members of a delta; first: none stands before them. */
void          parts_write_delta(const struct parts *p, bool reasoning, bool first, struct buf *out);
/* Whether the delta would have any. */
bool          parts_has_news(const struct parts *p, bool reasoning);
/* The delta went out. */
void          parts_sent(struct parts *p);

#endif
