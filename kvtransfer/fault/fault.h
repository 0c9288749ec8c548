/* fault.h - fault injection: a wrapper around any transport that forwards everything and injects
 * the faults of a plan. docs/kv-transfer.md, "Fault injection", has the plan's grammar and the
 * actions.
 *
 * For tests and for trying out a cluster (kvt_tuning.fault); a kvt without a plan has no wrapper.
 * The wrapper has the name, address and capabilities of the transport inside, so that sessions,
 * peers and metrics cannot tell them apart. Invariants:
 *  1 Whatever the plan does not name is untouched: with "seed=1" the inner transport's conformance
 *    tests pass.
 *  2 The same plan and the same sequence of puts and messages give the same faults.
 *  3 Every injected fault is counted once in baton_kv_fault_injected_total{transport,kind}.
 *  4 At most FAULT_HELD_MAX items wait per connection; then puts and NOTEs get ERR_BUSY.
 * LIMIT: flips read the pool with the CPU, so only pools in host memory.
 * Thread: transfer, except parsing and open. */
#ifndef BATON_KVTRANSFER_FAULT_FAULT_H
#define BATON_KVTRANSFER_FAULT_FAULT_H

#include "kvtransfer/transport.h"
#include "shared/base/metrics.h"

enum kvt_fault_step {
    FAULT_AT_CONNECT,
    FAULT_AT_UP,
    FAULT_AT_OPEN,
    FAULT_AT_OPENED,
    FAULT_AT_PUT,
    FAULT_AT_PUT_DONE,
    FAULT_AT_NOTE,
    FAULT_AT_FINISH,
    FAULT_AT_DONE,
    FAULT_AT_STOP,
    FAULT_AT_STOPPED,
    FAULT_AT_BYE,
    FAULT_AT_FENCE,
    FAULT_AT_DISCONNECT,
    FAULT_STEPS
};

enum kvt_fault_kind {
    FAULT_DROP,
    FAULT_DELAY,
    FAULT_DUPLICATE,
    FAULT_LATE,
    FAULT_TRUNCATE,
    FAULT_FLIP,
    FAULT_REORDER,
    FAULT_STALE,
    FAULT_DISCONNECT,
    FAULT_SIGKILL,
    FAULT_SIGSTOP,
    FAULT_PAUSE,
    FAULT_KINDS,
    FAULT_NOTHING = FAULT_KINDS
};

enum {
    FAULT_TRIGGERS_MAX = 16,
    FAULT_MS_MAX = 600000,
    FAULT_PPM = 1000000, /* unit of probabilities */
    FAULT_LATE_BYTES = 4096,
    FAULT_REORDER_MS = 100,
    FAULT_HELD_MAX = 1024
};

struct kvt_fault_trigger {
    enum kvt_fault_step step;
    enum kvt_fault_kind kind;
    uint32_t nth, ms;
};

struct kvt_fault_plan {
    uint64_t seed;
    /* in parts of FAULT_PPM; ms of actions that have one */
    uint32_t ppm[FAULT_KINDS], ms[FAULT_KINDS];
    struct kvt_fault_trigger at[FAULT_TRIGGERS_MAX];
    uint32_t n_at;
};

extern const char *const kvt_fault_kind_names[FAULT_KINDS];
extern const char *const kvt_fault_step_names[FAULT_STEPS];

/* Parses a plan. ERR_CONFIG names the wrong item and what would be right. */
enum status kvt_fault_parse(struct str text, struct kvt_fault_plan *out,
                            struct err *err) MUST_CHECK;
/* Appends the plan as text that parses to the same plan. */
void kvt_fault_write(const struct kvt_fault_plan *plan, struct buf *out);
/* Whether this action can be injected at this step. */
bool kvt_fault_applies(enum kvt_fault_step step, enum kvt_fault_kind kind);

/* Opens `inner` inside a wrapper with this plan, and logs a warning. Use (*out)->ops instead of
 * inner; they live until close. `env` as for open in transport.h; `m` may be NULL. ERR_CONFIG: the
 * plan; other errors as inner's open. */
enum status kvt_fault_open(const struct kvt_transport_ops *inner, const struct kvt_env *env,
                           const char *plan, struct metrics *m, struct kvt_transport **out,
                           struct err *err) MUST_CHECK;

#endif
