/* openai_size.c - bounds the length of a whole answer, which is held until its client has read it.
 *
 * What a request is certain to get (its prompts' logprobs, texts and ids, and the tokens that it
 * demands) is estimated before anything is computed; what the model generates is added as it comes.
 * Lengths are those of the formats, with a usual logprob and the token's own spelling. A streamed
 * answer holds a chunk at a time, so only the parts of its prompts count. Thread: openai_check_size
 * a worker; the others the loop. */
#include <stdio.h>

#include "shared/serve/completion_request.h"

/* Bytes of the formats, without the text of the token that was chosen. */
enum {
    ID_BYTES = 7,
    COMPLETION_POSITION = 24,
    COMPLETION_ENTRY = 20, /* "text":-12.345678, */
    CHAT_POSITION = 66,    /* {"token":..,"logprob":..,"bytes":[..],"top_logprobs":[..]} */
    CHAT_ENTRY = 70,
    PROMPT_ENTRY = 70 /* "id":{"logprob":..,"rank":..,"decoded_token":".."} */
};

/* A part of the answer that grows with a member of the request. */
struct answer_part {
    const char *field;
    size_t n_tokens, n_bytes;
    size_t n_each; /* logprobs of a token */
};

static size_t piece_bytes(const struct completion_request *c, int32_t id)
{
    return tokenizer_piece(c->serve->o.tokenizer, id).n;
}

/* Bytes of the logprobs of n_tokens tokens whose spellings have n_text bytes. */
static size_t logprobs_bytes(const struct completion_request *c, size_t n_tokens, size_t n_text)
{
    size_t k = (size_t)c->p.n_logprobs;
    if (!c->endpoint->parses_output)
        return n_tokens * (COMPLETION_POSITION + (k + 1) * COMPLETION_ENTRY) + n_text;
    return n_tokens * (CHAT_POSITION + (k ? (k + 1) * CHAT_ENTRY : 0)) + 5 * n_text;
}

/* The member that makes what is generated long. */
static const char *output_field(const struct completion_request *c)
{
    if (!c->endpoint->openai) return "max_dec_len";
    if (c->p.n_logprobs < 0) return "max_tokens";
    return c->endpoint->parses_output && c->p.n_logprobs > 0 ? "top_logprobs" : "logprobs";
}

static size_t output_bytes(const struct completion_request *c, size_t n_tokens, size_t n_text)
{
    size_t n = n_text;
    if (c->endpoint->answers->keeps_all) return 3 * n_text + 2 * n_tokens * ID_BYTES; /* native.h */
    if (c->p.n_logprobs >= 0) n += logprobs_bytes(c, n_tokens, n_text);
    if (c->p.return_token_ids) n += n_tokens * ID_BYTES;
    return n;
}

/* Tokens that each sequence generates whatever the model says. */
static size_t certain_tokens(const struct openai_params *p)
{
    const struct sampling_params *q = &p->sampling;
    bool all = q->ignore_eos && p->max_tokens_set && p->n_stops == 0 && q->n_stop_ids == 0;
    return all ? q->max_tokens : q->min_tokens;
}

size_t openai_token_bytes(const struct completion_request *c, int32_t id)
{
    return output_bytes(c, 1, piece_bytes(c, id));
}

/* "562 MiB", or bytes when it is less than one. */
static void write_size(char out[32], size_t n)
{
    if (n < 1 << 20) snprintf(out, 32, "%zu bytes", n);
    else snprintf(out, 32, "%zu MiB", n >> 20);
}

static enum status refuse(const struct completion_request *c, const struct answer_part *p,
                          size_t n_bytes, struct err *err)
{
    char size[32], most[32];
    write_size(size, n_bytes);
    write_size(most, c->serve->max_answer);
    return err_field(err, ERR_INVALID, p->field,
                     "with this %s the answer would be about %s long (%zu tokens of %u prompts "
                     "with n = %u, and %zu logprobs of each), but at most %s are possible; ask for "
                     "less, or in several requests",
                     p->field, size, p->n_tokens, c->n_prompts, c->p.n, p->n_each, most);
}

enum { PART_PROMPT_LOGPROBS, PART_ECHO_LOGPROBS, PART_ECHO, PART_IDS, PART_OUTPUT, PARTS };

/* Estimates the parts that are certain. */
static void measure(const struct completion_request *c, struct answer_part *parts)
{
    const struct openai_params *p = &c->p;
    bool chat = c->endpoint->parses_output, echo = p->echo && p->n_logprobs >= 0;
    size_t n = 0, n_text = 0, n_echo = 0, once = chat ? 1 : p->n; /* for chat beside the choices */
    for (uint32_t i = 0; i < c->n_prompts; i++) {
        const struct completion_prompt *q = &c->prompts[i];
        n += q->n_tokens;
        n_echo += q->text.len;
        for (size_t k = 0; k < q->n_tokens && (echo || p->n_prompt_logprobs >= 0); k++)
            n_text += piece_bytes(c, q->tokens[k]);
    }
    size_t n_out = p->stream ? 0 : certain_tokens(p) * c->n_prompts * p->n;
    size_t n_entries = (size_t)(p->n_prompt_logprobs + 1), n_top = (size_t)(p->n_logprobs + 1);
    size_t n_ranked = n_entries ? once * (n * n_entries * PROMPT_ENTRY + n_text) : 0;
    size_t n_echoed = echo ? p->n * logprobs_bytes(c, n, n_text) : 0;
    size_t n_ids = (p->n + chat) * n;
    parts[PART_PROMPT_LOGPROBS] = (struct answer_part){ "prompt_logprobs", once * n, n_ranked,
                                                        n_entries };
    parts[PART_ECHO_LOGPROBS] = (struct answer_part){ "logprobs", p->n * n, n_echoed, n_top };
    parts[PART_ECHO] = (struct answer_part){ "echo", p->n * n, p->n * n_echo, 0 };
    parts[PART_IDS] = (struct answer_part){ "return_token_ids", n_ids,
                                            p->return_token_ids ? n_ids * ID_BYTES : 0, 0 };
    parts[PART_OUTPUT] = (struct answer_part){ output_field(c), n_out,
                                               output_bytes(c, n_out, 4 * n_out), n_top };
}

enum status openai_check_size(struct completion_request *c, struct err *err)
{
    struct answer_part parts[PARTS];
    const struct answer_part *most = parts;
    size_t n = 0;
    measure(c, parts);
    for (size_t i = 0; i < PARTS; i++) {
        n += parts[i].n_bytes;
        if (parts[i].n_bytes > most->n_bytes) most = &parts[i];
    }
    if (n > c->serve->max_answer) return refuse(c, most, n, err);
    c->n_answer = n - parts[PART_OUTPUT].n_bytes; /* which is counted as it comes */
    return OK;
}

enum status openai_answer_too_long(const struct completion_request *c, struct err *err)
{
    size_t n_tokens = 0;
    for (uint32_t i = 0; i < c->n_choices; i++) n_tokens += c->choices[i].n_tokens;
    struct answer_part part = { output_field(c), n_tokens, 0, (size_t)(c->p.n_logprobs + 1) };
    return refuse(c, &part, c->n_answer, err);
}

enum status openai_text_too_long(const struct completion_request *c, const char *field, size_t n,
                                 struct err *err)
{
    char size[32], most[32];
    write_size(size, n);
    write_size(most, c->serve->max_answer);
    return err_field(
        err, ERR_INVALID, field,
        "the answer to this %s would be at least %s long, but at most %s are possible; "
        "send it in parts",
        field, size, most);
}
