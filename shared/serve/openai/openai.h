/* openai.h - the dialect: how requests of each path are read and answers are written. For
 * shared/serve only.
 *
 * Answers are written by hand into a buffer rather than as trees: a chunk per token is the face's
 * main work. Thread: prepare and write_body a worker (or the loop); the chunk writers the loop. */
#ifndef BATON_SERVE_OPENAI_OPENAI_H
#define BATON_SERVE_OPENAI_OPENAI_H

#include "shared/base/json/json.h"
#include "shared/base/sampling.h"
#include "shared/serve/openai/openai_tools.h"
#include "shared/serve/serve_state.h"

struct completion_request;
struct choice;

struct openai_endpoint {
    const char *id_prefix, *object, *chunk_object;
    /* Fill c->p, c->prompts, or, for a path answered at once, c->out. `doc` may be changed. */
    enum status (*prepare)(struct completion_request *c, cJSON *doc, struct err *err);
    /* The element of "choices" in a whole answer; the same in a chunk (finish: the last of this
     * choice). NULL: no sequences. */
    void (*write_choice)(const struct choice *ch, struct buf *out);
    void (*write_chunk)(const struct choice *ch, bool finish, struct buf *out);
    /* Members at the top level of a whole answer, and of the first chunk of a choice; each begins
     * with a comma. May be NULL. */
    void (*write_top)(const struct choice *ch, bool chunk, struct buf *out);
    bool parses_output; /* answers are taken apart (output_parser.h) */
};

extern const struct openai_endpoint OPENAI_CHAT, OPENAI_COMPLETIONS, OPENAI_TOKENIZE,
    OPENAI_DETOKENIZE;

/* openai_prompt.c: text or ids to c->prompts[i], cut and held against the context length. */
struct openai_prompt_input {
    const char *param; /* member for errors */
    const char *place; /* "messages" or "prompt", for the sentence */
    struct str text;   /* or */
    const cJSON *ids;
};
enum status openai_add_prompt(struct completion_request *c, uint32_t i,
                              const struct openai_prompt_input *input, struct err *err) MUST_CHECK;
/* Number of prompts becomes known: room for them. */
void openai_alloc_prompts(struct completion_request *c, uint32_t n);

/* openai_chat.c: member messages and what belongs to it, checked and rendered; also for
 * /tokenize. */
struct openai_answer_start {
    enum reasoning_state reasoning; /* out: where the answer begins */
    struct buf *tool_call_prefix;   /* the text of a call that the prompt begins is
                                     * appended; may be NULL */
};
enum status openai_render_chat(const struct serve *s, cJSON *doc, const struct openai_tools *tools,
                               struct openai_answer_start *o, struct buf *out,
                               struct err *err) MUST_CHECK;

/* openai_response.c */
/* c->head; each answer is head, object and members */
void openai_write_head(struct completion_request *c);
/* the whole answer into c->out */
void openai_write_body(struct completion_request *c);
void openai_write_usage(const struct completion_request *c, struct buf *out); /* the object */
/* the object of member "baton" */
void openai_write_trace(const struct completion_request *c, struct buf *out);
/* "finish_reason":..,"stop_reason":.. */
void openai_write_finish(const struct choice *ch, bool finish, struct buf *out);
/* ,"name":[..] */
void openai_write_ids(struct buf *out, const char *name, const int32_t *ids, size_t n);

/* openai_logprobs.c */
void openai_logprobs_store(struct buf *records, const struct token_logprobs *t, int32_t n_top,
                           uint32_t offset);
void openai_write_chat_logprobs(const struct choice *ch, struct buf *out);
/* with_prompt: echo, and this is the first or only piece of the choice. */
void openai_write_completion_logprobs(const struct choice *ch, bool with_prompt, struct buf *out);
void openai_write_prompt_logprobs(const struct choice *ch, struct buf *out);
/* The choice that received the prompt logprobs for this choice's prompt. */
const struct choice *openai_prompt_source(const struct choice *ch);
/* Characters that token `id` begins: the sum over tokens is the length of their text. */
uint32_t openai_token_chars(const struct choice *ch, int32_t id);
uint32_t openai_text_chars(struct str text);

/* openai_errors.c */
void openai_write_error(struct buf *out, int http_status, const char *code, const char *message,
                        const char *param);
/* HTTP status of a failed call; a canceled sequence is this node's doing (shutting down), so
 * 503. */
int openai_error_status(enum status st);

/* openai_models.c */
void openai_write_models(const struct serve *s, struct buf *out);
bool openai_write_model(const struct serve *s, const char *name, struct buf *out);

#endif
