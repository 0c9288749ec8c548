/* layers.h - the building blocks that architectures share: linear layers and the table of rotary angles.
 *
 * Thread: load on any, forward on the engine thread. */
#ifndef BATON_MODEL_LAYERS_H
#define BATON_MODEL_LAYERS_H

#include "shared/model/model.h"
#include "shared/model/weights.h"

enum { LINEAR_PARTS_MAX = 3 };

/* One or several matrices over the same input whose outputs lie side by side (q | k | v), or gate and up of SwiGLU, which are paired.
 * Matrices of one type are packed as one; of different types they stay apart (paired ones become f32 then). */
struct linear {
    struct weight parts[LINEAR_PARTS_MAX];
    size_t        n_parts;
    size_t        n_in, n_out; /* n_out: of all parts; of a paired one half of that comes out */
    float        *bias;        /* [n_out] or NULL */
};

struct linear_spec {
    const char *names[LINEAR_PARTS_MAX]; /* "<prefix><name>.weight", ".bias" */
    size_t      n_outs[LINEAR_PARTS_MAX];
    size_t      n_names;
    size_t      n_in;
    enum { BIAS_NONE, BIAS_NEEDED, BIAS_IF_PRESENT } bias;
    bool        paired;
};

enum status linear_load(struct linear *l, struct weights *w, struct kernel_ctx *k, const char *prefix, const struct linear_spec *spec,
                        struct err *err) MUST_CHECK;
void        linear_release(struct linear *l);
size_t      linear_bytes(const struct linear *l);
/* y [n_rows, n_out] with y_stride floats between rows (paired: n_out / 2); x [n_rows, n_in]. */
void        linear_forward(struct kernel_ctx *k, const struct linear *l, float *y, size_t y_stride, const float *x, size_t n_rows,
                           enum matmul_then then);
/* The same as jobs of a matmul call that holds more than one linear: fills jobs[0 ..], returns how many (at most LINEAR_PARTS_MAX). */
size_t      linear_jobs(const struct linear *l, struct matmul_args *jobs, float *y, size_t y_stride, const float *x, size_t n_rows,
                        enum matmul_then then);

/* Inverse frequencies of one head with the configuration's scaling: out [head_dim / 2]. `factors` [head_dim / 2] divide them
 * (llama3 scaling as GGUF stores it); NULL: none. */
void        rope_inv_freq(const struct model_config *c, const float *factors, double *out);
/* cos and sin of every position: [n_positions][head_dim / 2][2], freed with mem_free. Angles are computed in double from
 * integer positions: with large theta and positions anything less is wrong in the last digits of f32. */
float      *rope_table(const struct model_config *c, const float *factors, uint32_t n_positions);

#endif
