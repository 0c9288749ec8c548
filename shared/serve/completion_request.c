/* completion_request.c - see completion_request.h. Thread: loop, except prepare_now,
 * prepare_low and write_work (a worker). */
#include "shared/serve/completion_request.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/thread.h"
#include "shared/net/http/http_pass.h"
#include "shared/serve/admission_headers.h"
#include "shared/serve/native/native.h"
#include "shared/serve/response_stream.h"

enum {
    WRITE_INLINE_MAX = 4096, /* bytes of logprobs and ids that the loop formats without a worker */
    BODY_VALUES_MAX = 1 << 18,     /* JSON values of a body, beside token ids */
    PREPARE_LOW_BYTES = 256 << 10, /* bodies above this are read at low priority */
    PREPARE_LOW_MAX = 2, /* of those at once: a worker waits for each, and libuv has four */
    LOW_WAITING_MAX = 1024,
    /* All whole answers in the making are together at most so many of the longest; above that none
     * is begun that is certain to get more than a small part of one. What they hold until they are
     * written is less than half of what they are estimated at. */
    ANSWERS_MAX = 8,
    ANSWER_SMALL_PART = 64
};

static const char TOO_MANY_TO_READ[] =
    "too many requests are waiting to be read; try again shortly";

static void completion_free(struct completion_request *c)
{
    struct serve *s = c->serve;
    map_del(&s->requests, map_key_u64(&c->id));
    if (c->waits_for_worker) {
        list_remove(&c->low_link);
        s->n_low_waiting--;
        s->n_preparing -= c->generates;
    }
    loop_timer_free(c->retry);
    native_stop(c);
    if (c->counted) s->n_answers -= c->n_answer;
    for (uint32_t i = 0; i < c->n_choices; i++) choice_release(&c->choices[i]);
    for (uint32_t i = 0; i < c->n_prompts; i++) {
        mem_free(c->prompts[i].tokens);
        buf_release(&c->prompts[i].text);
    }
    cJSON_Delete(c->tools);
    buf_release(&c->tool_call_prefix);
    http_taken_body_release(&c->body);
    json_packed_release(&c->packed);
    buf_release(&c->head);
    buf_release(&c->out);
    arena_release(&c->arena);
    mem_free(c);
    serve_unref(s);
}

static void maybe_free(struct completion_request *c)
{
    if (c->stage == COMPLETION_ENDED && !c->on_worker && c->n_live == 0) completion_free(c);
}

/* Cancels what the backend still computes. No reply function is called after this. */
static void set_ended(struct completion_request *c)
{
    c->stage = COMPLETION_ENDED;
    loop_timer_free(c->retry);
    c->retry = NULL;
    native_stop(c);
    for (uint32_t i = 0; i < c->n_choices && !c->is_left; i++)
        if (c->choices[i].live) choice_cancel(&c->choices[i]);
}

/* ---- answers ---- */

void completion_add_headers(const struct completion_request *c, struct buf *out)
{
    buf_printf(out, "x-request-id: %s\r\n", c->name);
    if (c->generates) admission_add_limits(&c->serve->o.backend, c->admission.tenant, out);
}

/* When an error's client should come back, if ever. */
struct later {
    uint32_t after_s;  /* 0: soon */
    const char *retry; /* gen_refusal.retry; NULL: none */
    bool takes_others; /* gen_refusal.takes_others */
};

static const struct later AT_ONCE = { 0 };

static void reply(struct completion_request *c, int http, struct later later, struct str body)
{
    struct buf headers = { 0 };
    completion_add_headers(c, &headers);
    admission_add_retry(http, later.after_s, later.retry, &headers);
    if (http == 429 && later.takes_others) buf_add_c(&headers, HTTP_PASS_HAS_ROOM_HEADER ": 1\r\n");
    set_ended(c);
    c->reply.reply(c->reply.arg, http, headers.data, body);
    buf_release(&headers);
}

/* Ends with an error: as the reply, or as the last event of the stream. */
static void fail(struct completion_request *c, enum status st, const char *text, const char *param,
                 struct later later)
{
    struct buf body = { 0 };
    if (!text || !text[0]) text = status_text(st);
    log_debug("request failed", "api_request=%s st=%s why=\"%s\"", c->name, status_name(st), text);
    struct api_error e = openai_error_of(st, text, param && param[0] ? param : NULL);
    e.req_id = c->req_id.n ? c->req_id : str_of(c->name);
    c->speaks->write_error(&e, &body);
    if (c->stream_begun) {
        set_ended(c);
        response_stream_error(c, buf_str(&body));
    } else {
        reply(c, e.http, later, buf_str(&body));
    }
    buf_release(&body);
}

