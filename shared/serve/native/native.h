/* native.h - FastDeploy's native protocol, that of PaddleNLP's llm/server, as a second form of the
 * requests and answers of one path (endpoint.h). docs/native.md describes it for clients.
 *
 *     request   { "text" | "messages" | "input_ids", "req_id", "max_dec_len", "topp", ... }
 *     item      { "req_id", "is_end", "token_ids", "send_idx", "token", ... }
 *
 * A stream is an item per token, each a line; the last one has is_end 1 and the whole answer. A
 * token that may turn out to be the last is held until it is known whether it is, so that the last
 * item has it and send_idx counts no token twice. A whole answer is the last item, with all tokens,
 * and `result`. For shared/serve only. Thread: as in endpoint.h; the others say so. */
#ifndef BATON_SERVE_NATIVE_NATIVE_H
#define BATON_SERVE_NATIVE_NATIVE_H

#include "shared/serve/endpoint.h"

enum {
    NATIVE_LOOK_BYTES = 256 << 10, /* of a body that is not parsed */
    NATIVE_REQ_ID_MAX = 256,       /* bytes */
    NATIVE_TIMEOUT_S = 300,        /* without member timeout */
    NATIVE_TIMEOUT_MAX_S = 24 * 3600
};

/* The native form of /v1/chat/completions, where a text is a user's message if the model has a chat
 * template; of /v1/completions, where it is the prompt; of SERVE_NATIVE_PATH, as chat. */
extern const struct endpoint NATIVE_CHAT, NATIVE_COMPLETIONS, NATIVE_ITEMS;

/* What is only in the native form. Owner: the request. */
struct native_request {
    struct str req_id; /* empty: the client gave none */
    bool return_all, return_usage, benchmark;
    uint32_t timeout_s;
    /* Microseconds since 1970. */
    int64_t came_us, read_us, prepared_us, submitted_us;
    uint64_t t_submit_ns; /* clock_ns */
};

/* native_detect.c */
/* Is a body of the native form? It is when it has a member that only that form has, or
 * response_type fastdeploy; not with response_type openai, nor with OpenAI's prompt and without
 * text and input_ids. Members that are null count as absent. Thread: any. */
bool native_is(const cJSON *doc);
/* The same of a body that was not parsed and may not be JSON at all, as far as its first
 * NATIVE_LOOK_BYTES bytes tell. *req_id: as it stands there; empty: none, or not a plain one.
 * Thread: any. */
bool native_seems(struct str body, struct str *req_id);

/* native_params.c: reads all members but the prompt. Thread: a worker. */
enum status native_params_parse(struct completion_request *c, const cJSON *doc,
                                struct err *err) MUST_CHECK;
/* native_prompt.c: reads the prompt into c->prompts[0]. is_chat: a text is a user's message.
 * Thread: a worker. */
enum status native_prompt_parse(struct completion_request *c, cJSON *doc, bool is_chat,
                                struct err *err) MUST_CHECK;
/* Sets the error of input_ids of which there are more than are read. */
enum status native_ids_too_long(const struct completion_request *c, struct err *err);

/* native_response.c */
extern const struct answer_ops NATIVE_ANSWERS;
void native_write_error(const struct api_error *e, struct buf *out);

/* native_request.c: holds the req_id, which no two requests of this server have at once, and waits
 * for tokens no longer than the request's timeout. Thread: loop. */
enum status native_start(struct completion_request *c, struct err *err) MUST_CHECK;
/* The request has ended, or was never started; may be called again. */
void native_stop(struct completion_request *c);

#endif
