/* redis_meter.c - reports of what tenants used (meter.h), to a script of Redis and back.
 * Thread: loop. */
#include "scheduler/directory/redis/redis_state.h"
#include "scheduler/directory/redis/scripts.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { SUM_HEAD = 2 /* entries and least, before the sums */ };

/* As the script reads them: "tenant requests tokens cost running waiting;..." */
static void write_uses(const struct meter_report *r, struct buf *out)
{
    for (uint32_t i = 0; i < r->n_uses; i++) {
        const struct meter_use *u = &r->uses[i];
        buf_printf(out, DIRECTORY_ID " %u %" PRIu64 " %" PRIu64 " %u %u;", u->tenant, u->requests,
                   u->tokens < METER_QUANTITY_MAX ? u->tokens : METER_QUANTITY_MAX,
                   u->cost < METER_QUANTITY_MAX ? u->cost : METER_QUANTITY_MAX, u->n_running,
                   u->n_waiting);
    }
}

enum status directory_redis_meter(struct directory *base, const struct meter_report *r,
                                  directory_meter_fn *cb, void *arg)
{
    static const uint64_t limits[] = { METER_LEASE_MS,    METER_FORGET_MS,
                                       METER_SLOT_MS,     METER_WINDOW_MS / METER_SLOT_MS + 1,
                                       METER_TENANTS_MAX, METER_ENTRIES_MAX };
    struct directory_redis *d = (struct directory_redis *)base;
    struct directory_redis_call call = {
        .op = DIRECTORY_OP_METER, .meter = cb, .arg = arg, .n_room = r->n_uses
    };
    char entry[DIRECTORY_REDIS_ID_TEXT], number[DIRECTORY_REDIS_NUMBER_TEXT],
        text[COUNT_OF(limits)][DIRECTORY_REDIS_NUMBER_TEXT];
    struct buf uses = { 0 };
    if (!redis_is_up(d->redis)) return ERR_UNAVAILABLE;
    TRY(directory_remote_may_meter(&d->remote));
    call.room = directory_remote_meter_room(r);
    if (!call.room) return ERR_NOMEM;
    directory_redis_id_text(entry, r->entry);
    directory_redis_number_text(number, r->number);
    write_uses(r, &uses);
    const char *args[3 + COUNT_OF(limits)] = { entry, number, uses.len ? uses.data : "" };
    for (size_t i = 0; i < COUNT_OF(limits); i++) {
        directory_redis_number_text(text[i], limits[i]);
        args[3 + i] = text[i];
    }
    enum status st = directory_redis_call_script(d, call, DIRECTORY_SCRIPT_METER, d->topic, NULL,
                                                 COUNT_OF(args), args);
    buf_release(&uses);
    if (st != OK) mem_free(call.room);
    return st;
}

/* Reads a decimal number of at most 2^53 from the words of *text. */
static bool next_number(struct str *text, uint64_t max, uint64_t *out)
{
    struct str word;
    int64_t v;
    if (!str_split(text, ' ', &word) || str_to_i64(word, &v) != OK) return false;
    if (v < 0 || (uint64_t)v > max) return false;
    *out = (uint64_t)v;
    return true;
}

static bool next_u32(struct str *text, uint32_t *out)
{
    uint64_t v;
    if (!next_number(text, UINT32_MAX, &v)) return false;
    *out = (uint32_t)v;
    return true;
}

/* { entries, least, "requests tokens served running waiting" of each use } */
static enum status read_sums(const struct directory_redis_call *c, const redisReply *list,
                             struct meter_sums *out)
{
    const uint64_t sum_max = UINT64_C(1) << 53;
    struct meter_sums s = { .sums = c->room, .n_sums = c->n_room };
    if (list->type != REDIS_REPLY_ARRAY || list->elements != SUM_HEAD + (size_t)c->n_room)
        return ERR_FORMAT;
    struct str entries = directory_redis_text_at(list, 0), least = directory_redis_text_at(list, 1);
    if (!next_u32(&entries, &s.n_entries) || !next_number(&least, sum_max, &s.least))
        return ERR_FORMAT;
    for (uint32_t i = 0; i < c->n_room; i++) {
        struct str text = directory_redis_text_at(list, SUM_HEAD + i);
        struct meter_sum *one = &c->room[i];
        if (!next_u32(&text, &one->requests) || !next_number(&text, sum_max, &one->tokens) ||
            !next_number(&text, sum_max, &one->served) || !next_u32(&text, &one->n_running) ||
            !next_u32(&text, &one->n_waiting))
            return ERR_FORMAT;
    }
    *out = s;
    return OK;
}

/* What is full: "tenants" or "entries". */
static void log_refused(struct directory_redis *d, struct str what)
{
    char why[160];
    uint32_t n_unlogged;
    if (str_eq_c(what, "tenants")) snprintf(why, sizeof why, METER_TENANTS_FULL, METER_TENANTS_MAX);
    else snprintf(why, sizeof why, METER_ENTRIES_FULL, METER_ENTRIES_MAX);
    if (log_repeats_due(&d->refused_reports, why, clock_ms(), &n_unlogged))
        log_warn("meter report refused", "topic=%s why=\"%s\" repeats=%u", d->topic, why,
                 n_unlogged);
}

void directory_redis_deliver_sums(const struct directory_redis_call *c, enum status st,
                                  const redisReply *reply)
{
    struct meter_sums sums;
    if (st == OK && reply->type == REDIS_REPLY_STRING) {
        log_refused(c->d, (struct str){ reply->str, (size_t)reply->len });
        st = ERR_FULL;
    } else if (st == OK) {
        st = read_sums(c, reply, &sums);
    }
    st = directory_remote_on_metered(&c->d->remote, st);
    c->meter(c->arg, st, st == OK ? &sums : NULL);
}
