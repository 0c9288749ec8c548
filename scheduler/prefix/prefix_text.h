/* prefix_text.h - queries and their answers (prefix.h) as text, in hexadecimal digits of fixed
 * width: for the `http` backend and the directory server, and the answers for `redis`, too.
 *
 *     rungs      slot (4) tag (8) tokens (8)
 *     uses       kind (16) flags (1, the sum of prefix_use_flag)
 *     avoid      node (16)
 *     drops      node (16) at_s (8)
 *     placed     "prefill decode tokens kept at_s kept at_s keeper kept": words; what is expected
 *                of the node that computes, of the one that decodes, and who has more. Tokens are
 *                decimal
 * Thread: any (pure functions). */
#ifndef BATON_SCHEDULER_PREFIX_PREFIX_TEXT_H
#define BATON_SCHEDULER_PREFIX_PREFIX_TEXT_H

#include "scheduler/prefix/prefix.h"
#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { PREFIX_RUNG_TEXT = 20, PREFIX_USE_TEXT = 17, PREFIX_AVOID_TEXT = 16, PREFIX_DROP_TEXT = 24 };

/* A placement as the directory made it. */
struct prefix_placed {
    uint64_t prefill, decode; /* 0: `decode` does both */
    uint32_t tokens;          /* counted on the one that computes */
    struct prefix_expected expected;
};

/* The lists of a query as text. */
struct prefix_query_text {
    struct str rungs, uses, avoid, drops;
};

/* Where the lists of a query lie that was read. */
struct prefix_query_room {
    struct prefix_rung rungs[PREFIX_RUNGS_MAX];
    struct prefix_use uses[PREFIX_USES_MAX];
    uint64_t avoid[PREFIX_AVOID_MAX];
    struct prefix_drop drops[PREFIX_DROPS_MAX];
};

/* Appends the four lists to `out`, which must not grow while `t` points into it. Each is also a
 * string of C. */
void prefix_query_write(const struct prefix_query *q, struct buf *out, struct prefix_query_text *t);
/* Reads them into q, whose numbers and choice are not among them, and checks every bound of it.
 * ERR_INVALID names the list or number. */
enum status prefix_query_read(const struct prefix_query_text *t, struct prefix_query_room *room,
                              struct prefix_query *q, struct err *err) MUST_CHECK;
void prefix_placed_write(const struct prefix_placed *p, struct buf *out);
/* ERR_FORMAT: it is not that. */
enum status prefix_placed_read(struct str text, struct prefix_placed *out) MUST_CHECK;

#endif
