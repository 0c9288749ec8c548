/* openai_response.c - the parts that answers of both APIs share: head, usage, finish, ids and
 * trace. Thread: see openai.h. */
#include "shared/serve/completion_request.h"
#include "shared/serve/output_parser.h"

static enum status start(struct completion_request *c, struct err *err)
{
    TRY(resume_check(c, err));
    buf_clear(&c->head);
    buf_printf(&c->head,
               "{\"id\":\"%s%s\",\"created\":%lld,\"model\":", c->endpoint->openai->id_prefix,
               c->name, (long long)c->created);
    json_add_string(&c->head, str_of(c->serve->names[0]));
    return OK;
}

void openai_write_ids(struct buf *out, const char *name, const int32_t *ids, size_t n)
{
    buf_printf(out, ",\"%s\":[", name);
    for (size_t i = 0; i < n; i++) buf_printf(out, i ? ",%d" : "%d", ids[i]);
    buf_add_char(out, ']');
}

/* stop_reason is vLLM's: the stop string or the stop id of the request; null for the model's own
 * end token. */
void openai_write_finish(const struct choice *ch, bool finish, struct buf *out)
{
    const struct openai_params *p = &ch->request->p;
    if (!finish) {
        buf_add_c(out, ",\"finish_reason\":null");
        return;
    }
    buf_printf(out, ",\"finish_reason\":\"%s\",\"stop_reason\":", choice_finish_reason(ch));
    if (ch->stop_index >= 0) {
        json_add_string(out, p->stops[ch->stop_index]);
        return;
    }
    for (uint32_t i = 0; i < p->sampling.n_stop_ids && ch->end.finish == FINISH_STOP; i++) {
        if (p->sampling.stop_ids[i] != ch->end.stop_token) continue;
        buf_printf(out, "%d", ch->end.stop_token);
        return;
    }
    buf_add_c(out, "null");
}

void openai_write_usage(const struct completion_request *c, struct buf *out)
{
    size_t prompt = 0, answer = 0, cached = 0, n_reasoning = 0;
    for (uint32_t i = 0; i < c->n_prompts; i++) {
        prompt += c->prompts[i].n_tokens;
        cached += choice_n_cached(&c->choices[i * c->p.n]);
    }
    for (uint32_t i = 0; i < c->n_choices; i++) {
        answer += choice_n_tokens(&c->choices[i]);
        n_reasoning += choice_n_reasoning(&c->choices[i]);
    }
    buf_printf(out,
               "{\"prompt_tokens\":%zu,\"completion_tokens\":%zu,\"total_tokens\":%zu,\"prompt_"
               "tokens_details\":{\"cached_tokens\":%zu}",
               prompt, answer, prompt + answer, cached);
    if (c->endpoint->parses_output && c->serve->o.reasoning)
        buf_printf(out, ",\"completion_tokens_details\":{\"reasoning_tokens\":%zu}", n_reasoning);
    buf_add_char(out, '}');
}

/* ---- the trace ---- */

static void add_ms(struct buf *out, const char *name, uint64_t ns)
{
    buf_printf(out, ",\"%s\":%.3f", name, (double)ns * 1e-6);
}

static void add_cache(const struct gen_trace *t, struct buf *out)
{
    const struct gen_cache_use *c = &t->cache;
    const uint32_t n_tiers = c->n_host + c->n_disk + c->n_peer;
    buf_printf(out, ",\"cached_tokens_by_tier\":{\"pool\":%u,\"host\":%u,\"disk\":%u,\"peer\":%u}",
               t->n_cached > n_tiers ? t->n_cached - n_tiers : 0, c->n_host, c->n_disk, c->n_peer);
    add_ms(out, "cache_load_ms", c->load_ns);
    add_ms(out, "cache_load_expected_ms", c->load_us * UINT64_C(1000));
    add_ms(out, "cache_compute_expected_ms", c->compute_us * UINT64_C(1000));
}

/* What the directory said of the prompt's beginning. */
static void add_expected(const struct gen_trace *t, struct buf *out)
{
    buf_printf(out, ",\"expected_cached_tokens\":%u,\"expected_decode_cached_tokens\":%u",
               t->n_expected, t->n_decode_expected);
    if (t->n_kept == 0) return;
    buf_add_c(out, ",\"kept_node\":");
    json_add_string(out, str_of(t->kept_node));
    buf_printf(out, ",\"kept_tokens\":%u", t->n_kept);
}

