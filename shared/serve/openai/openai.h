/* openai.h - OpenAI's API: reads the requests and writes the answers of each path. For shared/serve
 * only.
 *
 * Answers are written directly into a buffer, not as cJSON trees, since a chunk per token is the
 * API server's main work. Thread: as endpoint.h says. */
#ifndef BATON_SERVE_OPENAI_OPENAI_H
#define BATON_SERVE_OPENAI_OPENAI_H

#include "shared/base/sampling.h"
#include "shared/serve/endpoint.h"
#include "shared/serve/openai/openai_tools.h"
#include "shared/serve/serve_state.h"

/* In what the answers of chat and of completions differ. */
struct openai_form {
    const char *id_prefix, *chunk_object;
    /* Writes the element of "choices" in a whole answer, or in a chunk (finish: the last chunk of
     * this choice). */
    void (*write_choice)(const struct choice *ch, struct buf *out);
    void (*write_chunk)(const struct choice *ch, bool finish, struct buf *out);
    /* Writes members of the top level of a whole answer, or of the first chunk of a choice; each
     * begins with a comma. */
    void (*write_top)(const struct choice *ch, bool chunk, struct buf *out);
};

extern const struct endpoint OPENAI_CHAT, OPENAI_COMPLETIONS, OPENAI_TOKENIZE, OPENAI_DETOKENIZE;

struct completion_prompt;

/* openai_prompt.c: a prompt as text or ids. */
struct openai_prompt_input {
    const char *param; /* member for errors */
    const char *place; /* "messages" or "prompt", for errors */
    struct str text;   /* or */
    const cJSON *ids;
};
/* Tokenises a prompt, or takes its ids, and stores it in c->prompts[i]. */
enum status openai_read_prompt(struct completion_request *c, uint32_t i,
                               const struct openai_prompt_input *input, struct err *err) MUST_CHECK;
/* Sees to it that the prompt is found by what it is (resume.h). */
void openai_name_prompt(struct completion_prompt *q);
/* openai_read_prompt; then it is truncated and checked. */
enum status openai_add_prompt(struct completion_request *c, uint32_t i,
                              const struct openai_prompt_input *input, struct err *err) MUST_CHECK;
/* Returns the most tokens of one text or array of ids that are read before it is refused. */
size_t openai_tokens_max(const struct completion_request *c);
/* Sets the error of an array of ids that has more. */
enum status openai_ids_too_long(const struct completion_request *c, const char *param,
                                struct err *err);
/* Allocates c->prompts. */
void openai_alloc_prompts(struct completion_request *c, uint32_t n);

/* openai_chat.c: checks and renders the messages; also for /tokenize. */
struct openai_answer_start {
    int64_t now; /* Unix time, which the template may show; the answer's, so that it stays */
    enum reasoning_state reasoning; /* out: in which the answer begins */
    struct buf *tool_call_prefix;   /* gets the beginning of a tool call in the prompt; or NULL */
};
enum status openai_render_chat(const struct serve *s, cJSON *doc, const struct openai_tools *tools,
                               struct openai_answer_start *o, struct buf *out,
                               struct err *err) MUST_CHECK;

/* openai_response.c: what both paths share. */
extern const struct answer_ops OPENAI_ANSWERS;
/* Writes the value of member "usage". */
void openai_write_usage(const struct completion_request *c, struct buf *out);
/* Writes the value of member "baton". */
void openai_write_trace(const struct completion_request *c, struct buf *out);
/* Writes "finish_reason":..,"stop_reason":.. */
void openai_write_finish(const struct choice *ch, bool finish, struct buf *out);
/* Writes ,"name":[..] */
void openai_write_ids(struct buf *out, const char *name, const int32_t *ids, size_t n);

/* openai_logprobs.c */
void openai_logprobs_store(struct buf *records, const struct token_logprobs *t, int32_t n_top,
                           uint32_t offset);
void openai_write_chat_logprobs(const struct choice *ch, struct buf *out);
/* with_prompt: echo, in the whole answer or the first chunk of the choice. */
void openai_write_completion_logprobs(const struct choice *ch, bool with_prompt, struct buf *out);
void openai_write_prompt_logprobs(const struct choice *ch, struct buf *out);
/* Returns how many characters begin in token `id`; the sum over tokens is the length of the
 * text. */
uint32_t openai_token_chars(const struct choice *ch, int32_t id);
uint32_t openai_text_chars(struct str text);

/* openai_size.c */
/* Sets c->n_answer to what the prompts add to the answer. ERR_INVALID, with the member at fault:
 * the answer is certain to be too long. */
enum status openai_check_size(struct completion_request *c, struct err *err) MUST_CHECK;
/* Returns what one generated token adds to the answer. */
size_t openai_token_bytes(const struct completion_request *c, int32_t id);
/* Sets the error of an answer that became too long; of texts of n bytes that would. */
enum status openai_answer_too_long(const struct completion_request *c, struct err *err);
enum status openai_text_too_long(const struct completion_request *c, const char *field, size_t n,
                                 struct err *err);

/* openai_errors.c */
void openai_write_error(const struct api_error *e, struct buf *out);
/* Sets the HTTP status and the code of a failed request. ERR_CANCELED (the node is shutting down)
 * is 503. */
struct api_error openai_error_of(enum status st, const char *message, const char *param);

/* openai_models.c */
void openai_write_models(const struct serve *s, struct buf *out);
/* False: this node serves no model of this name. */
bool openai_write_model(const struct serve *s, const char *name, struct buf *out);

#endif
