/* server.h - the holder's side of the `http` row: a local directory behind POST
 * /cluster/v1/{publish,leave,snapshot, reserve,release}, so that a launcher, a router or a prefill
 * node can hold the view for the others.
 *
 * Requests carry "Authorization: Baton <hex HMAC-SHA256(secret, method path body)>" when a secret
 * is set; others get 401. Thread: loop. Life cycle: start, stop (then `done`). */
#ifndef BATON_SCHEDULER_DIRECTORY_SERVER_H
#define BATON_SCHEDULER_DIRECTORY_SERVER_H

#include "scheduler/directory/directory.h"

struct directory_server;

/* `local`: a directory of row "local" (kept, borrowed): it may also be used directly by this
 * process. */
enum status directory_server_start(struct loop *loop, struct directory *local, const char *host,
                                   uint16_t port, struct str secret, struct directory_server **out,
                                   struct err *err) MUST_CHECK;
uint16_t directory_server_port(const struct directory_server *s);
void directory_server_stop(struct directory_server *s, void (*done)(void *arg), void *arg);

#endif
