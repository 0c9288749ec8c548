/* expert_rows.h - how many rows a rank routed to which expert, and computed, while ranks share
 * experts: what a better placement of them is chosen by (kernels/ep/balance.h). Without an ep
 * object nothing is counted. A GPU counts by itself, and the engine fetches its numbers now and
 * then, so that they come a second or two late.
 * Thread: the engine counts, any other may read meanwhile. */
#ifndef BATON_MODEL_EXPERT_ROWS_H
#define BATON_MODEL_EXPERT_ROWS_H

#include "kernels/ep/ep.h"

struct metrics;
struct model;
struct expert_rows;

/* out [sparse layers, n_experts]: rows of this rank that chose each expert, since the model was
 * loaded. Rows that are computed again after a loss count again. Any thread. */
void model_expert_rows(const struct model *m, uint64_t *out);
/* Rows that this rank's experts have computed, for all ranks; a row counts once for each expert
 * that it chose. Any thread, as the next. */
uint64_t model_computed_rows(const struct model *m);
/* out [n_experts]: the same by expert, all layers together; copies on other ranks are theirs. */
void model_expert_load(const struct model *m, uint64_t *out);
/* Registers baton_moe_rows_total and baton_ep_rows_{sent,received}_total and counts on them from
 * then on. Before the first step; the registry outlives the model. */
void model_count_rows_on(struct model *m, struct metrics *registry);
/* On a GPU, takes the numbers that it was asked for in a call before, and asks again. Without
 * waiting. Engine, whenever it looks around. */
void model_look_at_rows(const struct model *m);

/* ---- shared/model ---- */

/* NULL without sparse layers. */
struct expert_rows *expert_rows_create(const struct model *m);
/* Of a model that shares its experts: a GPU counts from now on. r NULL is accepted. */
enum status expert_rows_place(struct expert_rows *r, const struct model *m,
                              struct err *err) MUST_CHECK;
/* Where the GPU counts the choices of a sparse layer's rows (struct ep_rows), and what experts
 * computed (struct ep_config); NULL: it does not. */
uint64_t *expert_rows_chosen_at(const struct expert_rows *r, uint32_t i_sparse);
uint64_t *expert_rows_load_at(const struct expert_rows *r);
void expert_rows_free(struct expert_rows *r);
/* On the CPU. A piece of a sparse layer is planned by `ep`: experts [n], those that this rank's
 * rows chose; its plan's counts. Engine. */
void expert_rows_add(struct expert_rows *r, uint32_t i_sparse, const int32_t *experts, size_t n,
                     const struct ep *ep, const struct ep_counts *counts);

#endif
