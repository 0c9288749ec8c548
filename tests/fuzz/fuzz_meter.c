/* fuzz_meter.c - arbitrary bytes as a report of what tenants used, and as the sums that answer one:
 * what is accepted is within its bounds, and equal after being written and read again. An accepted
 * report is counted. */
#include <stdlib.h>
#include <string.h>

#include "scheduler/directory/meter_book.h"
#include "scheduler/directory/meter_wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static cJSON *parse(struct str text)
{
    struct err err;
    cJSON *o = NULL;
    return json_parse(text, false, &o, &err) == OK ? o : NULL;
}

/* As the members of an object. */
static cJSON *parse_members(struct buf *members)
{
    struct buf text = { 0 };
    buf_add_char(&text, '{');
    buf_add_str(&text, buf_str(members));
    buf_add_char(&text, '}');
    cJSON *o = parse(buf_str(&text));
    buf_release(&text);
    buf_release(members);
    if (!o) abort();
    return o;
}

static void count(const struct meter_report *r)
{
    static struct meter_sum sums[METER_TENANTS_MAX];
    struct meter_book *b = meter_book_create();
    struct meter_sums out;
    for (uint64_t now = 0; now < 3; now++) {
        if (meter_book_report(b, r, now * 40000, sums, &out, NULL) != OK) abort();
        if (out.n_sums != r->n_uses || out.n_entries != 1) abort();
        for (uint32_t i = 0; i < out.n_sums; i++)
            if (sums[i].tokens > UINT64_C(1) << 53 || sums[i].served > UINT64_C(1) << 53) abort();
    }
    meter_book_free(b);
}

static void check_report(const cJSON *o)
{
    static struct meter_use rooms[2][METER_TENANTS_MAX];
    struct meter_report a, b;
    struct err err = { 0 };
    struct buf text = { 0 };
    if (meter_report_read(o, rooms[0], &a, &err) != OK) {
        if (err.code == OK || !err.text[0]) abort();
        return;
    }
    if (!a.entry || !a.number || a.number >= METER_NUMBER_END || a.n_uses > METER_TENANTS_MAX)
        abort();
    for (uint32_t i = 0; i < a.n_uses; i++)
        if (!a.uses[i].tenant || a.uses[i].tokens > METER_QUANTITY_MAX) abort();
    meter_report_write(&a, &text);
    cJSON *again = parse_members(&text);
    if (meter_report_read(again, rooms[1], &b, &err) != OK) abort();
    if (a.entry != b.entry || a.number != b.number || a.n_uses != b.n_uses) abort();
    for (uint32_t i = 0; i < a.n_uses; i++) {
        const struct meter_use *x = &a.uses[i], *y = &b.uses[i];
        if (x->tenant != y->tenant || x->requests != y->requests || x->tokens != y->tokens ||
            x->cost != y->cost || x->n_running != y->n_running || x->n_waiting != y->n_waiting)
            abort();
    }
    cJSON_Delete(again);
    count(&a);
}

static void check_sums(const cJSON *o)
{
    static struct meter_sum rooms[2][METER_TENANTS_MAX];
    struct meter_sums a, b;
    struct err err = { 0 };
    struct buf text = { 0 };
    const int n = cJSON_GetArraySize(json_member(o, "sums"));
    if (n > METER_TENANTS_MAX) return;
    if (meter_sums_read(o, rooms[0], (uint32_t)n, &a, &err) != OK) {
        if (err.code == OK || !err.text[0]) abort();
        return;
    }
    if (a.n_sums != (uint32_t)n || a.n_entries > METER_ENTRIES_MAX) abort();
    meter_sums_write(&a, &text);
    cJSON *again = parse_members(&text);
    if (meter_sums_read(again, rooms[1], (uint32_t)n, &b, &err) != OK) abort();
    if (a.n_entries != b.n_entries || a.least != b.least) abort();
    for (int i = 0; i < n; i++) {
        const struct meter_sum *x = &a.sums[i], *y = &b.sums[i];
        if (x->requests != y->requests || x->tokens != y->tokens || x->served != y->served ||
            x->n_running != y->n_running || x->n_waiting != y->n_waiting)
            abort();
    }
    cJSON_Delete(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    cJSON *o = parse((struct str){ (const char *)data, size });
    if (!o) return 0;
    check_report(o);
    check_sums(o);
    cJSON_Delete(o);
    return 0;
}
