/* backends.h - the backends of the directory, for directory.c only. Thread: any (constants). */
#ifndef BATON_SCHEDULER_DIRECTORY_BACKENDS_H
#define BATON_SCHEDULER_DIRECTORY_BACKENDS_H

#include "scheduler/directory/directory.h"

extern const struct directory_ops directory_local_ops, directory_http_ops, directory_redis_ops;

#endif
