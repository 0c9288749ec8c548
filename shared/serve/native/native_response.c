/* native_response.c - items, whole answers and errors of the native form. Thread: see
 * endpoint.h. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "shared/base/clock.h"
#include "shared/serve/completion_request.h"
#include "shared/serve/native/native.h"

enum { US_PER_S = 1000000, NS_PER_US = 1000 };

static bool has_event(const struct choice *ch)
{
    const struct completion_request *c = ch->request;
    return !c->native->return_all && !c->serve->o.last_item_alone && !ch->may_be_last &&
           !choice_ended_locally(ch);
}

/* ---- the parts of an item ---- */

/* The ids from byte `from` on; at the end without the end token, which has no text. */
static void write_ids(const struct choice *ch, const char *name, size_t from, bool finish,
                      struct buf *out)
{
    const struct str bytes = str_sub(buf_str(&ch->ids), from, SIZE_MAX);
    const int32_t *ids = (const int32_t *)(const void *)bytes.p;
    size_t n = bytes.n / sizeof *ids;
    const bool is_stopped = finish && ch->end.finish == FINISH_STOP && !choice_ended_locally(ch);
    if (is_stopped && n && ids[n - 1] == ch->end.stop_token) n--;
    openai_write_ids(out, name, ids, n);
}

/* As Python prints the time of a clock on the wall. */
static void write_time(struct buf *out, const char *name, int64_t us)
{
    const time_t s = us / US_PER_S;
    struct tm t;
    char text[32] = "";
    localtime_r(&s, &t);
    strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &t);
    buf_printf(out, ",\"%s\":\"%s.%06d\"", name, text, (int)(us % US_PER_S));
}

/* With member benchmark: when the steps of the request were. When its computing began is known at
 * its end. */
static void write_times(const struct choice *ch, bool finish, struct buf *out)
{
    const struct native_request *n = ch->request->native;
    const struct gen_trace *t = &ch->end.trace;
    write_time(out, "preprocess_start_time", n->read_us);
    write_time(out, "preprocess_end_time", n->prepared_us);
    write_time(out, "schedule_start_time", n->submitted_us);
    if (finish)
        write_time(out, "inference_start_time",
                   n->submitted_us + (int64_t)((t->place_ns + t->queue_ns) / NS_PER_US));
    write_time(out, "inference_current_step_time", clock_unix_us());
    if (ch->request->endpoint != &NATIVE_ITEMS) write_time(out, "http_received_time", n->came_us);
}

static struct str text_since(const struct choice *ch, size_t from)
{
    return str_sub(buf_str(&ch->text), from, SIZE_MAX);
}

static void write_usage(const struct choice *ch, struct buf *out)
{
    buf_printf(out, ",\"usage\":{\"completion_tokens\":%" PRIu32 ",\"prompt_tokens\":%zu}",
               ch->n_tokens, ch->prompt->n_tokens);
}

static void write_all(const struct choice *ch, struct buf *out)
{
    buf_add_c(out, ",\"tokens_all\":");
    json_add_string(out, text_since(ch, 0));
    write_ids(ch, "tokens_all_ids", 0, true, out);
    buf_printf(out, ",\"tokens_all_num\":%" PRIu32, ch->n_tokens);
}

/* All members but the last ones. */
static void begin_item(const struct choice *ch, bool finish, struct buf *out)
{
    const struct completion_request *c = ch->request;
    const struct native_request *n = c->native;
    buf_add_c(out, "{\"req_id\":");
    json_add_string(out, c->req_id);
    buf_printf(out, ",\"is_end\":%d", finish);
    write_ids(ch, "token_ids", ch->n_ids_sent, finish, out);
    buf_printf(out, ",\"send_idx\":%" PRIu32 ",\"token\":", ch->n_tokens ? ch->n_tokens - 1 : 0);
    json_add_string(out, text_since(ch, ch->n_text_sent));
    buf_printf(out, ",\"inference_time_cost\":%.6f,\"infer_seed\":%" PRId64,
               (double)(clock_ns() - n->t_submit_ns) * 1e-9, (int64_t)c->p.sampling.seed);
    buf_printf(out, ",\"return_all_tokens\":%s", n->return_all ? "true" : "false");
    if (n->return_usage) write_usage(ch, out);
    if (n->benchmark) write_times(ch, finish, out);
    if (finish) write_all(ch, out);
    if (finish && c->trace) {
        buf_add_c(out, ",\"baton\":");
        openai_write_trace(c, out);
    }
}

/* Where an item says so in any case: over HTTP. */
static void end_item(const struct choice *ch, struct buf *out)
{
    if (ch->request->endpoint != &NATIVE_ITEMS)
        buf_add_c(out, ",\"error_msg\":\"\",\"error_code\":0");
    buf_add_char(out, '}');
}

static void write_item(const struct choice *ch, bool finish, struct buf *out)
{
    begin_item(ch, finish, out);
    end_item(ch, out);
}

static void write_body(struct completion_request *c)
{
    const struct choice *ch = &c->choices[0];
    begin_item(ch, true, &c->out);
    buf_add_c(&c->out, ",\"result\":");
    json_add_string(&c->out, text_since(ch, 0));
    end_item(ch, &c->out);
}

/* Each item has it: there is no chunk of its own for it. */
static void write_no_usage(const struct completion_request *c, struct buf *out)
{
    (void)c, (void)out;
}

const struct answer_ops NATIVE_ANSWERS = {
    .lines = true,
    .keeps_all = true,
    .start = native_start,
    .has_event = has_event,
    .write_event = write_item,
    .write_usage = write_no_usage,
    .write_body = write_body,
};

/* ---- errors ---- */

/* There is no member for what is at fault, so the sentence has to name it. */
void native_write_error(const struct api_error *e, struct buf *out)
{
    struct buf text = { 0 };
    const int64_t now = clock_unix_us();
    if (e->param && !strstr(e->message, e->param)) buf_printf(&text, "%s: ", e->param);
    buf_add_c(&text, e->message);
    buf_add_c(out, "{\"req_id\":");
    json_add_string(out, e->req_id);
    buf_add_c(out, ",\"error_msg\":");
    json_add_string(out, buf_str(&text));
    buf_printf(out, ",\"error_code\":%d,\"version\":\"%s\",\"timestamp\":%" PRId64 ".%06d}",
               e->http, BATON_VERSION, now / US_PER_S, (int)(now % US_PER_S));
    buf_release(&text);
}

void serve_native_error_json(struct buf *out, enum status st, const char *message, struct str body,
                             const char *name)
{
    struct api_error e = openai_error_of(st, message, NULL);
    (void)native_seems(body, &e.req_id);
    if (e.req_id.n == 0) e.req_id = str_of(name);
    native_write_error(&e, out);
}
