/* draft_control.h - how many drafts a step verifies: as many as make tokens per second most.
 *
 * A draft costs what a row adds to the time of a step, and yields a token if it and those before it
 * are right. Both are measured: the time of steps over their rows, as a line; and the share of the
 * drafts that were right, per sequence and level (draft.h), with that of all sequences to begin
 * with. Old measurements fade. Drafts are taken in the order of their chances, as long as a token
 * of theirs costs less time than one of the whole step (Dinkelbach's method). Where none pays, one
 * is tried now and then, so seldom that all such trials take at most a hundredth of the time.
 *
 * Values without pointers; { 0 } has measured nothing. Thread: its owner's. */
#ifndef BATON_ENGINE_DRAFT_DRAFT_CONTROL_H
#define BATON_ENGINE_DRAFT_DRAFT_CONTROL_H

#include "shared/engine/draft/draft.h"

/* Drafts that were chosen as tokens, of those that were reached; both fade. */
struct draft_share {
    float accepted, reached;
};

/* Of a sequence. */
struct draft_rate {
    struct draft_share levels[DRAFT_LEVELS];
    uint32_t n_idle;  /* proposals since its last draft that no step verified */
    uint32_t n_quiet; /* times since then that it was asked, with a proposal or without */
};

/* Of an engine. */
struct draft_control {
    double weight, rows, rows_2, seconds, rows_seconds; /* sums over steps, which fade */
    double per_draft; /* seconds that a draft takes before it is verified */
    struct draft_share levels[DRAFT_LEVELS];
};

/* Drafts of one sequence. */
struct draft_choice {
    float chance;   /* of a draft, if those before it are right */
    uint32_t n_max; /* there are */
    uint32_t n;     /* out: worth while */
};

/* A step of n_rows rows of decoding sequences and no others lasted `seconds`. */
void draft_control_count_step(struct draft_control *c, uint32_t n_rows, double seconds);
/* Drafting n drafts took `seconds`. */
void draft_control_count_drafting(struct draft_control *c, uint32_t n, double seconds);
/* Of n drafts of that level, n_accepted were chosen. */
void draft_control_count(struct draft_control *c, struct draft_rate *r, uint32_t level, uint32_t n,
                         uint32_t n_accepted);
float draft_control_chance(const struct draft_control *c, const struct draft_rate *r,
                           uint32_t level);
/* Fills in n of all choices, for a step of n_rows rows without drafts (not 0). */
void draft_control_choose(const struct draft_control *c, struct draft_choice *choices,
                          uint32_t n_choices, uint32_t n_rows);
/* Of a sequence whose proposal was not worth while: try one draft all the same? */
bool draft_control_tries(const struct draft_control *c, struct draft_rate *r, uint32_t n_rows);
/* What the measured line says of a step of n_rows rows; 0: nothing was measured. */
double draft_control_step_seconds(const struct draft_control *c, double n_rows);

#endif