void completion_fail(struct completion_request *c, enum status st, const char *text,
                     const char *param)
{
    fail(c, st, text, param, AT_ONCE);
    maybe_free(c);
}

bool completion_has_lines(const struct serve *s, uint64_t id)
{
    const struct completion_request *c = map_get(&s->requests, map_key_u64(&id));
    return c && c->endpoint->answers->lines;
}

void completion_add_bytes(struct completion_request *c, size_t n)
{
    struct err err = { 0 };
    c->n_answer += n;
    c->serve->n_answers += n;
    if (c->n_answer <= c->serve->max_answer) return;
    enum status st = openai_answer_too_long(c, &err);
    fail(c, st, err.text, err.field, AT_ONCE);
}

void completion_abandon(struct completion_request *c)
{
    if (c->stage != COMPLETION_ENDED) set_ended(c);
}

/* While a worker prepares the request, only the names of the headers may be looked at. */
void completion_shut_down(struct completion_request *c)
{
    bool waits = c->stage == COMPLETION_PREPARING;
    if (waits && !c->name[0]) snprintf(c->name, sizeof c->name, "%s", c->fallback_name);
    if (waits && !c->name[0]) serve_make_name(c->name);
    c->is_left = c->resume != NULL;
    if (waits || c->stage == COMPLETION_RUNNING)
        fail(c, ERR_UNAVAILABLE,
             c->is_left && c->stream_begun
                 ? "the node is shutting down; another node goes on with this answer: send the "
                   "request there, with the id of its last event as Last-Event-ID"
                 : "the node is shutting down; send the request again",
             NULL, AT_ONCE);
    maybe_free(c);
}

void completion_cancel(struct completion_request *c)
{
    if (c->stage != COMPLETION_ENDED) set_ended(c);
    maybe_free(c);
}

/* ---- the whole answer ---- */

static void write_work(void *arg)
{
    struct completion_request *c = arg;
    c->endpoint->answers->write_body(c);
}

static void on_written(void *arg)
{
    struct completion_request *c = arg;
    c->on_worker = false;
    if (c->stage == COMPLETION_WRITING) reply(c, 200, AT_ONCE, buf_str(&c->out));
    maybe_free(c);
}

static void write_answer(struct completion_request *c)
{
    size_t work = 0;
    for (uint32_t i = 0; i < c->n_choices; i++) {
        const struct choice *ch = &c->choices[i];
        work += ch->logprobs.len + ch->prompt_logprobs.len + ch->ids.len;
        if (c->p.return_token_ids) work += ch->prompt->n_tokens * sizeof *ch->prompt->tokens;
    }
    c->stage = COMPLETION_WRITING;
    if (work > WRITE_INLINE_MAX && loop_work(c->serve->o.loop, write_work, on_written, c) == OK) {
        c->on_worker = true;
        return;
    }
    c->endpoint->answers->write_body(c);
    reply(c, 200, AT_ONCE, buf_str(&c->out));
}

/* ---- sequences ---- */

static void submit_more(struct completion_request *c);

static void end_if_done(struct completion_request *c);

static void on_retry(void *arg)
{
    struct completion_request *c = arg;
    loop_timer_free(c->retry);
    c->retry = NULL;
    submit_more(c);
    end_if_done(c);
    maybe_free(c);
}

/* The sooner of this and what is already due. */
static void retry_in(struct completion_request *c, uint32_t ms)
{
    uint64_t due = clock_ms() + ms;
    if (c->retry && c->retry_due_ms <= due) return;
    loop_timer_free(c->retry);
    c->retry = loop_timer_start(c->serve->o.loop, ms, 0, on_retry, c);
    c->retry_due_ms = due;
}

/* The backend is full. A request that has, or has had, sequences in it waits for capacity; any
 * other is refused. Returns whether to wait. */
static bool wait_for_capacity(struct completion_request *c)
{
    if (c->n_live > 0) return true; /* the next end submits again */
    if (c->n_done == 0 || clock_ms() - c->t_progress_ms > COMPLETION_RETRY_MAX_MS) return false;
    retry_in(c, COMPLETION_RETRY_MS);
    return true;
}

/* The backend has copied the prompt; only some answers show its tokens. With several choices one
 * may have to be submitted again. */