static void add_trace_members(const struct gen_trace *t, struct buf *out)
{
    buf_add_c(out, "\"prefill_node\":");
    json_add_string(out, str_of(t->prefill_node));
    buf_add_c(out, ",\"decode_node\":");
    json_add_string(out, str_of(t->decode_node));
    buf_add_c(out, ",\"transport\":");
    json_add_string(out, str_of(t->transport));
    buf_printf(out, ",\"kv_bytes\":%llu", (unsigned long long)t->kv_bytes);
    buf_printf(out, ",\"kv_bytes_per_second\":%.0f,\"kv_link_bytes_per_second\":%llu",
               gen_trace_kv_rate(t), (unsigned long long)t->kv_link_speed);
    add_ms(out, "kv_ms", t->kv_ns);
    add_ms(out, "kv_busy_ms", t->kv_busy_ns);
    add_ms(out, "kv_tail_ms", t->kv_tail_ns);
    add_ms(out, "place_ms", t->place_ns);
    add_ms(out, "queue_ms", t->queue_ns);
    add_ms(out, "prefill_ms", t->prefill_ns);
    add_ms(out, "first_token_ms", t->first_token_ns);
    add_ms(out, "decode_ms", t->decode_ns);
    add_ms(out, "total_ms", t->total_ns);
    buf_printf(
        out,
        ",\"cached_tokens\":%u,\"decode_cached_tokens\":%u,\"recomputed_tokens\":%u,\"moves\":%u",
        t->n_cached, t->n_decode_cached, t->n_recomputed, t->n_moves);
    add_expected(t, out);
    if (t->n_verified)
        buf_printf(out, ",\"drafted_tokens\":%u,\"accepted_tokens\":%u,\"accepted_length\":%.3f",
                   t->n_drafted, t->n_accepted, 1 + (double)t->n_accepted / t->n_verified);
    add_cache(t, out);
    if (t->hedged)
        buf_printf(out, ",\"hedged\":\"%s\"", t->hedged == GEN_HEDGED_FIRST ? "first" : "second");
}

/* Writes the trace of the first choice; with several, member "choices" has all of them in order. */
void openai_write_trace(const struct completion_request *c, struct buf *out)
{
    buf_add_char(out, '{');
    add_trace_members(&c->choices[0].end.trace, out);
    for (uint32_t i = 0; c->n_choices > 1 && i < c->n_choices; i++) {
        buf_add_c(out, i ? ",{" : ",\"choices\":[{");
        add_trace_members(&c->choices[i].end.trace, out);
        buf_add_char(out, '}');
    }
    buf_add_c(out, c->n_choices > 1 ? "]}" : "}");
}

/* ---- chunks ---- */

static bool has_event(const struct choice *ch)
{
    const struct openai_params *p = &ch->request->p;
    if (!ch->parser || !ch->sent || ch->text.len) return true;
    return output_parser_has_delta(ch->parser, p->include_reasoning) || p->n_logprobs >= 0 ||
           p->return_token_ids || p->continuous_usage;
}

static void begin_chunk(const struct completion_request *c, struct buf *out)
{
    buf_add_str(out, buf_str(&c->head));
    buf_printf(out, ",\"object\":\"%s\",\"choices\":[", c->endpoint->openai->chunk_object);
}

static void end_chunk(const struct completion_request *c, bool usage, bool trace, struct buf *out)
{
    if (usage) {
        buf_add_c(out, ",\"usage\":");
        openai_write_usage(c, out);
    }
    if (trace) {
        buf_add_c(out, ",\"baton\":");
        openai_write_trace(c, out);
    }
    buf_add_char(out, '}');
}

static void write_event(const struct choice *ch, bool finish, struct buf *out)
{
    const struct completion_request *c = ch->request;
    const struct openai_form *form = c->endpoint->openai;
    begin_chunk(c, out);
    form->write_chunk(ch, finish, out);
    buf_add_char(out, ']');
    if (!ch->sent) form->write_top(ch, true, out);
    /* The last chunk has the trace: the usage chunk, or the finish of the choice that ends last. */
    end_chunk(c, c->p.continuous_usage,
              finish && c->trace && !c->p.include_usage && c->n_done == c->n_choices, out);
}

static void write_usage_event(const struct completion_request *c, struct buf *out)
{
    begin_chunk(c, out);
    buf_add_char(out, ']');
    end_chunk(c, true, c->trace, out);
}

/* ---- whole answers ---- */

static void write_body(struct completion_request *c)
{
    struct buf *out = &c->out;
    buf_add_str(out, buf_str(&c->head));
    buf_printf(out, ",\"object\":\"%s\",\"choices\":[", c->endpoint->object);
    for (uint32_t i = 0; i < c->n_choices; i++) {
        if (i) buf_add_char(out, ',');
        c->endpoint->openai->write_choice(&c->choices[i], out);
    }
    buf_add_c(out, "],\"usage\":");
    openai_write_usage(c, out);
    c->endpoint->openai->write_top(&c->choices[0], false, out);
    if (c->trace) {
        buf_add_c(out, ",\"baton\":");
        openai_write_trace(c, out);
    }
    buf_add_char(out, '}');
}

const struct answer_ops OPENAI_ANSWERS = {
    .stream_end = "[DONE]",
    .start = start,
    .has_event = has_event,
    .write_event = write_event,
    .write_usage = write_usage_event,
    .write_body = write_body,
};
