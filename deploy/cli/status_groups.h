/* status_groups.h - for `baton status`: asks each node for what it alone tells, its group and the
 * curve that paces its steps (--pace), and draws them.
 * Thread: loop (asking); main (drawing). */
#ifndef BATON_DEPLOY_CLI_STATUS_GROUPS_H
#define BATON_DEPLOY_CLI_STATUS_GROUPS_H

#include "shared/base/json/json.h"
#include "shared/net/http/http_client.h"

struct status_groups;

struct status_groups_options {
    struct http_client *client; /* borrowed until free */
    const char *headers;        /* as those of http_client_request; NULL: none */
    const cJSON *nodes;         /* of /cluster; both needed by start alone */
    void (*done)(void *arg);    /* all have answered, or had their time; not from inside start */
    void *arg;
};

/* NULL: there is nobody to ask, and done is not called. */
struct status_groups *status_groups_start(const struct status_groups_options *o);
/* Appends a block of lines for each group, and a line for each paced node; nothing when there is
 * none, or NULL is given. */
void status_groups_draw(const struct status_groups *g, struct buf *out);
/* After the client. NULL is accepted. */
void status_groups_free(struct status_groups *g);

#endif
