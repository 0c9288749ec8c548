/* native_request.c - the three endpoints of the native form; one req_id at a time, and timeouts.
 * Thread: loop, except the functions of prepare (a worker). */
#include <stdio.h>

#include "shared/base/clock.h"
#include "shared/serve/completion_request.h"
#include "shared/serve/native/native.h"

/* ---- preparing ---- */

static enum status prepare(struct completion_request *c, cJSON *doc, bool is_chat, struct err *err)
{
    const int64_t read_us = clock_unix_us();
    TRY(native_params_parse(c, doc, err));
    c->native->read_us = read_us;
    c->native->came_us = read_us - (int64_t)((clock_ns() - c->t_start_ns) / 1000);
    TRY(native_prompt_parse(c, doc, is_chat, err));
    c->native->prepared_us = clock_unix_us();
    return OK;
}

static enum status chat_prepare(struct completion_request *c, cJSON *doc, struct err *err)
{
    return prepare(c, doc, true, err);
}

static enum status completions_prepare(struct completion_request *c, cJSON *doc, struct err *err)
{
    return prepare(c, doc, false, err);
}

/* Whoever calls serve_submit has no other way to take an answer than in parts. */
static enum status items_prepare(struct completion_request *c, cJSON *doc, struct err *err)
{
    TRY(prepare(c, doc, true, err));
    c->p.stream = true;
    return OK;
}

/* ---- one at a time ---- */

static enum status hold_req_id(struct completion_request *c, struct err *err)
{
    struct map *held = &c->serve->native_ids;
    if (c->native->req_id.n == 0) { /* the server's own: no other request has it */
        c->req_id = str_of(c->name);
        return OK;
    }
    if (map_get(held, c->req_id))
        return err_field(err, ERR_CONFLICT, "req_id",
                         "req_id is '%.*s', which another request that still runs here has; give "
                         "each request one of its own",
                         (int)(c->req_id.n < 80 ? c->req_id.n : 80), c->req_id.p);
    map_put(held, c->req_id, c);
    c->holds_req_id = true;
    return OK;
}

static void on_silence(void *arg);

static void wait_for_token(struct completion_request *c)
{
    const uint64_t due = c->t_heard_ms + (uint64_t)c->native->timeout_s * 1000, now = clock_ms();
    loop_timer_free(c->silence);
    c->silence = loop_timer_start(c->serve->o.loop, due > now ? due - now : 0, 0, on_silence, c);
}

static void on_silence(void *arg)
{
    struct completion_request *c = arg;
    char text[160];
    if (clock_ms() - c->t_heard_ms < (uint64_t)c->native->timeout_s * 1000) {
        wait_for_token(c);
        return;
    }
    snprintf(text, sizeof text,
             "timeout is %u, and no token came for so many seconds; give a longer one, or send "
             "the request again later",
             c->native->timeout_s);
    if (c->stage == COMPLETION_RUNNING) completion_fail(c, ERR_TIMEOUT, text, "timeout");
}

enum status native_start(struct completion_request *c, struct err *err)
{
    if (c->resume)
        return err_field(err, ERR_UNSUPPORTED,
                         c->resume->returns ? "Last-Event-ID" : "x-baton-resume",
                         "an answer in FastDeploy's native form has no event ids and cannot be "
                         "resumed: leave x-baton-resume and Last-Event-ID out, or send a request "
                         "of OpenAI's form");
    TRY(hold_req_id(c, err));
    c->native->submitted_us = clock_unix_us();
    c->native->t_submit_ns = clock_ns();
    c->t_heard_ms = c->t_start_ns / 1000000;
    wait_for_token(c);
    return OK;
}

void native_stop(struct completion_request *c)
{
    loop_timer_free(c->silence);
    c->silence = NULL;
    if (c->holds_req_id) map_del(&c->serve->native_ids, c->req_id);
    c->holds_req_id = false;
}

/* ---- the endpoints ---- */

#define NATIVE_ENDPOINT(prepare_)                                                                  \
    {                                                                                              \
        .object = "native", .answers = &NATIVE_ANSWERS, .prepare = prepare_,                       \
        .write_error = native_write_error,                                                         \
    }

const struct endpoint NATIVE_CHAT = NATIVE_ENDPOINT(chat_prepare);
const struct endpoint NATIVE_COMPLETIONS = NATIVE_ENDPOINT(completions_prepare);
const struct endpoint NATIVE_ITEMS = NATIVE_ENDPOINT(items_prepare);
