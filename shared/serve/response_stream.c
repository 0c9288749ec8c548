/* response_stream.c - see response_stream.h. */
#include "shared/serve/response_stream.h"

#include <stdio.h>

#include "shared/serve/output_parser.h"

static void begin(struct completion_request *c)
{
    struct buf headers = { 0 };
    if (c->stream_begun) return;
    completion_add_headers(c, &headers);
    c->stream_begun = true;
    c->reply.begin(c->reply.arg, headers.data);
    buf_release(&headers);
}

static void send_event(struct completion_request *c, struct str json)
{
    struct buf id = { 0 };
    if (c->resume) resume_write(c, &id);
    if (c->reply.chunk(c->reply.arg, buf_str(&id), json) != OK) completion_abandon(c);
    buf_release(&id);
}

static void begin_chunk(struct completion_request *c)
{
    begin(c);
    buf_clear(&c->out);
    buf_add_str(&c->out, buf_str(&c->head));
    buf_printf(&c->out, ",\"object\":\"%s\",\"choices\":[", c->endpoint->chunk_object);
}

static void end_chunk(struct completion_request *c, bool usage, bool trace)
{
    if (usage) {
        buf_add_c(&c->out, ",\"usage\":");
        openai_write_usage(c, &c->out);
    }
    if (trace) {
        buf_add_c(&c->out, ",\"baton\":");
        openai_write_trace(c, &c->out);
    }
    buf_add_char(&c->out, '}');
    send_event(c, buf_str(&c->out));
}

/* What was in the event is not in the next one. */
static void begin_next_delta(struct choice *ch)
{
    ch->sent = true;
    if (ch->parser) output_parser_delta_sent(ch->parser);
    buf_clear(&ch->text);
    buf_clear(&ch->ids);
    buf_clear(&ch->logprobs);
}

static void count_delivered(struct choice *ch, bool finish)
{
    struct resume_choice *d = &ch->delivered;
    d->n_tokens = ch->n_tokens;
    if (!finish) return;
    d->finished = true;
    d->n_reasoning = choice_n_reasoning(ch);
    d->n_cached = choice_n_cached(ch);
}

static void send_choice(struct choice *ch, bool finish)
{
    struct completion_request *c = ch->request;
    if (choice_was_delivered(ch, finish)) {
        begin_next_delta(ch);
        return;
    }
    begin_chunk(c);
    c->endpoint->write_chunk(ch, finish, &c->out);
    buf_add_char(&c->out, ']');
    if (!ch->sent) c->endpoint->write_top(ch, true, &c->out);
    begin_next_delta(ch);
    count_delivered(ch, finish);
    /* The last chunk has the trace: the usage chunk, or the finish of the choice that ends last. */
    end_chunk(c, c->p.continuous_usage,
              finish && c->trace && !c->p.include_usage && c->n_done == c->n_choices);
}

static bool has_delta(const struct choice *ch)
{
    const struct openai_params *p = &ch->request->p;
    if (!ch->parser || !ch->sent || ch->text.len) return true;
    return output_parser_has_delta(ch->parser, p->include_reasoning) || p->n_logprobs >= 0 ||
           p->return_token_ids || p->continuous_usage;
}

void response_stream_token(struct choice *ch)
{
    if (has_delta(ch)) send_choice(ch, false);
}

void response_stream_finish(struct choice *ch) { send_choice(ch, true); }

static void end(struct completion_request *c)
{
    /* Nobody needs an error when the receiver is gone. */
    if (c->reply.chunk(c->reply.arg, (struct str){ 0 }, STR("[DONE]")) == OK)
        c->reply.end(c->reply.arg);
}

void response_stream_end(struct completion_request *c)
{
    begin(c); /* a client that comes back may have all events */
    if (c->p.include_usage && !c->usage_sent) {
        begin_chunk(c);
        buf_add_char(&c->out, ']');
        c->usage_sent = true;
        end_chunk(c, true, c->trace);
        if (c->stage == COMPLETION_ENDED) return; /* abandoned */
    }
    end(c);
}

void response_stream_error(struct completion_request *c, struct str json)
{
    if (c->reply.chunk(c->reply.arg, (struct str){ 0 }, json) == OK) end(c);
}
