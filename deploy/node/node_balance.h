/* node_balance.h - experts are placed anew when the load of the ranks of a group is uneven.
 *
 *     every rank, after step_interval steps ──▶ which experts its rows chose ──▶ the leader
 *     the leader, when all have reported    ──▶ is another placement much better? ──▶ group_renew
 *
 * The next group's placement comes from these rows (node_placement.h). Without --enable-eplb
 * experts are divided by number. Thread: loop. Owner: the node. */
#ifndef BATON_DEPLOY_NODE_NODE_BALANCE_H
#define BATON_DEPLOY_NODE_NODE_BALANCE_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"
#include "shared/base/str.h"

struct balance_out;
struct config;
struct node;
struct node_balance;

/* --enable-eplb, --eplb-config, --num-redundant-experts. */
struct node_balance_options {
    bool enabled, logs;
    uint32_t step_interval;
    int32_t n_redundant;
};

enum status node_balance_read(const struct config *c, struct node_balance_options *out,
                              struct err *err) MUST_CHECK;
/* ERR_CONFIG: so many experts and copies cannot be placed. */
enum status node_balance_check_copies(uint32_t n_experts, uint32_t n_copies,
                                      struct err *err) MUST_CHECK;

/* Of a rank whose engine is there. NULL: not enabled. */
struct node_balance *node_balance_create(struct node *n);
void node_balance_free(struct node_balance *b);
/* group_options.on_load */
void node_balance_on_load(struct node_balance *b, uint32_t rank, struct str load);
/* [sparse layers, experts] of the last time that all had reported; NULL: none yet. `b` may be
 * NULL. */
const uint64_t *node_balance_load(const struct node_balance *b);
/* The best placement of all ranks for that load; NULL: none yet. `b` may be NULL. */
const struct balance_out *node_balance_best(const struct node_balance *b);

#endif
