/* pace.h - the time that a step of another machine takes: a measured curve, read from JSON.
 *
 * A paced engine (engine_options.pace) computes its steps as ever and then waits until each has
 * lasted what the curve says, so that many nodes with a tiny model behave on a few cores like as
 * many large machines. docs/pace.md describes the file and what the figures of such a node mean.
 * A curve is a value without pointers. Thread: any. */
#ifndef BATON_ENGINE_PACE_H
#define BATON_ENGINE_PACE_H

#include "kernels/kernels.h"
#include "shared/base/err.h"
#include "shared/base/str.h"

enum {
    PACE_POINTS_MAX = 64,       /* of each kind of rows */
    PACE_ABOUT_MAX = 128,       /* bytes, the zero included */
    PACE_FILE_MAX = 1 << 16,    /* bytes of a file */
    PACE_US_MAX = 600 * 1000000 /* the longest step: ten minutes */
};

/* A measured step: of `rows` rows of one kind alone, each of which attends to `context` positions
 * on average, its own included. */
struct pace_point {
    double rows, context, us;
};

/* What rows of one kind, of prompts or of decoding sequences, add to a step. */
struct pace_rows {
    double row_us, context_us;                 /* per row; per 1000 positions that rows attend to */
    struct pace_point points[PACE_POINTS_MAX]; /* ascending by (rows, context) */
    uint32_t n_points;
};

struct pace_curve {
    char about[PACE_ABOUT_MAX]; /* what was measured */
    double fixed_us;            /* of every step */
    struct pace_rows prompt, decode;
};

/* Rows of a step, and the positions that they attend to, summed over the rows. */
struct pace_load {
    uint64_t prompt_rows, prompt_context, decode_rows, decode_context;
};

/* Parses a curve. ERR_FORMAT: it is no JSON. ERR_INVALID names the member at fault, its value and
 * what would be right. *out is written only on success. */
enum status pace_parse(struct str text, struct pace_curve *out, struct err *err) MUST_CHECK;
/* Reads the file of a curve. ERR_IO: it cannot be read; ERR_TOO_LONG: over PACE_FILE_MAX. */
enum status pace_read(const char *path, struct pace_curve *out, struct err *err) MUST_CHECK;
/* The load of a step with these attention sequences. A step of a group may have none. */
struct pace_load pace_load_of(const struct attn_seq *seqs, uint32_t n_seqs);
/* Microseconds that the step lasts, from 0 to PACE_US_MAX:
 *     fixed_us + for each kind with rows: rows * row_us + positions / 1000 * context_us
 *              + what the measured points differ from this, interpolated linearly by rows and mean
 *                context; beyond the points that of the nearest */
double pace_step_us(const struct pace_curve *c, const struct pace_load *l);

#endif
