/* attention_mla.c - multi-head latent attention (DeepSeek-V2, 2024, section 2.1): the KV pool holds
 * one vector per token for all heads.
 *
 *     q         = Wq h, or Wqb norm(Wqa h)           per head: q_nope | q_rope = rope(..)
 *     c | r     = Wkva h;  c = norm(c), r = rope(r)  in the pool: kv_lora + rope elements
 *     k_h, v_h  = Wk_h c, Wv_h c                     of head h: nope and v elements
 *     score_h   = (q_nope k_h + q_rope r) * scale    (nope + rope)^-1/2, YaRN: times mscale^2
 *     x        += Wo (softmax(score_h) v_h over all h)
 *
 * Prompt tokens take the naive path, as written: k_h and v_h are made from every cached c, once for
 * many rows. Decode tokens take the absorbed path, since q k_h = (Wk_h^T q) c: queries of kv_lora
 * elements meet c itself, and Wv_h is applied to the softmax's mean of c. The paths are equal up to
 * rounding, so which one a token takes depends on the token (attn_seq.is_decode), never on the
 * batch. Thread: loading, then engine. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/weight_src.h"
#include "shared/base/mem.h"
#include "shared/model/attention.h"

/* Rows that the absorbed path computes at a time: a row of DeepSeek-V3 takes 544 KiB. */
enum { ABSORBED_ROWS = 256 };

struct attention_mla {
    struct attention_layer base;
    struct weight q; /* without q_lora; otherwise: */
    struct weight q_a, q_b;
    float *q_a_norm;                /* [q_lora] */
    struct weight kv_a;             /* [kv_lora + rope, H] */
    float *kv_a_norm;               /* [kv_lora] */
    struct weight *k_up, *v_up;     /* [n_heads]: [nope, kv_lora], [v, kv_lora] */
    struct weight *k_up_transposed; /* [n_heads]: [kv_lora, nope] */
    struct weight o;
    struct share_cut o_cut;
    uint32_t first_head, n_heads; /* of this rank */
};

/* Rows [begin, begin + n) of the step, all of them decode tokens. */
struct mla_range {
    size_t begin, n;
};

struct attention_mla_work {
    struct attention_work base;
    float *q_a;          /* [R, q_lora] */
    float *q;            /* [R, n_heads (nope + rope)] */
    float *latent;       /* [R, kv_lora + rope] */
    float *out;          /* [R, n_heads v] */
    float *all_heads;    /* [R, n_heads v] of all ranks; unused when the model is not cut */
    float *q_absorbed;   /* of one range: [n, n_heads (kv_lora + rope)] */
    float *out_absorbed; /* of one range: [n, n_heads kv_lora] */
    /* The step's sequences, those of the naive path first. Rows of the absorbed ones count from the
     * first row of their range. */
    struct attn_seq *seqs;
    struct mla_range *ranges; /* [n_ranges] */
    struct attn_list *lists;  /* [1 + n_ranges], uploaded: the naive path's, then each range's */
    struct matmul_args *jobs; /* [n_heads] */
    int32_t n_ranges;
};

/* Of one key and one latent, and of all heads of this rank; all_q and all_out: of all ranks. */
struct widths {
    size_t heads, key, latent, q, out, q_absorbed, out_absorbed, all_q, all_out;
};

static struct widths widths_of(const struct model *m)
{
    const struct mla_config *c = &m->config.mla;
    const size_t heads = share_heads(&m->share, m->config.n_heads).n,
                 latent = (size_t)c->kv_lora + c->rope, key = (size_t)c->nope + c->rope;
    return (struct widths){
        .heads = heads,
        .key = key,
        .latent = latent,
        .q = heads * key,
        .out = heads * c->v,
        .q_absorbed = heads * latent,
        .out_absorbed = heads * c->kv_lora,
        .all_q = m->config.n_heads * key,
        .all_out = (size_t)m->config.n_heads * c->v,
    };
}

