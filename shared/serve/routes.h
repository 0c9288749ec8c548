/* routes.h - maps HTTP paths to handlers and checks methods, keys and content types. For
 * shared/serve only. Thread: loop. */
#ifndef BATON_SERVE_ROUTES_H
#define BATON_SERVE_ROUTES_H

#include "shared/serve/endpoint.h"
#include "shared/serve/serve_state.h"

/* Registers the metrics of all paths, so that they are visible before the first request. */
void routes_register(struct serve *s);
/* Returns the endpoint of a path for serve_submit; NULL: it is none. */
const struct endpoint *routes_endpoint(const char *path);

#endif
