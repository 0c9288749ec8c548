/* metrics_merge.h - the metrics of several processes as one page for Prometheus: each series gets
 * the label `worker`, and each family stands together, with one head. Thread: any (pure). */
#ifndef BATON_DEPLOY_ROUTER_METRICS_MERGE_H
#define BATON_DEPLOY_ROUTER_METRICS_MERGE_H

#include "shared/base/buf.h"

struct metrics_page {
    const char *worker; /* the label's value */
    struct str text;    /* as metrics_write writes it */
};

void metrics_merge(const struct metrics_page *pages, size_t n, struct buf *out);

#endif
