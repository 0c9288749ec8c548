/* choice.c - see choice.h. Thread: loop. */
#include "shared/serve/choice.h"

#include <string.h>

#include "shared/base/clock.h"
#include "shared/serve/completion_request.h"
#include "shared/serve/output_parser.h"
#include "shared/serve/response_stream.h"

void choice_init(struct choice *ch, struct completion_request *c, uint32_t index)
{
    ch->request = c;
    ch->index = index;
    ch->sample = index % c->p.n;
    ch->prompt = &c->prompts[index / c->p.n];
    ch->maybe_end_token = -1;
    ch->stop_index = -1;
    ch->n_chars = c->p.echo ? ch->prompt->n_chars : 0;
    ch->digest = resume_digest(ch);
    if (c->resume && c->resume->returns && index < c->resume->handle.n_choices)
        ch->had = ch->delivered = c->resume->handle.choices[index];
    if (ch->had.n_tokens) ch->model_bits = c->resume->handle.model_bits;
    if (c->endpoint->parses_output) ch->parser = output_parser_create(c, ch->digest);
}

void choice_release(struct choice *ch)
{
    if (ch->detokenizer_ready) detokenizer_release(&ch->detok);
    output_parser_free(ch->parser);
    buf_release(&ch->text);
    buf_release(&ch->ids);
    buf_release(&ch->logprobs);
    buf_release(&ch->prompt_logprobs);
}

void choice_cancel(struct choice *ch)
{
    const struct serve_backend *b = &ch->request->serve->o.backend;
    b->cancel(b->self, ch->backend_id);
}

bool choice_ended_locally(const struct choice *ch)
{
    return ch->stop_index >= 0 || ch->tool_calls_done;
}

const char *choice_finish_reason(const struct choice *ch)
{
    if (!choice_ended_locally(ch) && ch->end.finish == FINISH_LENGTH) return "length";
    return ch->parser && output_parser_n_tool_calls(ch->parser) ? "tool_calls" : "stop";
}

/* ---- resumed ---- */

bool choice_was_delivered(const struct choice *ch, bool finish)
{
    return finish ? ch->had.finished : ch->n_tokens <= ch->had.n_tokens;
}

uint32_t choice_n_tokens(const struct choice *ch)
{
    return ch->n_tokens > ch->had.n_tokens ? ch->n_tokens : ch->had.n_tokens;
}

uint32_t choice_n_reasoning(const struct choice *ch)
{
    if (ch->had.finished) return ch->had.n_reasoning;
    return ch->parser ? output_parser_n_reasoning_tokens(ch->parser) : 0;
}

uint32_t choice_n_cached(const struct choice *ch)
{
    return ch->had.finished ? ch->had.n_cached : ch->end.trace.n_cached;
}

/* ---- text ---- */

/* Before min_tokens, stop strings are not matched and no text is held back for them. */
static void enable_stops(struct choice *ch)
{
    const struct openai_params *p = &ch->request->p;
    if (ch->n_tokens + p->stops_within_min > p->sampling.min_tokens)
        ch->detok.n_stops = ch->n_stops;
}

static void push_text(struct choice *ch, int32_t id)
{
    struct buf *out = ch->parser ? output_parser_input(ch->parser) : &ch->text;
    ch->detok.skip_special = ch->request->p.skip_special &&
                             !(ch->parser && output_parser_needs_token(ch->parser, id));
    if (detokenizer_push(&ch->detok, id, out)) ch->stop_index = ch->detok.stop_index;
    if (ch->parser && !output_parser_push(ch->parser, &ch->text)) ch->tool_calls_done = true;
}

static void push_held(struct choice *ch)
{
    if (ch->maybe_end_token >= 0) push_text(ch, ch->maybe_end_token);
    ch->maybe_end_token = -1;
}

