/* service_gauges.c - see service_gauges.h. */
#include "deploy/service/service_gauges.h"

#include <stdio.h>

enum gauge_of { BATCH_SIZE, BLOCK_NUM, MAX_BATCH_SIZE, MAX_BLOCK_NUM, AVAILABLE_RESOURCE };

static const char *const LABELS[SERVICE_GAUGES] = {
    [BATCH_SIZE] = "batch_size",
    [BLOCK_NUM] = "block_num",
    [MAX_BATCH_SIZE] = "max_batch_size",
    [MAX_BLOCK_NUM] = "max_block_num",
    [AVAILABLE_RESOURCE] = "available_resource",
};

void service_gauges_register(struct service_gauges *g, struct metrics *m)
{
    char labels[64];
    for (size_t i = 0; i < SERVICE_GAUGES; i++) {
        snprintf(labels, sizeof labels, "%s=\"%s\"", LABELS[i], LABELS[i]);
        g->of[i] = metrics_gauge(m, "inference_server_metrics", labels,
                                 "As PaddleNLP's service has them: sequences that run and may, KV "
                                 "blocks that are free (block_num) and there, the free part.");
    }
}

void service_gauges_set(struct service_gauges *g, const struct service_load *l)
{
    if (!g->of[BATCH_SIZE]) return;
    gauge_set(g->of[BATCH_SIZE], (double)l->n_running);
    gauge_set(g->of[BLOCK_NUM], (double)l->n_blocks_free);
    gauge_set(g->of[MAX_BATCH_SIZE], (double)l->max_seqs);
    gauge_set(g->of[MAX_BLOCK_NUM], (double)l->n_blocks);
    gauge_set(g->of[AVAILABLE_RESOURCE],
              l->n_blocks ? (double)l->n_blocks_free / (double)l->n_blocks : 0);
}
