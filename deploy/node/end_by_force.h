/* end_by_force.h - ends the process when its orderly end takes too long.
 *
 * After a signal a node frees its parts in order, but a thread may be inside a long step, a slow
 * file system or a driver. Nothing is lost then by ending at once: peers see closed connections, as
 * after a crash. Thread: any. */
#ifndef BATON_DEPLOY_NODE_END_BY_FORCE_H
#define BATON_DEPLOY_NODE_END_BY_FORCE_H

#include <stdint.h>

/* Calls _exit(exit_status) when the process still runs after `ms`. Only the first call counts. */
void end_by_force_after(uint32_t ms, int exit_status);

#endif