/* May `id` be the token that ends the sequence? */
static bool is_end_token(const struct choice *ch, int32_t id)
{
    const struct sampling_params *q = &ch->request->p.sampling;
    for (uint32_t i = 0; i < q->n_stop_ids; i++)
        if (q->stop_ids[i] == id) return true;
    return tokenizer_is_special(ch->request->serve->o.tokenizer, id);
}

/* As is_end_token, and has it text to show? */
static bool may_end(const struct choice *ch, int32_t id)
{
    const struct openai_params *p = &ch->request->p;
    if (p->skip_special && tokenizer_is_special(ch->request->serve->o.tokenizer, id) &&
        !(ch->parser && output_parser_needs_token(ch->parser, id)))
        return false;
    return is_end_token(ch, id);
}

static void take_token(struct choice *ch, const struct token_logprobs *t)
{
    const struct openai_params *p = &ch->request->p;
    ch->n_tokens++;
    ch->may_be_last = t->ends != FINISH_NONE || ch->n_tokens == ch->max_tokens ||
                      is_end_token(ch, t->id);
    if (p->return_token_ids || ch->request->endpoint->answers->keeps_all)
        buf_add(&ch->ids, &t->id, sizeof t->id);
    if (p->n_logprobs >= 0) openai_logprobs_store(&ch->logprobs, t, p->n_logprobs, ch->n_chars);
    ch->n_chars += openai_token_chars(ch, t->id);
    enable_stops(ch);
    push_held(ch);
    if (choice_ended_locally(ch)) return;
    if (may_end(ch, t->id)) ch->maybe_end_token = t->id;
    else push_text(ch, t->id);
}

static void finish_detokenizer(struct choice *ch)
{
    if (choice_ended_locally(ch)) return;
    bool is_end = ch->end.finish == FINISH_STOP && ch->maybe_end_token == ch->end.stop_token;
    if (is_end && !ch->request->p.include_stop) ch->maybe_end_token = -1;
    push_held(ch);
    if (choice_ended_locally(ch)) return;
    detokenizer_finish(&ch->detok, ch->parser ? output_parser_input(ch->parser) : &ch->text);
    ch->stop_index = ch->detok.stop_index; /* the text held back may complete a stop string */
}

static void finish_text(struct choice *ch)
{
    finish_detokenizer(ch);
    if (ch->parser)
        output_parser_finish(
            ch->parser, choice_ended_locally(ch) || ch->end.finish == FINISH_LENGTH, &ch->text);
}

/* ---- sink ---- */

static void on_token(void *arg, uint32_t index, const struct token_logprobs *t)
{
    struct choice *ch = arg;
    struct completion_request *c = ch->request;
    (void)index; /* the backend delivers each token once and in order */
    if (c->stage != COMPLETION_RUNNING || choice_ended_locally(ch)) return;
    c->t_heard_ms = clock_ms();
    take_token(ch, t);
    if (choice_ended_locally(ch)) choice_cancel(ch);
    if (c->p.stream) response_stream_token(ch);
    if (c->stage == COMPLETION_RUNNING && (!c->p.stream || c->endpoint->answers->keeps_all))
        completion_add_bytes(c, openai_token_bytes(c, t->id));
}

static void on_prompt_logprob(void *arg, uint32_t position, const struct token_logprobs *t)
{
    struct choice *ch = arg;
    const struct openai_params *p = &ch->request->p;
    (void)position;
    if (ch->request->stage != COMPLETION_RUNNING) return;
    int32_t n_echo = p->echo ? p->n_logprobs : -1;
    openai_logprobs_store(&ch->prompt_logprobs, t,
                          n_echo > p->n_prompt_logprobs ? n_echo : p->n_prompt_logprobs, 0);
}

static void on_end(void *arg, const struct gen_end *end)
{
    struct choice *ch = arg;
    ch->live = false;
    ch->end = *end;
    if (ch->request->stage == COMPLETION_RUNNING && ch->detokenizer_ready &&
        (end->status == OK || choice_ended_locally(ch)))
        finish_text(ch);
    completion_on_choice_end(ch->request, ch);
}

