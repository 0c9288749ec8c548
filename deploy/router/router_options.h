/* router_options.h - the options of a router: those of an entry node without an engine, and the
 * nodes that it lists. Thread: main, at start. */
#ifndef BATON_DEPLOY_ROUTER_ROUTER_OPTIONS_H
#define BATON_DEPLOY_ROUTER_ROUTER_OPTIONS_H

#include "deploy/node/node_options.h"

/* As node_options_read, without what an engine needs; a model is not needed either. The caller
 * releases `out` in any case. */
enum status router_options_read(const struct config *c, struct node_options *out,
                                struct err *err) MUST_CHECK;
/* Appends the start page. */
void router_options_print(const struct node_options *o, const struct config *c, struct buf *out);

#endif
