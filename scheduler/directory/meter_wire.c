/* meter_wire.c - see meter_wire.h. */
#include "scheduler/directory/meter_wire.h"

#include <inttypes.h>
#include <math.h>

#include "scheduler/directory/wire.h"

#define SUM_MAX (UINT64_C(1) << 53) /* which every JSON reader keeps exactly */

static uint64_t at_most(uint64_t v, uint64_t max) { return v < max ? v : max; }

void meter_report_write(const struct meter_report *r, struct buf *out)
{
    directory_add_id(out, "entry", r->entry);
    buf_printf(out, ",\"number\":%" PRIu64 ",\"uses\":[", r->number);
    for (uint32_t i = 0; i < r->n_uses; i++) {
        const struct meter_use *u = &r->uses[i];
        buf_printf(out, "%s[\"" DIRECTORY_ID "\",%u,%" PRIu64 ",%" PRIu64 ",%u,%u]", i ? "," : "",
                   u->tenant, u->requests, at_most(u->tokens, METER_QUANTITY_MAX),
                   at_most(u->cost, METER_QUANTITY_MAX), u->n_running, u->n_waiting);
    }
    buf_add_char(out, ']');
}

void meter_sums_write(const struct meter_sums *s, struct buf *out)
{
    buf_printf(out, "\"entries\":%u,\"least\":%" PRIu64 ",\"sums\":[", s->n_entries, s->least);
    for (uint32_t i = 0; i < s->n_sums; i++) {
        const struct meter_sum *one = &s->sums[i];
        buf_printf(out, "%s[%u,%" PRIu64 ",%" PRIu64 ",%u,%u]", i ? "," : "", one->requests,
                   one->tokens, one->served, one->n_running, one->n_waiting);
    }
    buf_add_char(out, ']');
}

/* Reads the number at *item, the next of its list, and goes on to the one behind it. */
static bool next_number(const cJSON **item, uint64_t max, uint64_t *out)
{
    const cJSON *v = *item;
    if (!v || !cJSON_IsNumber(v)) return false;
    if (!(v->valuedouble >= 0 && v->valuedouble <= (double)max)) return false;
    if (v->valuedouble != floor(v->valuedouble)) return false;
    *out = (uint64_t)v->valuedouble;
    *item = v->next;
    return true;
}

static bool next_u32(const cJSON **item, uint32_t *out)
{
    uint64_t v;
    if (!next_number(item, UINT32_MAX, &v)) return false;
    *out = (uint32_t)v;
    return true;
}

static bool read_use(const cJSON *list, struct meter_use *u)
{
    const cJSON *item = cJSON_IsArray(list) ? list->child : NULL;
    if (!cJSON_IsString(item)) return false;
    if (directory_read_id(str_of(item->valuestring), &u->tenant) != OK || !u->tenant) return false;
    item = item->next;
    return next_u32(&item, &u->requests) && next_number(&item, METER_QUANTITY_MAX, &u->tokens) &&
           next_number(&item, METER_QUANTITY_MAX, &u->cost) && next_u32(&item, &u->n_running) &&
           next_u32(&item, &u->n_waiting) && !item;
}

static bool read_sum(const cJSON *list, struct meter_sum *s)
{
    const cJSON *item = cJSON_IsArray(list) ? list->child : NULL;
    return next_u32(&item, &s->requests) && next_number(&item, SUM_MAX, &s->tokens) &&
           next_number(&item, SUM_MAX, &s->served) && next_u32(&item, &s->n_running) &&
           next_u32(&item, &s->n_waiting) && !item;
}

static enum status read_number(const cJSON *o, const char *name, int64_t min, int64_t max,
                               uint64_t *out, struct err *err)
{
    int64_t v = min - 1;
    TRY(json_get_i64(o, name, min, max, &v, err));
    if (v < min) return err_field(err, ERR_INVALID, name, "%s is missing", name);
    *out = (uint64_t)v;
    return OK;
}

enum status meter_report_read(const cJSON *o, struct meter_use *room, struct meter_report *out,
                              struct err *err)
{
    struct meter_report r = { .uses = room };
    const cJSON *list = json_member(o, "uses"), *one;
    TRY(directory_get_id(o, "entry", &r.entry, err));
    if (!r.entry) return err_field(err, ERR_INVALID, "entry", "entry is missing or 0");
    TRY(read_number(o, "number", 1, METER_NUMBER_END - 1, &r.number, err));
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > METER_TENANTS_MAX)
        return err_field(err, ERR_INVALID, "uses", "uses must be an array of at most %d tenants",
                         METER_TENANTS_MAX);
    cJSON_ArrayForEach (one, list)
        if (!read_use(one, &room[r.n_uses++]))
            return err_field(err, ERR_INVALID, "uses",
                             "use %u is not [\"<16 hexadecimal digits>\", requests, tokens, cost, "
                             "running, waiting] with whole numbers, tokens and cost at most 2^46",
                             r.n_uses - 1);
    *out = r;
    return OK;
}

enum status meter_sums_read(const cJSON *o, struct meter_sum *room, uint32_t n,
                            struct meter_sums *out, struct err *err)
{
    struct meter_sums s = { .sums = room };
    const cJSON *list = json_member(o, "sums"), *one;
    uint64_t n_entries = 0;
    TRY(read_number(o, "entries", 0, METER_ENTRIES_MAX, &n_entries, err));
    TRY(read_number(o, "least", 0, (int64_t)SUM_MAX, &s.least, err));
    if (!cJSON_IsArray(list) || (uint32_t)cJSON_GetArraySize(list) != n)
        return err_field(err, ERR_INVALID, "sums", "sums must be an array of %u sums", n);
    cJSON_ArrayForEach (one, list)
        if (!read_sum(one, &room[s.n_sums++]))
            return err_field(err, ERR_INVALID, "sums",
                             "sum %u is not [requests, tokens, served, running, waiting] with "
                             "whole numbers of at most 2^53",
                             s.n_sums - 1);
    s.n_entries = (uint32_t)n_entries;
    *out = s;
    return OK;
}
