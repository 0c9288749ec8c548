/* draft_control.c - see draft_control.h. Thread: its owner's. */
#include "shared/engine/draft/draft_control.h"

#include <math.h>

/* How much a measurement weighs after one more: of steps, of drafting, of a sequence's drafts, of
 * all drafts. */
static const double STEP_FADES = 63.0 / 64, DRAFTING_FADES = 15.0 / 16;
static const float RATE_FADES = 0.85f, SHARE_FADES = 0.995f;
/* Until rows have varied, a row adds this part of a step of one row; it weighs as much as that
 * variance of rows. On a CPU the weights that a step reads are most of its time. */
static const double ROW_GUESS = 0.25, ROW_GUESS_WEIGHT = 0.02;
/* A step that waited for something else (another process, a page) counts as at most this times
 * what the line says. */
static const double OUTLIER = 2;
enum { OUTLIER_STEPS_MIN = 8, ROUNDS_MAX = 8, TRY_EVERY_MIN = 8 };
static const double TRIES_SHARE = 0.01; /* of the time, for all sequences together */
/* What is assumed of a level until drafts of it were verified, and how many drafts that weighs. */
static const float FIRST_CHANCE[DRAFT_LEVELS] = { 0.3f, 0.5f, 0.7f, 0.85f, 0.5f };
static const float FIRST_WEIGHT = 4, SHARE_WEIGHT = 2;

/* ---- what a step costs ---- */

struct line {
    double at_0, per_row;
};

static struct line line_of(const struct draft_control *c)
{
    const double rows = c->rows / c->weight, seconds = c->seconds / c->weight,
                 variance = c->rows_2 / c->weight - rows * rows,
                 covariance = c->rows_seconds / c->weight - rows * seconds,
                 /* so that at `rows` it takes `seconds`, with ROW_GUESS */
        guess = seconds * ROW_GUESS / (1 + ROW_GUESS * (rows - 1));
    double per_row = (covariance + ROW_GUESS_WEIGHT * guess) / (variance + ROW_GUESS_WEIGHT);
    /* a row costs something, and the first is no cheaper than others */
    if (per_row < 0.005 * seconds / rows) per_row = 0.005 * seconds / rows;
    if (per_row > seconds / rows) per_row = seconds / rows;
    return (struct line){ seconds - rows * per_row, per_row };
}

double draft_control_step_seconds(const struct draft_control *c, double n_rows)
{
    if (!(c->weight > 0)) return 0;
    const struct line l = line_of(c);
    return l.at_0 + l.per_row * n_rows;
}

void draft_control_count_step(struct draft_control *c, uint32_t n_rows, double seconds)
{
    if (n_rows == 0 || !(seconds > 0)) return;
    const double most = OUTLIER * draft_control_step_seconds(c, n_rows);
    if (c->weight >= OUTLIER_STEPS_MIN && seconds > most) seconds = most;
    c->weight = c->weight * STEP_FADES + 1;
    c->rows = c->rows * STEP_FADES + n_rows;
    c->rows_2 = c->rows_2 * STEP_FADES + (double)n_rows * n_rows;
    c->seconds = c->seconds * STEP_FADES + seconds;
    c->rows_seconds = c->rows_seconds * STEP_FADES + n_rows * seconds;
}

void draft_control_count_drafting(struct draft_control *c, uint32_t n, double seconds)
{
    if (n > 0) c->per_draft += (1 - DRAFTING_FADES) * (seconds / n - c->per_draft);
}

/* ---- what a draft is worth ---- */

static void count(struct draft_share *s, float fades, uint32_t n, uint32_t n_accepted)
{
    s->accepted = s->accepted * fades + (float)n_accepted;
    s->reached = s->reached * fades + (float)(n_accepted < n ? n_accepted + 1 : n);
}

void draft_control_count(struct draft_control *c, struct draft_rate *r, uint32_t level, uint32_t n,
                         uint32_t n_accepted)
{
    count(&r->levels[level], RATE_FADES, n, n_accepted);
    count(&c->levels[level], SHARE_FADES, n, n_accepted);
    r->n_idle = r->n_quiet = 0;
}

float draft_control_chance(const struct draft_control *c, const struct draft_rate *r,
                           uint32_t level)
{
    const struct draft_share *all = &c->levels[level], *own = &r->levels[level];
    const float first = (all->accepted + FIRST_WEIGHT * FIRST_CHANCE[level]) /
                        (all->reached + FIRST_WEIGHT);
    return (own->accepted + SHARE_WEIGHT * first) / (own->reached + SHARE_WEIGHT);
}

/* ---- the choice ---- */

/* Takes the drafts whose chance is above `least`; returns the tokens that they yield. */
static double take_above(struct draft_choice *choices, uint32_t n_choices, double least,
                         uint32_t *n_taken)
{
    double tokens = 0;
    *n_taken = 0;
    for (uint32_t i = 0; i < n_choices; i++) {
        struct draft_choice *c = &choices[i];
        double chance = (double)c->chance;
        for (c->n = 0; c->n < c->n_max && chance > least; c->n++) {
            tokens += chance;
            chance *= (double)c->chance;
        }
        *n_taken += c->n;
    }
    return tokens;
}

/* With tokens per second `rate`, a draft is worth its time if its chance is above per_draft * rate;
 * the drafts chosen so make the rate larger, until no other ones are. */
void draft_control_choose(const struct draft_control *c, struct draft_choice *choices,
                          uint32_t n_choices, uint32_t n_rows)
{
    const struct line l = c->weight > 0 ? line_of(c) : (struct line){ 1 - ROW_GUESS, ROW_GUESS };
    const double per_draft = l.per_row + (c->weight > 0 ? c->per_draft : 0),
                 alone = l.at_0 + l.per_row * n_rows;
    double rate = n_rows / alone;
    uint32_t n_before = UINT32_MAX, n_taken;
    for (int i = 0; i < ROUNDS_MAX; i++) {
        const double tokens = take_above(choices, n_choices, per_draft * rate, &n_taken);
        if (n_taken == n_before) return;
        rate = (n_rows + tokens) / (alone + n_taken * per_draft);
        n_before = n_taken;
    }
}

bool draft_control_tries(const struct draft_control *c, struct draft_rate *r, uint32_t n_rows)
{
    const struct line l = c->weight > 0 ? line_of(c) : (struct line){ 1 - ROW_GUESS, ROW_GUESS };
    const double loss = (l.per_row + c->per_draft) / (l.at_0 + l.per_row * n_rows),
                 every = ceil(n_rows * loss / TRIES_SHARE);
    r->n_idle++;
    if (r->n_idle < TRY_EVERY_MIN || r->n_idle < every) return false;
    r->n_idle = 0;
    return true;
}
