/* clock.h - monotonic time. No clock of another machine is ever compared; wall time is for people
 * only. */
#ifndef BATON_BASE_CLOCK_H
#define BATON_BASE_CLOCK_H

#include <stdint.h>

uint64_t clock_ns(void);    /* monotonic */
uint64_t clock_ms(void);    /* monotonic */
int64_t clock_unix_s(void); /* wall clock, for `created` fields and log lines */

#endif