/* Rows of a range at most. */
static size_t range_rows(const struct model *m)
{
    return m->max_rows < ABSORBED_ROWS ? m->max_rows : ABSORBED_ROWS;
}

/* ---- load ---- */

static struct attention_layer *mla_create(const struct model *m)
{
    struct attention_mla *a = MEM_NEW(struct attention_mla);
    const struct share_part heads = share_heads(&m->share, m->config.n_heads);
    a->base.ops = &attention_mla_ops;
    a->first_head = (uint32_t)heads.first;
    a->n_heads = (uint32_t)heads.n;
    a->k_up = MEM_ARRAY(struct weight, a->n_heads);
    a->v_up = MEM_ARRAY(struct weight, a->n_heads);
    a->k_up_transposed = MEM_ARRAY(struct weight, a->n_heads);
    return &a->base;
}

static struct attention_work *mla_create_work(void)
{
    struct attention_mla_work *w = MEM_NEW(struct attention_mla_work);
    w->base.ops = &attention_mla_ops;
    return &w->base;
}

static bool is_plain(enum dtype t) { return t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16; }

/* Makes `s` a source that can be cut by rows and transposed: quantised types are converted, to f32
 * if activations are f32, else to bf16. */
static enum status make_plain(struct binder *b, struct weight_src *s, void **copy)
{
    const enum dtype type = b->kernels->options.activations == ACTIVATIONS_F32 ? DTYPE_F32
                                                                               : DTYPE_BF16;
    *copy = NULL;
    if (is_plain(s->dtype)) return OK;
    if (b->converting && !(*copy = bind_plain_copy(b->kernels, s, type)))
        return err_set(b->err, ERR_NOMEM, "no memory to convert kv_b_proj (%zu x %zu)", s->n_out,
                       s->n_in);
    *s = (struct weight_src){
        .dtype = type, .data = *copy ? *copy : s->data, .n_out = s->n_out, .n_in = s->n_in
    };
    return OK;
}

/* The same matrix with outputs and inputs swapped. */
static struct weight_src transpose(const struct weight_src *s)
{
    struct weight_src t = *s;
    t.n_out = s->n_in;
    t.n_in = s->n_out;
    t.transposed = !s->transposed;
    if (!t.row_bytes) t.row_bytes = dtype_row_bytes(s->dtype, s->transposed ? s->n_out : s->n_in);
    return t;
}

/* Outputs [first, first + n) of a matrix. */
static struct weight_src outputs(const struct weight_src *s, size_t first, size_t n)
{
    struct weight_src part = *s;
    part.n_out = n;
    if (!part.row_bytes)
        part.row_bytes = dtype_row_bytes(s->dtype, s->transposed ? s->n_out : s->n_in);
    const size_t skipped = s->transposed ? dtype_row_bytes(s->dtype, first)
                                         : first * part.row_bytes;
    if (weight_src_is_dummy(s)) part.dummy.at += skipped / dtype_block_bytes(s->dtype);
    else part.data = (const char *)s->data + skipped;
    return part;
}

static enum status bind_head(struct binder *b, const struct weight_src *k_up,
                             const struct weight_src *v_up, struct attention_mla *a, uint32_t head)
{
    const struct weight_src across = transpose(k_up);
    TRY(bind_source(b, k_up, "kv_b_proj", &a->k_up[head]));
    TRY(bind_source(b, &across, "kv_b_proj", &a->k_up_transposed[head]));
    return bind_source(b, v_up, "kv_b_proj", &a->v_up[head]);
}

