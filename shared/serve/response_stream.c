/* response_stream.c - see response_stream.h. */
#include "shared/serve/response_stream.h"

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

/* What was in the event is not in the next one. */
static void begin_next_delta(struct choice *ch)
{
    ch->sent = true;
    if (ch->request->endpoint->answers->keeps_all) {
        ch->n_text_sent = ch->text.len;
        ch->n_ids_sent = ch->ids.len;
        return;
    }
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
    begin(c);
    buf_clear(&c->out);
    c->endpoint->answers->write_event(ch, finish, &c->out);
    begin_next_delta(ch);
    count_delivered(ch, finish);
    send_event(c, buf_str(&c->out));
}

void response_stream_token(struct choice *ch)
{
    if (ch->request->endpoint->answers->has_event(ch)) send_choice(ch, false);
}

void response_stream_finish(struct choice *ch) { send_choice(ch, true); }

static void end(struct completion_request *c)
{
    const char *last = c->endpoint->answers->stream_end;
    /* Nobody needs an error when the receiver is gone. */
    if (!last || c->reply.chunk(c->reply.arg, (struct str){ 0 }, str_of(last)) == OK)
        c->reply.end(c->reply.arg);
}

void response_stream_end(struct completion_request *c)
{
    begin(c); /* a client that comes back may have all events */
    if (c->p.include_usage && !c->usage_sent) {
        buf_clear(&c->out);
        c->endpoint->answers->write_usage(c, &c->out);
        c->usage_sent = true;
        send_event(c, buf_str(&c->out));
        if (c->stage == COMPLETION_ENDED) return; /* abandoned */
    }
    end(c);
}

void response_stream_error(struct completion_request *c, struct str json)
{
    if (c->reply.chunk(c->reply.arg, (struct str){ 0 }, json) == OK) end(c);
}