static void drop_tokens(struct completion_request *c)
{
    const struct openai_params *p = &c->p;
    if (c->n_choices > 1) return;
    if (p->return_token_ids || p->n_prompt_logprobs >= 0 || (p->echo && p->n_logprobs >= 0)) return;
    for (uint32_t i = 0; i < c->n_prompts; i++) {
        mem_free(c->prompts[i].tokens);
        c->prompts[i].tokens = NULL;
    }
}

/* What the client has whole is not computed again. */
static void skip_finished(struct completion_request *c)
{
    while (c->n_submitted < c->n_choices && c->choices[c->n_submitted].had.finished) {
        c->n_submitted++;
        c->n_done++;
    }
}

/* NULL: all are submitted. */
static struct choice *next_choice(struct completion_request *c)
{
    for (uint32_t i = 0; c->n_again && i < c->n_submitted; i++)
        if (c->choices[i].again) return &c->choices[i];
    skip_finished(c);
    return c->n_submitted < c->n_choices ? &c->choices[c->n_submitted] : NULL;
}

static void note_submitted(struct completion_request *c, struct choice *ch)
{
    ch->live = true;
    c->n_live++;
    if (ch->again) {
        ch->again = false;
        c->n_again--;
        return;
    }
    c->n_admitted++;
    c->n_submitted++;
    c->t_progress_ms = clock_ms();
    skip_finished(c);
    if (c->n_submitted == c->n_choices) drop_tokens(c);
}

static void submit_more(struct completion_request *c)
{
    struct choice *ch;
    while (c->stage == COMPLETION_RUNNING && c->n_live < COMPLETION_WINDOW &&
           (ch = next_choice(c))) {
        struct gen_refusal why = { 0 };
        enum status st = choice_submit(ch, &why);
        if (st != OK) {
            if (status_class_of(st) == CLASS_BUSY && wait_for_capacity(c)) return;
            fail(c, st, why.err.text, why.err.field,
                 (struct later){ why.retry_after_s, why.retry, why.takes_others });
            return;
        }
        note_submitted(c, ch);
    }
}

static void end_if_done(struct completion_request *c)
{
    if (c->stage != COMPLETION_RUNNING || c->n_done < c->n_choices) return;
    if (c->p.stream) {
        response_stream_end(c);
        if (c->stage == COMPLETION_RUNNING) set_ended(c);
    } else {
        write_answer(c);
    }
}

/* There was no room for it after all, and its client has nothing of it: it waits like those that
 * were refused at once, since others of its request go on. */
static bool must_come_again(const struct completion_request *c, const struct choice *ch)
{
    enum status st = ch->end.status;
    if (c->stage != COMPLETION_RUNNING || ch->n_tokens) return false;
    if (c->n_choices == 1 || (!ch->follows && !c->stream_begun)) return false;
    if (st != ERR_BUSY && st != ERR_FULL) return false;
    return c->n_live > 0 || clock_ms() - c->t_progress_ms <= COMPLETION_RETRY_MAX_MS;
}

/* Not at once: who takes it without asking would refuse it again in the next turn, and so on. */
static void come_again(struct completion_request *c, struct choice *ch)
{
    uint64_t ms = (uint64_t)ch->end.retry_after_s * 1000;
    buf_clear(&ch->prompt_logprobs);
    ch->again = true;
    c->n_again++;
    if (ms > COMPLETION_RETRY_MAX_MS) ms = COMPLETION_RETRY_MAX_MS;
    retry_in(c, ms ? (uint32_t)ms : COMPLETION_RETRY_MS);
}

void completion_on_choice_end(struct completion_request *c, struct choice *ch)
{
    c->n_live--;
    if (must_come_again(c, ch)) {
        come_again(c, ch);
        return;
    }
    c->n_done++;
    c->t_progress_ms = clock_ms();
    if (c->stage == COMPLETION_RUNNING && ch->end.status != OK && !choice_ended_locally(ch))
        fail(c, ch->end.status, ch->end.text, NULL,
             (struct later){ ch->end.retry_after_s, ch->end.retry, ch->end.takes_others });
    if (c->stage == COMPLETION_RUNNING && c->p.stream) response_stream_finish(ch);
    if (c->stage == COMPLETION_RUNNING) submit_more(c);
    end_if_done(c);
    maybe_free(c);
}

