/* simt_launches.h - launches that are written down instead of run (BATON_SIMT_LAUNCHES), so that
 * those of a model of any size can be compared with what they should be. Thread: the one that holds
 * the execution lock. */
#ifndef BATON_TESTS_SIMT_SIMT_LAUNCHES_H
#define BATON_TESTS_SIMT_SIMT_LAUNCHES_H

#include <stdbool.h>

#ifdef __cplusplus
#include "tests/simt/include/simt.h"

/* Nothing runs: memory need not be filled either. */
bool simt_notes_launches(void);
/* False: the launch is to be run. */
bool simt_launch_is_noted(const simt_launch_shape &shape);
#endif
#endif
