/* handler.h - answers the calls of `http` backends elsewhere (POST /cluster/v1/{publish, leave,
 * snapshot, reserve, release, meter}) from a local directory. Any HTTP server may mount it: one of
 * its own port (server.h), or the API's of a router.
 *
 * Who calls must prove the cluster secret (directory_check_caller). The server that mounts it
 * limits bodies under DIRECTORY_PATH to DIRECTORY_BODY_MAX. Life cycle: create, serve, close (the
 * directory may go; calls get 503), free after the server has stopped. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_HANDLER_H
#define BATON_SCHEDULER_DIRECTORY_HANDLER_H

#include "scheduler/directory/directory.h"
#include "shared/net/http/http_server.h"

struct directory_handler;

/* `local` is a directory of backend "local", borrowed until close; this process may use it too. */
struct directory_handler *directory_handler_create(struct directory *local, struct str secret);
/* Answers one exchange, whatever its path is. */
void directory_handler_serve(struct directory_handler *h, struct http_exchange *x);
/* Somebody without the right secret called within the last seconds: who and why, a sentence, valid
 * until the next call that is refused. NULL: nobody did. */
const char *directory_handler_stranger(const struct directory_handler *h);
void directory_handler_close(struct directory_handler *h);
void directory_handler_free(struct directory_handler *h);

/* May who sent this request make calls between nodes? With a secret its Authorization must be
 * directory_prove's; without one it must come from this host, and from no proxy that says so. A
 * proxy that does not is taken for this host. ERR_UNAUTHORIZED says which it is. */
enum status directory_check_caller(struct str secret, const struct http_exchange *x,
                                   struct err *err) MUST_CHECK;

#endif