static void on_node(void *arg, uint64_t node, uint64_t model_bits)
{
    struct choice *ch = arg;
    ch->delivered.node = node;
    /* Tokens of several are of none. */
    const bool has_any = ch->n_tokens > 0 || ch->had.n_tokens > 0;
    ch->model_bits = has_any && ch->model_bits != model_bits ? 0 : model_bits;
}

bool choice_wants_prompt_logprobs(const struct choice *ch)
{
    const struct openai_params *p = &ch->request->p;
    bool wanted = (p->echo && p->n_logprobs >= 0) || p->n_prompt_logprobs >= 0;
    /* The samples of a prompt share its logprobs, but a streamed one cannot wait for the others. */
    return wanted && (ch->sample == 0 || p->stream);
}

struct sampling_params choice_sampling(const struct choice *ch)
{
    const struct completion_request *c = ch->request;
    struct sampling_params s = c->p.sampling;
    uint32_t room = c->serve->o.max_model_len - (uint32_t)ch->prompt->n_tokens;
    if (s.max_tokens > room) s.max_tokens = room;
    /* With a seed of the client, equal prompts of a list get the same answers; with one of the
     * request's name they must not. */
    s.seed += c->p.seed_set ? ch->sample : ch->index;
    return s;
}

static struct gen_resume resume_of(const struct choice *ch)
{
    const struct completion_request *c = ch->request;
    struct gen_resume r = { .wanted = c->resume != NULL };
    if (!r.wanted) return r;
    r.key = resume_key(ch);
    r.returns = c->resume->returns;
    r.node = ch->had.node;
    r.n_delivered = ch->had.n_tokens;
    r.model_bits = ch->model_bits;
    r.asks_all = !r.returns && !c->p.stream && c->name_is_given;
    return r;
}

/* Each choice computes its prompt, or is charged for it all the same. */
static uint64_t all_prompts(const struct completion_request *c)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < c->n_prompts; i++) n += c->prompts[i].n_tokens;
    return n * c->p.n;
}

static struct gen_admission admission_of(const struct choice *ch)
{
    struct gen_admission a = ch->request->admission;
    a.priority = ch->request->p.priority;
    a.follows = ch->follows;
    a.all_prompts = a.follows ? 0 : all_prompts(ch->request);
    return a;
}

enum status choice_submit(struct choice *ch, struct gen_refusal *why)
{
    struct completion_request *c = ch->request;
    struct openai_params *p = &c->p;
    ch->follows = c->n_admitted > 0;
    struct gen_sink sink = {
        .on_token = on_token,
        .on_prompt_logprob = on_prompt_logprob,
        .on_end = on_end,
        .on_node = on_node,
        .arg = ch,
    };
    struct gen_request r = {
        .name = c->name,
        .tokens = ch->prompt->tokens,
        .n_tokens = (uint32_t)ch->prompt->n_tokens,
        .sampling = choice_sampling(ch),
        .cache_salt = p->cache_salt,
        /* They are in the first event. */
        .prompt_logprobs = choice_wants_prompt_logprobs(ch) && ch->had.n_tokens == 0,
        .deadline_ms = c->deadline_ms,
        .resume = resume_of(ch),
        .admission = admission_of(ch),
    };
    ch->max_tokens = r.sampling.max_tokens;
    if (!ch->detokenizer_ready) {
        detokenizer_init(&ch->detok, c->serve->o.tokenizer, p->skip_special, p->stops, p->n_stops,
                         p->include_stop);
        ch->detokenizer_ready = true;
        ch->n_stops = ch->detok.n_stops;
        if (p->sampling.min_tokens > 0) ch->detok.n_stops = 0;
    }
    return c->serve->o.backend.submit(c->serve->o.backend.self, &r, &sink, &ch->backend_id, why);
}