/* Checkpoints: rows of kv_b_proj are grouped by head, first its keys, then its values. */
static enum status bind_kv_b(struct binder *b, const char *prefix, struct attention_mla *a)
{
    const struct mla_config *c = &b->m->config.mla;
    const size_t per_head = (size_t)c->nope + c->v;
    const struct share_part mine = { a->first_head * per_head, a->n_heads * per_head };
    const struct matrix_spec spec = {
        .prefix = prefix,
        .leaf = "kv_b_proj",
        .n_out = b->m->config.n_heads * per_head,
        .n_in = c->kv_lora,
        .part = &mine,
    };
    struct weight_src src;
    void *copy;
    TRY(bind_lookup(b, &spec, &src));
    void *scales = (void *)src.scales;
    enum status st = make_plain(b, &src, &copy);
    for (uint32_t i = 0; i < a->n_heads && st == OK; i++) {
        const struct weight_src k_up = outputs(&src, i * per_head, c->nope),
                                v_up = outputs(&src, i * per_head + c->nope, c->v);
        st = bind_head(b, &k_up, &v_up, a, i);
    }
    mem_free(scales);
    mem_free(copy);
    return st;
}

/* Newer GGUF files: one matrix per head, k_b transposed. */
static enum status bind_head_split(struct binder *b, const struct matrix_spec *k_b,
                                   const struct matrix_spec *v_b, struct attention_mla *a)
{
    struct weight_src k, v;
    void *k_copy = NULL, *v_copy = NULL;
    TRY(bind_lookup(b, k_b, &k));
    TRY(bind_lookup(b, v_b, &v));
    enum status st = make_plain(b, &k, &k_copy);
    if (st == OK) st = make_plain(b, &v, &v_copy);
    if (st == OK) {
        const struct weight_src k_up = transpose(&k);
        st = bind_head(b, &k_up, &v, a, k_b->i_expert - a->first_head);
    }
    mem_free(k_copy);
    mem_free(v_copy);
    return st;
}

static enum status bind_up(struct binder *b, const char *prefix, struct attention_mla *a)
{
    const struct mla_config *c = &b->m->config.mla;
    struct matrix_spec k_b = {
        .prefix = prefix,
        .leaf = "k_b_proj",
        .n_out = c->kv_lora,
        .n_in = c->nope,
        .n_experts = b->m->config.n_heads,
    };
    struct matrix_spec v_b = {
        .prefix = prefix,
        .leaf = "v_b_proj",
        .n_out = c->v,
        .n_in = c->kv_lora,
        .n_experts = b->m->config.n_heads,
    };
    if (!weights_has_matrix(b->m->weights, &k_b)) return bind_kv_b(b, prefix, a);
    char joint[TENSOR_NAME_BYTES_MAX];
    snprintf(joint, sizeof joint, "%skv_b_proj.weight", prefix);
    (void)weights_take(b->m->weights, joint); /* some files have both, with equal values */
    for (uint32_t i = 0; i < a->n_heads; i++) {
        k_b.i_expert = v_b.i_expert = a->first_head + i;
        TRY(bind_head_split(b, &k_b, &v_b, a));
    }
    return OK;
}

static enum status bind_queries(struct binder *b, const char *prefix, struct attention_mla *a)
{
    const struct model_config *c = &b->m->config;
    const struct widths wide = widths_of(b->m);
    const size_t hidden = c->hidden, q_lora = c->mla.q_lora, n = wide.all_q;
    const struct share_part mine = { a->first_head * wide.key, wide.q };
    const struct matrix_spec q = {
        .prefix = prefix, .leaf = "q_proj", .n_out = n, .n_in = hidden, .part = &mine
    };
    const struct matrix_spec q_a = {
        .prefix = prefix, .leaf = "q_a_proj", .n_out = q_lora, .n_in = hidden
    };
    const struct matrix_spec q_b = {
        .prefix = prefix, .leaf = "q_b_proj", .n_out = n, .n_in = q_lora, .part = &mine
    };
    if (!q_lora) return bind_matrix(b, &q, BIND_QUANTIZED, &a->q);
    TRY(bind_matrix(b, &q_a, BIND_QUANTIZED, &a->q_a));
    TRY(bind_matrix(b, &q_b, BIND_QUANTIZED, &a->q_b));
    return bind_vector(b, prefix, "q_a_layernorm.weight", q_lora, &a->q_a_norm);
}

