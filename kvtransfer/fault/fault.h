/* fault.h - a transport row that misbehaves on purpose: it wraps any other row, forwards
 * everything, and injects what a plan says.
 *
 * For tests and for trying a cluster out (kvt_tuning.fault); a kvt without a plan has no part of
 * this in its way. The wrapper has the name, address and capabilities of the row inside, so that
 * sessions, peers and metrics cannot tell them apart.
 *
 * The plan is a comma list of seed=N of the random numbers (default 1) ACTION=PROBABILITY[:MS] for
 *     every put and every message that leaves this process: 0..1, steps of a millionth
 *     at=STEP:N:ACTION[:MS] once, when STEP is passed for the N-th time (counted per row, from 1)
 * e.g. "seed=7,flip=0.01,delay=0.05:20,at=put:5:disconnect,at=finish:1:sigkill". At most one action
 * befalls one put or message.
 *
 * Steps, in the process that has the plan; a message passes its step before it leaves (its maker)
 * or before the session hears of it (the other end), so `at=note` works on either side:
 *     connect     kvt_connect asks the row for a connection        up     a connection may be used
 *     open opened note finish done stop stopped bye                that message
 *     put         a put leaves; at a receiver that places bytes itself: one has arrived
 *     put_done    a put's source is not read any more              fence, disconnect    the session layer asks for that
 * Actions
 *     drop        it is not done. A put: nothing is written, PUT_DONE comes as if it were.
 *                 put_done: the session is never told
 *     delay:MS it waits, and what this connection sends (or hears) after it waits behind it. A put
 *                 that waits is still made after its session has been abandoned, as by a card that
 *                 has it queued: PUT_DONE, and so STOPPED, come after it. fence: it answers
 *                 ERR_BUSY for so long
 *     duplicate   it is done twice in a row
 *     late:MS (put) its first LATE_BYTES bytes are written once more MS later, whether or not the
 *                 session lives: the late write that a receiver has to refuse. One-sided rows
 *                 cannot: there only the checksums of a transfer under way can tell
 *     truncate    (put) one-sided: the last part of the bytes is not written, though the NOTE
 *                 announces it; a receiver that places: the DATA frame says and carries fewer bytes
 *                 than its pieces have
 *     flip        one bit: of the bytes of a put (which is then made from a damaged copy; the
 *                 checksums are those of the true bytes), of a checksum of a NOTE, of the total of
 *                 a FINISH
 *     reorder     the next put or message of the connection overtakes it; nothing happens when none
 *                 follows within REORDER_MS
 *     stale       its generation is the one before. Puts: only where the receiver places, the
 *                 others carry no generation
 *     disconnect  the connection is DOWN for the session layer
 *     sigkill, sigstop   this process sends itself that signal
 *     pause:MS    the transfer thread sleeps: nothing at all moves
 *
 * Invariants 1 What is not in the plan is untouched: a plan of "seed=1" passes the conformance
 *  tests of the row inside. 2 Same plan, same sequence of puts and messages: same faults. 3 Every
 *  fault done is counted once in baton_kv_fault_injected_total{transport,kind}. 4 Bounded: at most
 *  HELD_MAX things wait per connection; then puts and NOTEs are ERR_BUSY and other messages go at
 *  once.
 * LIMIT: flips read the pool with the CPU: pools in host memory only.
 * Thread: transfer, but for parsing and open (as of the row). */
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
    FAULT_PPM = 1000000, /* probabilities are counted in these */
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
    /* parts of FAULT_PPM; ms of those that have one */
    uint32_t ppm[FAULT_KINDS], ms[FAULT_KINDS];
    struct kvt_fault_trigger at[FAULT_TRIGGERS_MAX];
    uint32_t n_at;
};

extern const char *const kvt_fault_kind_names[FAULT_KINDS];
extern const char *const kvt_fault_step_names[FAULT_STEPS];

/* ERR_CONFIG: the item at fault and what would be right. */
enum status kvt_fault_parse(struct str text, struct kvt_fault_plan *out,
                            struct err *err) MUST_CHECK;
/* The plan as text that parses to the same plan; appended. */
void kvt_fault_write(const struct kvt_fault_plan *plan, struct buf *out);
/* Can this action befall this step at all? */
bool kvt_fault_applies(enum kvt_fault_step step, enum kvt_fault_kind kind);

/* Open `inner` with the plan around it. *out's ops are to be used instead of inner; they live until
 * its close. `env` as of open in transport.h; `m` may be NULL. Says so in the log. ERR_CONFIG: the
 * plan; otherwise as inner's open. */
enum status kvt_fault_open(const struct kvt_transport_ops *inner, const struct kvt_env *env,
                           const char *plan, struct metrics *m, struct kvt_transport **out,
                           struct err *err) MUST_CHECK;

#endif
