/* request_pressed.h - a request whose node has taken its KV blocks for an older one: stays there or
 * goes on elsewhere (pressure.h). Thread: loop. */
#ifndef BATON_SCHEDULER_PRESSURE_REQUEST_PRESSED_H
#define BATON_SCHEDULER_PRESSURE_REQUEST_PRESSED_H

#include "scheduler/request.h"

/* PREEMPTED came from its decode node. The attempt may have ended. */
void request_on_preempted(struct entry *e, struct request *r, const struct cluster_message *m);

#endif