static enum status mla_bind(struct binder *b, const char *layer, struct attention_layer *base)
{
    struct attention_mla *a = (struct attention_mla *)base;
    const struct model_config *c = &b->m->config;
    const struct widths n = widths_of(b->m);
    char prefix[TENSOR_NAME_BYTES_MAX / 2];
    snprintf(prefix, sizeof prefix, "%sself_attn.", layer);
    const struct matrix_spec kv_a = {
        .prefix = prefix, .leaf = "kv_a_proj_with_mqa", .n_out = n.latent, .n_in = c->hidden
    };
    const struct matrix_spec o = {
        .prefix = prefix,
        .leaf = "o_proj",
        .n_out = c->hidden,
        .n_in = n.all_out,
        .part = &a->o_cut.mine,
    };
    a->o_cut = share_cut(&b->m->share, c->hidden, bind_unit(b, &o, BIND_QUANTIZED));
    TRY(bind_queries(b, prefix, a));
    TRY(bind_matrix(b, &kv_a, BIND_QUANTIZED, &a->kv_a));
    TRY(bind_vector(b, prefix, "kv_a_layernorm.weight", c->mla.kv_lora, &a->kv_a_norm));
    TRY(bind_up(b, prefix, a));
    return bind_matrix(b, &o, BIND_QUANTIZED, &a->o);
}

static void mla_bind_work(struct binder *b, struct attention_work *base)
{
    struct attention_mla_work *w = (struct attention_mla_work *)base;
    const struct model_config *c = &b->m->config;
    const struct widths n = widths_of(b->m);
    const size_t rows = b->m->max_rows, some = range_rows(b->m);
    bind_floats(b, rows, c->mla.q_lora, &w->q_a);
    bind_floats(b, rows, n.q, &w->q);
    bind_floats(b, rows, n.latent, &w->latent);
    bind_floats(b, rows, n.out, &w->out);
    if (b->m->share.tp_size > 1) bind_floats(b, rows, n.all_out, &w->all_heads);
    bind_floats(b, some, n.q_absorbed, &w->q_absorbed);
    bind_floats(b, some, n.out_absorbed, &w->out_absorbed);
    w->seqs = bind_host(b, 2 * rows + 1, sizeof *w->seqs);
    w->ranges = bind_host(b, rows, sizeof *w->ranges);
    w->jobs = bind_host(b, n.heads, sizeof *w->jobs);
    bind_reserve(b, 2 * rows, c->hidden);
    bind_reserve(b, rows, c->mla.q_lora);
    bind_reserve(b, rows, n.all_out);
    bind_reserve(b, some * n.heads, c->mla.kv_lora > c->mla.nope ? c->mla.kv_lora : c->mla.nope);
}

static void mla_release(struct kernel_ctx *k, struct attention_layer *base)
{
    struct attention_mla *a = (struct attention_mla *)base;
    struct weight *weights[] = { &a->q, &a->q_a, &a->q_b, &a->kv_a, &a->o },
                  *per_head[] = { a->k_up, a->v_up, a->k_up_transposed };
    for (size_t i = 0; i < COUNT_OF(weights); i++) weight_release(k, weights[i]);
    for (size_t i = 0; i < COUNT_OF(per_head); i++) {
        for (uint32_t h = 0; h < a->n_heads; h++) weight_release(k, &per_head[i][h]);
        mem_free(per_head[i]);
    }
    mem_free(a);
}

static void mla_release_work(struct attention_work *w) { mem_free(w); }

/* ---- before the first step ---- */

static void mla_limits(const struct model *m, struct kernel_limits *l)
{
    const struct mla_config *c = &m->config.mla;
    l->n_lists = 3;
    l->max_lists = 3 + (uint32_t)(m->max_rows / range_rows(m));
    l->v_dim = c->kv_lora;
    l->latent = true;
    l->n_kv_heads = 1;
    l->head_dim = c->kv_lora + c->rope;
}

