/* endpoint.h - what a path does with a body, and how it writes: the interface between a completion
 * request, whose way is the same for all, and OpenAI's API (openai/) or FastDeploy's native
 * protocol (native/).
 *
 *     prepare ──▶ start ──▶ { has_event, write_event } per token ──▶ write_usage ──▶ stream_end
 *                   └─────▶ write_body                          at any time, at the end: write_error
 *
 * A path has one endpoint; a body in the native form turns to that endpoint's `native` once it is
 * read. For shared/serve only. Thread: prepare and write_body a worker (or the loop); write_error
 * any; the others the loop. */
#ifndef BATON_SERVE_ENDPOINT_H
#define BATON_SERVE_ENDPOINT_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/json/json.h"

struct completion_request;
struct choice;
struct openai_form;

/* Why a request fails. */
struct api_error {
    int http;
    const char *code;    /* a word of OpenAI's; NULL: none */
    const char *message; /* a sentence for the client */
    const char *param;   /* the member at fault; NULL: none */
    struct str req_id;   /* as the client knows the request */
};

/* How the answers of sequences are written. */
struct answer_ops {
    bool lines;             /* a stream is lines of JSON, not events */
    bool keeps_all;         /* the last chunk has all text and ids again: choices keep them */
    const char *stream_end; /* after the last chunk; NULL: nothing */
    /* The choices are there: checks what only the loop knows, and prepares for the answer. */
    enum status (*start)(struct completion_request *c, struct err *err);
    /* Is there anything to tell of the tokens since the last chunk? */
    bool (*has_event)(const struct choice *ch);
    /* Writes a chunk: what came since the last one; finish: the last of this choice. */
    void (*write_event)(const struct choice *ch, bool finish, struct buf *out);
    /* Writes the chunk after the last, with c->p.include_usage. */
    void (*write_usage)(const struct completion_request *c, struct buf *out);
    /* Writes the whole answer into c->out. */
    void (*write_body)(struct completion_request *c);
};

struct endpoint {
    const char *object; /* what it makes; part of what an answer depends on (resume_digest) */
    bool parses_output; /* answers go through output_parser.h */
    const struct answer_ops *answers; /* NULL: no sequences, prepare writes the whole answer */
    const struct endpoint *native;    /* of the same path, for bodies in the native form, or NULL */
    const struct openai_form *openai; /* NULL: native, or no sequences */
    /* Fills in c->p and c->prompts, or c->out for a path without sequences. May change `doc`. */
    enum status (*prepare)(struct completion_request *c, cJSON *doc, struct err *err);
    void (*write_error)(const struct api_error *e, struct buf *out);
};

#endif
