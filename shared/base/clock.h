/* clock.h - monotonic time. Clocks of different machines are never compared; wall time is only for
 * people to read. Thread: any. */
#ifndef BATON_BASE_CLOCK_H
#define BATON_BASE_CLOCK_H

#include <stdint.h>

uint64_t clock_ns(void);     /* monotonic */
uint64_t clock_ms(void);     /* monotonic */
int64_t clock_unix_s(void);  /* wall clock, for `created` fields and log lines */
int64_t clock_unix_us(void); /* the same in microseconds */

#endif
