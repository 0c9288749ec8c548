/* routes.h - HTTP paths to what answers them: methods, keys, content types, the metrics of each.
 * For shared/serve only. Thread: loop. */
#ifndef BATON_SERVE_ROUTES_H
#define BATON_SERVE_ROUTES_H

#include "shared/serve/openai/openai.h"

/* Make the metrics of all paths, so that they show before the first request. */
void routes_register(struct serve *s);
/* The dialect of an API path, NULL when it is none. */
const struct openai_endpoint *routes_endpoint(const char *path);

#endif
