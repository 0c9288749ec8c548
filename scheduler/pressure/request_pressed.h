/* request_pressed.h - a request whose node has taken its KV blocks for an older one: stays there or
 * goes on elsewhere (pressure.h). Thread: loop. */
#ifndef BATON_SCHEDULER_PRESSURE_REQUEST_PRESSED_H
#define BATON_SCHEDULER_PRESSURE_REQUEST_PRESSED_H

#include "scheduler/request.h"

/* Both may end the attempt. PREEMPTED came from its decode node: */
void request_on_preempted(struct entry *e, struct request *r, const struct cluster_message *m);
/* The view is fresh: others may have room by now. One request may go there: what it takes is not in
 * the view before the next. */
void request_pressed_look_again(struct entry *e);

#endif
