/* meter_book.h - the counters of one topic in plain structs: the definition of what meter.h says,
 * and the state of the `local` backend. Pure: the caller gives the time. Thread: its owner's. */
#ifndef BATON_SCHEDULER_DIRECTORY_METER_BOOK_H
#define BATON_SCHEDULER_DIRECTORY_METER_BOOK_H

#include <stdbool.h>

#include "scheduler/directory/meter.h"
#include "shared/base/err.h"

struct meter_book;

struct meter_book *meter_book_create(void);
void meter_book_free(struct meter_book *b);
/* Counts a report and answers it: `sums` has room for r->n_uses and is what out->sums points to.
 * now_ms does not go back. ERR_FULL: no room for a tenant or an entry; nothing was counted, and err
 * (may be NULL) has the sentence. */
enum status meter_book_report(struct meter_book *b, const struct meter_report *r, uint64_t now_ms,
                              struct meter_sum *sums, struct meter_sums *out,
                              struct err *err) MUST_CHECK;
/* No entry was heard of within METER_FORGET_MS. */
bool meter_book_is_over(struct meter_book *b, uint64_t now_ms);

#endif
