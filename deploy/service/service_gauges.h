/* service_gauges.h - the gauges of PaddleNLP's service, inference_server_metrics: one family whose
 * series differ in the name of their label. Scrapers of that service read them at --metrics-port,
 * beside Baton's own. Life cycle: registered with the metrics, set before each scrape.
 * Thread: loop. */
#ifndef BATON_DEPLOY_SERVICE_SERVICE_GAUGES_H
#define BATON_DEPLOY_SERVICE_SERVICE_GAUGES_H

#include "shared/base/metrics.h"

enum { SERVICE_GAUGES = 5 };

struct service_gauges {
    struct gauge *of[SERVICE_GAUGES]; /* NULL: not registered */
};

/* What they tell of: this node, or the nodes behind its port together. */
struct service_load {
    uint64_t n_running, max_seqs;
    uint64_t n_blocks_free, n_blocks;
};

void service_gauges_register(struct service_gauges *g, struct metrics *m);
/* Does nothing before they are registered. */
void service_gauges_set(struct service_gauges *g, const struct service_load *l);

#endif
