/* ranks_model.h - what a parent can tell of its ranks and the model before it starts them, so that
 * one sentence says what each of them would. Reads the model's configuration, no weights.
 * Thread: main, at start. */
#ifndef BATON_DEPLOY_LAUNCH_RANKS_MODEL_H
#define BATON_DEPLOY_LAUNCH_RANKS_MODEL_H

#include "deploy/launch/ranks.h"
#include "shared/base/buf.h"

struct model_config;

/* Reads the configuration of the model of --model. */
enum status ranks_read_model(const struct config *c, struct model_config *out,
                             struct err *err) MUST_CHECK;
/* Ranks may share a GPU; but who counts them by MP_NUM means one for each, of those that
 * CUDA_VISIBLE_DEVICES lists. n_gpus: those that are there, at least 1. For ranks_model.c and its
 * test. */
enum status ranks_check_gpus(const struct config *c, const struct ranks *r, int n_gpus,
                             struct err *err) MUST_CHECK;
/* Checks the device of --device, the model of --model, and that `r` can divide it; appends to
 * *notes, a line each, what works and is hardly meant. The error is what a node would say. */
enum status ranks_check_model(const struct config *c, const struct ranks *r, struct buf *notes,
                              struct err *err) MUST_CHECK;
/* How many copies of experts have a rank of their own to be on: one of each on every rank but that
 * of the original. */
uint64_t ranks_copies_max(const struct ranks *r, const struct model_config *m);

#endif
