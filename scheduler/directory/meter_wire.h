/* meter_wire.h - reports and sums (meter.h) as members of JSON objects, for the `http` backend and
 * the directory server (wire.h). Lists instead of objects keep the longest report below
 * DIRECTORY_BODY_MAX. Thread: any (pure functions). */
#ifndef BATON_SCHEDULER_DIRECTORY_METER_WIRE_H
#define BATON_SCHEDULER_DIRECTORY_METER_WIRE_H

#include "scheduler/directory/meter.h"
#include "shared/base/json/json.h"

/* Appends "entry":"<id>","number":N,"uses":[["<id>",requests,tokens,cost,running,waiting],...].
 * What is above METER_QUANTITY_MAX is written as that. */
void meter_report_write(const struct meter_report *r, struct buf *out);
/* Reads these members with every bound checked; room [METER_TENANTS_MAX] is where out->uses lies.
 * ERR_INVALID names the member. */
enum status meter_report_read(const cJSON *o, struct meter_use *room, struct meter_report *out,
                              struct err *err) MUST_CHECK;
/* Appends "entries":N,"least":N,"sums":[[requests,tokens,served,running,waiting],...]: the asker
 * knows whose they are. */
void meter_sums_write(const struct meter_sums *s, struct buf *out);
/* Reads these members with every bound checked. room [n] is where out->sums lies; its tenants stay
 * as they are. ERR_INVALID also when there are not n sums. */
enum status meter_sums_read(const cJSON *o, struct meter_sum *room, uint32_t n,
                            struct meter_sums *out, struct err *err) MUST_CHECK;

#endif