/* All rows of a captured step are one range, whose number of rows mla_capture_rows sets. */
static int32_t mla_capture_lists(struct attention_work *base, struct attn_list *lists)
{
    struct attention_mla_work *w = (struct attention_mla_work *)base;
    lists[0] = lists[1] = (struct attn_list){ 0 };
    w->ranges[0] = (struct mla_range){ 0 };
    w->n_ranges = 1;
    w->lists = lists;
    return 2;
}

static void mla_capture_rows(struct attention_work *base, size_t n_rows)
{
    struct attention_mla_work *w = (struct attention_mla_work *)base;
    w->ranges[0].n = n_rows;
}

/* ---- forward ---- */

/* w->q and w->latent of all rows; the latents are normalised. */
static void project(const struct decoder_step *s, const struct attention_mla *a,
                    const struct attention_mla_work *w, const float *norm)
{
    const struct model_config *c = &s->m->config;
    const struct widths n = widths_of(s->m);
    struct kernel_ctx *k = s->m->kernels;
    const size_t rows = s->n_rows, hidden = c->hidden, q_lora = c->mla.q_lora;
    const struct matmul_args h = {
        .x = s->x, .x_stride = hidden, .norm = norm, .norm_eps = c->rms_eps, .n_rows = rows
    };
    struct matmul_args jobs[] = { h, h };
    /* [R, q_lora] or [R, q] */
    jobs[0].w = q_lora ? &a->q_a : &a->q, jobs[0].y = q_lora ? w->q_a : w->q,
    jobs[0].y_stride = q_lora ? q_lora : n.q;
    /* [R, kv_lora + rope] */
    jobs[1].w = &a->kv_a, jobs[1].y = w->latent, jobs[1].y_stride = n.latent;
    k->ops->matmul(k, jobs, COUNT_OF(jobs));
    if (q_lora) {
        const struct matmul_args q = {
            .w = &a->q_b,
            .x = w->q_a,
            .x_stride = q_lora,
            .norm = a->q_a_norm,
            .norm_eps = c->rms_eps,
            .n_rows = rows,
            .y = w->q,
            .y_stride = n.q,
        };
        /* [R, n_heads (nope + rope)] */
        k->ops->matmul(k, &q, 1);
    }
    k->ops->rms_norm(k, w->latent, n.latent, w->latent, n.latent, a->kv_a_norm, rows,
                     c->mla.kv_lora, c->rms_eps);
}

/* Rotates the last `rope` elements of each query head and of each latent. */
static void rotate(const struct decoder_step *s, const struct attention_mla_work *w)
{
    const struct model_config *c = &s->m->config;
    const struct widths n = widths_of(s->m);
    const struct rope_args rope = {
        .heads = { {
                       .x = w->q + c->mla.nope,
                       .x_stride = n.q,
                       .n_heads = n.heads,
                       .head_dim = n.key,
                   },
                   {
                       .x = w->latent + c->mla.kv_lora,
                       .x_stride = n.latent,
                       .n_heads = 1,
                       .head_dim = c->mla.rope,
                   } },
        .n_heads = 2,
        .n_rows = s->n_rows,
        .rot_dim = c->mla.rope,
        .cos_sin = s->cos_sin,
        .pos = s->pos,
        .interleaved = c->rope_interleaved,
    };
    s->m->kernels->ops->rope(s->m->kernels, &rope);
}

static float score_scale(const struct model_config *c)
{
    double scale = 1.0 / sqrt((double)(c->mla.nope + c->mla.rope));
    return (float)(c->rope.score_factor > 0 ? scale * c->rope.score_factor : scale);
}

/* ---- which rows take which path ---- */

static bool is_absorbed(const struct model *m, const struct attn_seq *s)
{
    return s->is_decode || m->kernels->backend->absorbed_only;
}

static void add_range(struct attention_mla_work *w, struct attn_list *lists, size_t begin,
                      const struct attn_seq *seqs)
{
    lists[1 + w->n_ranges] = (struct attn_list){ .seqs = seqs };
    w->ranges[w->n_ranges++] = (struct mla_range){ .begin = begin };
}