static void start_sequences(struct completion_request *c)
{
    struct serve *s = c->serve;
    if (c->n_answer > s->max_answer / ANSWER_SMALL_PART &&
        s->n_answers + c->n_answer > s->max_answer * ANSWERS_MAX) {
        fail(c, ERR_BUSY, "too many long answers are in the making; try again shortly", NULL,
             AT_ONCE);
        return;
    }
    c->counted = true;
    s->n_answers += c->n_answer;
    c->n_choices = c->n_prompts * c->p.n;
    c->choices = ARENA_ARRAY(&c->arena, struct choice, c->n_choices);
    for (uint32_t i = 0; i < c->n_choices; i++) choice_init(&c->choices[i], c, i);
    enum status st = c->endpoint->answers->start(c, &c->err);
    if (st != OK) {
        fail(c, st, c->err.text, c->err.field, AT_ONCE);
        return;
    }
    c->stage = COMPLETION_RUNNING;
    c->t_progress_ms = clock_ms();
    submit_more(c);
    end_if_done(c);
}

/* ---- preparing ---- */

/* A stranger's body is parsed in bounded memory, and no further than the context reaches, unless
 * the request asks for the end of its prompt. */
static enum status parse_body(struct completion_request *c, cJSON **doc)
{
    struct str text = buf_str(&c->body.bytes), truncate = STR("\"truncate_prompt_tokens\"");
    struct json_limits limits = {
        .packed_names = { "prompt", "prompt_token_ids", "tokens",
                          c->generates ? "input_ids" : NULL },
        .n_values = BODY_VALUES_MAX,
        .n_ints = openai_tokens_max(c),
        .keep_last = text.n && memmem(text.p, text.n, truncate.p, truncate.n),
    };
    enum status st = json_parse_packed(&c->body.bytes, &limits, doc, &c->packed, &c->err);
    buf_release(&c->body.bytes);
    if (st != ERR_TOO_LONG || !c->generates) return st;
    char param[sizeof c->err.field];
    snprintf(param, sizeof param, "%s", c->err.field);
    return strcmp(param, "input_ids") == 0 ? native_ids_too_long(c, &c->err)
                                           : openai_ids_too_long(c, param, &c->err);
}

static enum status prepare(struct completion_request *c)
{
    cJSON *doc = NULL;
    struct err bad_header = c->err; /* the body is read all the same: its form is the answer's */
    enum status st = parse_body(c, &doc);
    if (st == OK && !cJSON_IsObject(doc))
        st = err_set(&c->err, ERR_INVALID, "the request body must be a JSON object");
    c->is_read = st == OK;
    if (st == OK && c->endpoint->native && native_is(doc)) c->endpoint = c->endpoint->native;
    if (c->has_bad_header) {
        c->err = bad_header;
        st = bad_header.code;
    }
    if (st == OK) st = openai_check_model(c->serve, doc, &c->err);
    if (st == OK) st = c->endpoint->prepare(c, doc, &c->err);
    if (st == OK && c->generates) st = openai_check_size(c, &c->err);
    cJSON_Delete(doc);
    json_packed_release(&c->packed);
    return st;
}

static void prepare_now(void *arg)
{
    struct completion_request *c = arg;
    c->st = prepare(c);
}

/* A large body takes a while, and others' tokens must not wait for it. */
static void prepare_low(void *arg) { thread_run_low(prepare_now, arg); }

/* Takes the name of the header, else of the body, else a random one. An answer is a function of its
 * body and its name, so a seed that the client did not give is made from it; one that the answer
 * shows has as many bits as a number of JSON can have. */
static void choose_name(struct completion_request *c)
{
    c->name_is_given = c->name[0] || c->p.name[0];
    if (!c->name[0])
        snprintf(c->name, sizeof c->name, "%s", c->p.name[0] ? c->p.name : c->fallback_name);
    if (!c->name[0]) serve_make_name(c->name);
    if (c->p.seed_set) return;
    c->p.sampling.seed = hash_64(c->name, strlen(c->name), 0);
    if (c->native) c->p.sampling.seed >>= 64 - JSON_INTEGER_BITS;
}

/* Answers with an error before anything was started. */
static uint64_t refuse(struct completion_request *c, enum status st, const char *text)
{
    choose_name(c);
    fail(c, st, text, NULL, AT_ONCE);
    maybe_free(c);
    return 0;
}

static uint64_t refuse_path(struct completion_request *c, const char *path)
{
    char text[200];
    snprintf(text, sizeof text,
             "there is no API path %.100s; /v1/chat/completions and /v1/completions generate",
             path);
    return refuse(c, ERR_NOT_FOUND, text);
}

static enum status start_preparing(struct completion_request *c);

