/* reasoning.h - splits a model's output into reasoning and answer while it is generated.
 *
 *     START ─open─▶ LEAD ─text─▶ INSIDE ─close─▶ AFTER
 *     AFTER ─answer_open─▶ ANSWER_LEAD ─text─▶ ANSWER ─answer_close─▶ TAIL ─▶ REST
 *     START, AFTER ─anything else─▶ REST
 *
 * A tag counts only at the beginning of the output; later it is ordinary text. A prompt may have
 * opened the reasoning already (start with REASONING_LEAD) or closed it (REASONING_AFTER). White
 * space next to a tag belongs to the tag.
 * Text that may be the beginning of a tag is held back, and emitted if the output ends there. The
 * result does not depend on how the text is cut into pieces.
 * Thread: its owner's. */
#ifndef BATON_TEXT_OUTPUT_REASONING_H
#define BATON_TEXT_OUTPUT_REASONING_H

#include "shared/base/buf.h"

struct reasoning_format {
    const char *name;
    const char *aliases; /* names in other servers, separated by spaces */
    struct str open, close;
    struct str answer_open, answer_close; /* around the answer; n 0: none */
};

/* Finds a format by name or alias ('-', '_' and '.' do not count); NULL: unknown. */
const struct reasoning_format *reasoning_format_find(struct str name);
/* May --reasoning-parser say it: "auto", "none" or a format? */
bool reasoning_parser_is_known(struct str name);
/* Finds the format whose tags the source of a chat template contains; NULL: no reasoning. */
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

/* State in which the output after `prompt` begins. */
enum reasoning_state reasoning_state_after(const struct reasoning_format *f, struct str prompt);
/* State after `text`, all of a message that the model continues. */
enum reasoning_state reasoning_state_within(const struct reasoning_format *f, struct str text);

struct reasoning {
    const struct reasoning_format *f;
    enum reasoning_state state;
    struct buf held; /* text that may be the beginning of a tag */
};

void reasoning_init(struct reasoning *r, const struct reasoning_format *f,
                    enum reasoning_state state);
/* Appends what is certain of the held text and `text` to `reasoning_text` and `answer`. */
void reasoning_push(struct reasoning *r, struct str text, struct buf *reasoning_text,
                    struct buf *answer);
/* The output has ended: append the text still held. */
void reasoning_finish(struct reasoning *r, struct buf *reasoning_text, struct buf *answer);
void reasoning_release(struct reasoning *r);
/* Is the next text reasoning, as far as is known? */
static inline bool reasoning_is_inside(const struct reasoning *r)
{
    return r->state == REASONING_LEAD || r->state == REASONING_INSIDE;
}

#endif