/* Groups the decode rows in ranges of adjacent rows, at most ABSORBED_ROWS each; a long sequence is
 * split. */
static void list_absorbed(const struct model *m, const struct model_batch *b,
                          struct attention_mla_work *w, struct attn_list *lists,
                          struct attn_seq *to)
{
    const size_t limit = range_rows(m);
    for (int32_t i = 0; i < b->n_seqs; i++) {
        const struct attn_seq *from = &b->seqs[i];
        for (int32_t done = 0, part; is_absorbed(m, from) && done < from->n_q; done += part) {
            const size_t at = (size_t)(from->q_begin + done);
            struct mla_range *range = w->n_ranges ? &w->ranges[w->n_ranges - 1] : NULL;
            if (!range || range->n == limit || at != range->begin + range->n) {
                add_range(w, lists, at, to);
                range = &w->ranges[w->n_ranges - 1];
            }
            const int32_t left = (int32_t)(limit - range->n);
            part = from->n_q - done < left ? from->n_q - done : left;
            *to++ = (struct attn_seq){
                .q_begin = (int32_t)range->n,
                .n_q = part,
                .pos_begin = from->pos_begin + done,
                .block_table = from->block_table,
                .is_decode = true,
                .move = from->move,
                .n_most = from->n_most,
            };
            lists[w->n_ranges].n_seqs++;
            range->n += (size_t)part;
        }
    }
}

static int32_t mla_lists(const struct model *m, const struct model_batch *b,
                         struct attention_work *base, struct attn_list *lists)
{
    struct attention_mla_work *w = (struct attention_mla_work *)base;
    int32_t n = 0;
    for (int32_t i = 0; i < b->n_seqs; i++)
        if (!is_absorbed(m, &b->seqs[i])) w->seqs[n++] = b->seqs[i];
    lists[0] = (struct attn_list){ .seqs = w->seqs, .n_seqs = n };
    w->n_ranges = 0;
    list_absorbed(m, b, w, lists, w->seqs + n);
    if (b->n_rows == 0) add_range(w, lists, 0, w->seqs); /* as a captured step has it */
    w->lists = lists;
    return 1 + w->n_ranges;
}

/* ---- the two paths ---- */

static void attend_naive(const struct decoder_step *s, const struct attention_mla *a,
                         const struct attention_mla_work *w, struct kv_layer kv)
{
    const struct model_config *c = &s->m->config;
    if (w->lists[0].n_seqs == 0) return;
    const struct attn_args attend = {
        .q = w->q,
        .out = w->out,
        .kv = kv,
        .on = w->lists[0],
        .n_heads = (int32_t)a->n_heads,
        .v_dim = (int32_t)c->mla.v,
        .scale = score_scale(c),
        .k_up = a->k_up,
        .v_up = a->v_up,
    };
    s->m->kernels->ops->attention(s->m->kernels, &attend); /* [R, n_heads v] */
}

/* w->q_absorbed [n, n_heads (kv_lora + rope)] of the range: Wk_h^T q_nope | q_rope. */
static void absorb_queries(const struct decoder_step *s, const struct attention_mla *a,
                           const struct attention_mla_work *w, const struct mla_range *range)
{
    const struct mla_config *c = &s->m->config.mla;
    const struct widths wide = widths_of(s->m);
    struct kernel_ctx *k = s->m->kernels;
    const float *q = w->q + range->begin * wide.q;
    for (size_t h = 0; h < a->n_heads; h++)
        w->jobs[h] = (struct matmul_args){
            .w = &a->k_up_transposed[h],
            .x = q + h * wide.key,
            .x_stride = wide.q,
            .n_rows = range->n,
            .y = w->q_absorbed + h * wide.latent,
            .y_stride = wide.q_absorbed,
        };
    k->ops->matmul(k, w->jobs, a->n_heads);
    k->ops->copy_rows(k, w->q_absorbed + c->kv_lora, wide.latent, q + c->nope, wide.key, NULL,
                      range->n * a->n_heads, c->rope);
}

