/* server.h - the directory server: a port of its own on which `http` backends elsewhere are served
 * (handler.h). A launcher or a prefill node runs it for the others; a router serves the view at its
 * API's port instead. Life cycle: start, stop (then `done`). Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_SERVER_H
#define BATON_SCHEDULER_DIRECTORY_SERVER_H

#include "scheduler/directory/directory.h"

struct directory_server;

/* `local` is a directory of backend "local", borrowed until stop; this process may use it too. */
enum status directory_server_start(struct loop *loop, struct directory *local, const char *host,
                                   uint16_t port, struct str secret, struct directory_server **out,
                                   struct err *err) MUST_CHECK;
uint16_t directory_server_port(const struct directory_server *s);
/* Callers are refused with 503 for a short time, so that no call ends in a reset, then `done`. */
void directory_server_stop(struct directory_server *s, void (*done)(void *arg), void *arg);

#endif
