/* output_parser.h - splits a chat answer into reasoning, content and tool calls while it arrives.
 *
 *     detok ─text─▶ reasoning.h ─rest─▶ tool_parser.h ─▶ choice's text
 *                        └─ reasoning        └─ tool calls
 *
 * A choice has one only when the model has a reasoning format or the request has tools. A chunk of
 * a streamed answer gets what is new since the last chunk, a whole answer everything at the end.
 * Owner: a choice. Thread: loop (the writers: the owner of the completion request). */
#ifndef BATON_SERVE_OUTPUT_PARSER_H
#define BATON_SERVE_OUTPUT_PARSER_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/buf.h"
#include "shared/base/hash/hash.h"

struct completion_request;
struct output_parser;

/* NULL: all text is content. The ids of tool calls are made from `digest`, so that an answer that
 * is computed again has the same. */
struct output_parser *output_parser_create(const struct completion_request *c,
                                           struct hash128 digest);
void output_parser_free(struct output_parser *p);

/* The buffer that takes the detokenizer's text before output_parser_push. */
struct buf *output_parser_input(struct output_parser *p);
/* Returns whether special token `id` is a tag that the parsers must see. */
bool output_parser_needs_token(const struct output_parser *p, int32_t id);
/* Parses the text of one more token and appends what is certainly content to `content`. False: the
 * answer is complete. */
bool output_parser_push(struct output_parser *p, struct buf *content);
/* Parses the last text. cut: the answer was ended by its length, a stop string or this server. */
void output_parser_finish(struct output_parser *p, bool cut, struct buf *content);

uint32_t output_parser_n_tool_calls(const struct output_parser *p); /* well-formed ones */
uint32_t output_parser_n_reasoning_tokens(const struct output_parser *p);
/* Returns whether there is reasoning or a tool call; then an empty content is written as null. p
 * may be NULL. */
bool output_parser_has_output(const struct output_parser *p);

/* Writes the members of a whole message, each with a comma before it. */
void output_parser_write(const struct output_parser *p, bool reasoning, struct buf *out);
/* Writes the members of a delta. first: no member precedes them. */
void output_parser_write_delta(const struct output_parser *p, bool reasoning, bool first,
                               struct buf *out);
/* Returns whether the delta would have any members. */
bool output_parser_has_delta(const struct output_parser *p, bool reasoning);
/* The delta was sent. */
void output_parser_delta_sent(struct output_parser *p);

#endif