/* Rows of w->out [n, n_heads v] of the range: Wv_h applied to the mean of latents. */
static void up_project_values(const struct decoder_step *s, const struct attention_mla *a,
                              const struct attention_mla_work *w, const struct mla_range *range)
{
    const struct mla_config *c = &s->m->config.mla;
    const struct widths wide = widths_of(s->m);
    float *out = w->out + range->begin * wide.out;
    for (size_t h = 0; h < a->n_heads; h++)
        w->jobs[h] = (struct matmul_args){
            .w = &a->v_up[h],
            .x = w->out_absorbed + h * c->kv_lora,
            .x_stride = wide.out_absorbed,
            .n_rows = range->n,
            .y = out + h * c->v,
            .y_stride = wide.out,
        };
    s->m->kernels->ops->matmul(s->m->kernels, w->jobs, a->n_heads);
}

static void attend_absorbed(const struct decoder_step *s, const struct attention_mla *a,
                            const struct attention_mla_work *w, struct kv_layer kv, int32_t i_range)
{
    const struct model_config *c = &s->m->config;
    const struct mla_range *range = &w->ranges[i_range];
    const struct attn_args attend = {
        .q = w->q_absorbed,
        .out = w->out_absorbed,
        .kv = kv,
        .on = w->lists[1 + i_range],
        .n_heads = (int32_t)a->n_heads,
        .v_dim = (int32_t)c->mla.kv_lora,
        .scale = score_scale(c),
    };
    absorb_queries(s, a, w, range);
    s->m->kernels->ops->attention(s->m->kernels, &attend); /* [n, n_heads kv_lora] */
    up_project_values(s, a, w, range);
}

/* The outputs of all heads: [R, n_heads v] of all ranks. */
static const float *gather_heads(const struct decoder_step *s, const struct attention_mla_work *w)
{
    const struct widths n = widths_of(s->m);
    const struct share_cut cut = share_cut(&s->m->share, n.all_out, n.out);
    if (!decoder_is_cut(s)) return w->out;
    decoder_gather(s, w->all_heads, n.all_out, w->out, n.out, s->n_rows, &cut);
    return w->all_heads;
}

/* The outputs of the rank's heads. */
static void attend(const struct decoder_step *s, const struct attention_mla *a,
                   const struct attention_mla_work *w, const float *norm, uint32_t i_layer)
{
    struct kernel_ctx *k = s->m->kernels;
    const struct kv_layer kv = decoder_kv_layer(s, i_layer);
    project(s, a, w, norm);
    rotate(s, w);
    const struct kv_append_args append = { .k = w->latent, .kv = kv, .on = s->all };
    k->ops->kv_append(k, &append);
    decoder_kv_written(s, i_layer);
    attend_naive(s, a, w, kv);
    for (int32_t i = 0; i < w->n_ranges; i++) attend_absorbed(s, a, w, kv, i);
}

static void mla_forward(const struct decoder_step *s, const struct attention_layer *base,
                        const struct attention_work *base_work, const float *norm, uint32_t i_layer)
{
    const struct attention_mla *a = (const struct attention_mla *)base;
    const struct attention_mla_work *w = (const struct attention_mla_work *)base_work;
    if (decoder_goes_on(s)) attend(s, a, w, norm, i_layer);
    const struct matmul_args out = {
        .w = &a->o,
        .x = gather_heads(s, w),
        .x_stride = widths_of(s->m).all_out,
    };
    decoder_add_product(s, out, &a->o_cut); /* [R, H] */
}

const struct attention_ops attention_mla_ops = {
    .create = mla_create,
    .create_work = mla_create_work,
    .bind = mla_bind,
    .bind_work = mla_bind_work,
    .release = mla_release,
    .release_work = mla_release_work,
    .limits = mla_limits,
    .rows_at_once = range_rows,
    .capture_lists = mla_capture_lists,
    .capture_rows = mla_capture_rows,
    .lists = mla_lists,
    .forward = mla_forward,
};