/* A worker is free for the large body that has waited longest. */
static void start_next_low(struct serve *s)
{
    while (s->n_preparing_low < PREPARE_LOW_MAX && !list_empty(&s->low_waiting)) {
        struct completion_request *c = LIST_FIRST(&s->low_waiting, struct completion_request,
                                                  low_link);
        list_remove(&c->low_link);
        s->n_low_waiting--;
        c->waits_for_worker = false;
        if (start_preparing(c) == OK) continue;
        s->n_preparing -= c->generates;
        (void)refuse(c, ERR_BUSY, TOO_MANY_TO_READ);
    }
}

static void on_prepared(void *arg)
{
    struct completion_request *c = arg;
    c->on_worker = false;
    c->serve->n_preparing -= c->generates;
    if (c->is_low) {
        c->serve->n_preparing_low--;
        start_next_low(c->serve);
    }
    http_taken_body_release(&c->body);
    if (c->stage == COMPLETION_PREPARING) {
        if (c->is_read) c->speaks = c->endpoint;
        if (c->native && c->native->req_id.n) c->req_id = c->native->req_id;
        choose_name(c);
        c->trace = c->trace || c->p.trace;
        if (c->st != OK) fail(c, c->st, c->err.text, c->err.field, AT_ONCE);
        else if (!c->generates) reply(c, 200, AT_ONCE, buf_str(&c->out));
        else start_sequences(c);
    }
    maybe_free(c);
}

/* Gives the request to a worker. At most PREPARE_LOW_MAX workers wait for threads of low priority:
 * with busy CPUs those take long, and small bodies need the others. */
static enum status start_preparing(struct completion_request *c)
{
    struct serve *s = c->serve;
    c->is_low = c->body.bytes.len > PREPARE_LOW_BYTES;
    if (c->is_low && s->n_preparing_low == PREPARE_LOW_MAX) {
        if (s->n_low_waiting == LOW_WAITING_MAX) return ERR_BUSY;
        list_push(&s->low_waiting, &c->low_link);
        s->n_low_waiting++;
        c->waits_for_worker = true;
        return OK;
    }
    TRY(loop_work(s->o.loop, c->is_low ? prepare_low : prepare_now, on_prepared, c));
    c->on_worker = true;
    s->n_preparing_low += c->is_low;
    return OK;
}

/* A client that comes back gets the answer that it began with. */
static void take_resume(struct completion_request *c, const struct resume_headers *h)
{
    c->resume = ARENA_NEW(&c->arena, struct resume_headers);
    *c->resume = *h;
    if (!h->returns) return;
    memcpy(c->name, h->handle.name, sizeof c->name);
    c->created = h->handle.created;
    c->usage_sent = h->handle.usage_sent;
}

/* Looks at the body for the form in which an error is written that comes before it is read. */
static void guess_form(struct completion_request *c)
{
    struct str req_id = { 0 };
    if (!c->generates) return;
    const bool is_native = native_seems(buf_str(&c->body.bytes), &req_id);
    if (c->endpoint->native && is_native) c->speaks = c->endpoint->native;
    if (!c->speaks->openai && req_id.n)
        c->req_id = (struct str){ arena_strndup(&c->arena, req_id.p, req_id.n), req_id.n };
}

uint64_t completion_start(struct serve *s, const struct completion_options *o)
{
    struct completion_request *c = MEM_NEW(struct completion_request);
    serve_ref(s);
    c->serve = s;
    c->id = ++s->last_id;
    c->endpoint = o->endpoint;
    c->speaks = o->endpoint ? o->endpoint : &OPENAI_CHAT;
    c->generates = o->endpoint && o->endpoint->answers;
    c->t_start_ns = o->t_start_ns ? o->t_start_ns : clock_ns();
    c->reply = o->reply;
    c->body = o->body;
    c->trace = o->trace;
    c->admission = o->admission;
    c->deadline_ms = o->deadline_ms;
    c->created = clock_unix_s();
    if (o->name && serve_name_is_good(str_of(o->name)))
        snprintf(c->name, sizeof c->name, "%s", o->name);
    if (o->fallback_name)
        snprintf(c->fallback_name, sizeof c->fallback_name, "%s", o->fallback_name);
    if (o->bad_header) {
        c->err = *o->bad_header;
        c->has_bad_header = true;
    }
    arena_init(&c->arena);
    guess_form(c);
    if (o->resume && o->resume->wanted) take_resume(c, o->resume);
    map_put(&s->requests, map_key_u64(&c->id), c);
    if (!c->endpoint) return refuse_path(c, o->path);
    if (s->closed) return refuse(c, ERR_UNAVAILABLE, "the node is shutting down");
    if (start_preparing(c) != OK) return refuse(c, ERR_BUSY, TOO_MANY_TO_READ);
    s->n_preparing += c->generates;
    return c->id;
}
