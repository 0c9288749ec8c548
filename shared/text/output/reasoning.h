/* reasoning.h - takes what a model thinks aloud off the front of its answer, while both are still
 * coming.
 *
 *     START ─open─▶ LEAD ─text─▶ INSIDE ─close─▶ AFTER ─answer_open─▶ ANSWER_LEAD ─▶ ANSWER ─answer_close─▶ TAIL ─▶ REST
 *       └─ anything else ────────────────────────────┴──────────── anything else ───────────────────────────────▶ REST
 *
 * One row per form of the tags. Only at the beginning of an answer does a tag count: later it is
 * text like any other. A prompt may have opened the reasoning already (begin with REASONING_INSIDE)
 * or closed it (REASONING_AFTER). White space next to a tag belongs to the tag. What may be the
 * beginning of a tag is held back; nothing is lost when the text ends there. The result does not
 * depend on how the text came in pieces. Thread: its owner's. */
#ifndef BATON_TEXT_OUTPUT_REASONING_H
#define BATON_TEXT_OUTPUT_REASONING_H

#include "shared/base/buf.h"

struct reasoning_format {
    const char *name;
    const char *aliases; /* names that peers use, separated by spaces */
    struct str open, close;
    struct str answer_open, answer_close; /* around the answer; n 0: none */
};

/* By name or alias ('-' and '_' are the same), or NULL. */
const struct reasoning_format *reasoning_format_find(struct str name);
/* The row whose tags a chat template (its source) writes, or NULL: the model does not think
 * aloud. */
const struct reasoning_format *reasoning_format_of_template(struct str source);

enum reasoning_state {
    REASONING_START,
    REASONING_LEAD,
    REASONING_INSIDE,
    REASONING_AFTER,
    REASONING_ANSWER_LEAD,
    REASONING_ANSWER,
    REASONING_TAIL,
    REASONING_REST
};

/* What a prompt that ends like this means for the answer. */
enum reasoning_state reasoning_state_after(const struct reasoning_format *f, struct str prompt);
/* The same for a message that is to be continued: `text` is all of it. */
enum reasoning_state reasoning_state_within(const struct reasoning_format *f, struct str text);

struct reasoning {
    const struct reasoning_format *f;
    enum reasoning_state state;
    struct buf held;
};

void reasoning_init(struct reasoning *r, const struct reasoning_format *f,
                    enum reasoning_state state);
void reasoning_push(struct reasoning *r, struct str text, struct buf *reasoning_text,
                    struct buf *answer);
void reasoning_finish(struct reasoning *r, struct buf *reasoning_text, struct buf *answer);
void reasoning_release(struct reasoning *r);
/* What comes next is thought, as far as is known. */
static inline bool reasoning_is_inside(const struct reasoning *r)
{
    return r->state == REASONING_LEAD || r->state == REASONING_INSIDE;
}

#endif
