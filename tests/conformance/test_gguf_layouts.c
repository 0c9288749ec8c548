/* test_gguf_layouts.c - every architecture as a GGUF file gives its reference answers.
 *
 * The golden checkpoints are rewritten as converters write them: names, metadata, the experts of a
 * layer in one tensor, rows of q and k reordered for the llama architecture, rope factors as a
 * tensor, vectors in f32. If older and newer converters differ, both ways are tested. */
#include "shared/model/rope.h"
#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/fixtures/model_rig.h"

/* The options of a converter. */
struct gguf_variant {
    const char *golden, *arch;
    bool interleave;     /* the rows of q and k */
    bool single_experts; /* Mixtral's first converter: a tensor per expert */
    bool split_kv_b;     /* DeepSeek's newer converter */
    bool draft;          /* keep the layer that predicts further tokens */
};

static const struct gguf_variant VARIANTS[] = {
    { .golden = "llama", .arch = "llama", .interleave = true },
    { .golden = "llama_bias", .arch = "llama", .interleave = true },
    { .golden = "qwen2", .arch = "qwen2" },
    { .golden = "qwen3", .arch = "qwen3" },
    { .golden = "qwen3_moe", .arch = "qwen3moe" },
    { .golden = "mixtral", .arch = "llama", .interleave = true },
    { .golden = "mixtral", .arch = "llama", .interleave = true, .single_experts = true },
    { .golden = "ernie", .arch = "ernie4_5" },
    { .golden = "ernie_moe", .arch = "ernie4_5-moe" },
    { .golden = "ernie_moe_interval", .arch = "ernie4_5-moe" },
    { .golden = "deepseek_v3", .arch = "deepseek2", .draft = true },
    { .golden = "deepseek_v3", .arch = "deepseek2", .split_kv_b = true },
    { .golden = "deepseek_v2_lite", .arch = "deepseek2" },
    { .golden = "deepseek_v2_grouped", .arch = "deepseek2", .split_kv_b = true },
};

/* ---- tensors ---- */

static const char *const NAMES[][2] = {
    { "model.embed_tokens.weight", "token_embd.weight" },
    { "model.norm.weight", "output_norm.weight" },
    { "lm_head.weight", "output.weight" },
    { "input_layernorm.weight", "attn_norm.weight" },
    { "post_attention_layernorm.weight", "ffn_norm.weight" },
    { "self_attn.q_proj.weight", "attn_q.weight" },
    { "self_attn.q_proj.bias", "attn_q.bias" },
    { "self_attn.k_proj.weight", "attn_k.weight" },
    { "self_attn.k_proj.bias", "attn_k.bias" },
    { "self_attn.v_proj.weight", "attn_v.weight" },
    { "self_attn.v_proj.bias", "attn_v.bias" },
    { "self_attn.o_proj.weight", "attn_output.weight" },
    { "self_attn.o_proj.bias", "attn_output.bias" },
    { "self_attn.q_norm.weight", "attn_q_norm.weight" },
    { "self_attn.k_norm.weight", "attn_k_norm.weight" },
    { "self_attn.q_a_proj.weight", "attn_q_a.weight" },
    { "self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight" },
    { "self_attn.q_b_proj.weight", "attn_q_b.weight" },
    { "self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight" },
    { "self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight" },
    { "self_attn.kv_b_proj.weight", "attn_kv_b.weight" },
    { "mlp.gate_proj.weight", "ffn_gate.weight" },
    { "mlp.up_proj.weight", "ffn_up.weight" },
    { "mlp.down_proj.weight", "ffn_down.weight" },
    { "mlp.gate.weight", "ffn_gate_inp.weight" },
    { "block_sparse_moe.gate.weight", "ffn_gate_inp.weight" },
    { "mlp.gate.e_score_correction_bias", "exp_probs_b.bias" },
    { "mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias" },
    { "mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight" },
    { "mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight" },
    { "mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight" },
    { "enorm.weight", "nextn.enorm.weight" },
    { "hnorm.weight", "nextn.hnorm.weight" },
    { "eh_proj.weight", "nextn.eh_proj.weight" },
    { "embed_tokens.weight", "nextn.embed_tokens.weight" },
    { "shared_head.norm.weight", "nextn.shared_head_norm.weight" },
    { "shared_head.head.weight", "nextn.shared_head_head.weight" },
};

/* Matrices of experts, as checkpoints call them. */
static const char *const EXPERT_NAMES[][2] = {
    { "mlp.experts.0.gate_proj.weight", "ffn_gate" },
    { "mlp.experts.0.up_proj.weight", "ffn_up" },
    { "mlp.experts.0.down_proj.weight", "ffn_down" },
    { "block_sparse_moe.experts.0.w1.weight", "ffn_gate" },
    { "block_sparse_moe.experts.0.w3.weight", "ffn_up" },
    { "block_sparse_moe.experts.0.w2.weight", "ffn_down" },
};

/* Interleaves the two halves of each head, as the converter does for q and k of the llama
 * architecture. */
static void interleave(struct checkpoint_tensor *t, size_t head_dim)
{
    size_t rows = (size_t)t->shape[0], row = t->bytes / rows, half = head_dim / 2;
    uint8_t *out = mem_calloc(1, t->bytes);
    for (size_t i = 0; i < rows; i++) {
        size_t head = i / head_dim, j = i % head_dim,
               to = head * head_dim + (j < half ? 2 * j : 2 * (j - half) + 1);
        memcpy(out + to * row, t->data + i * row, row);
    }
    mem_free(t->data);
    t->data = out;
}

static void put(struct gguf_write *w, const char *name, const struct checkpoint_tensor *t)
{
    uint64_t ne[2] = { t->shape[t->n_dims - 1], t->shape[0] };
    bool vector = t->n_dims == 1 || t->shape[0] == 1, f32 = t->dtype == DTYPE_F32;
    if (vector && !f32) {
        float *v = checkpoint_values(t);
        gguf_write_tensor(w, name, 0, 1, ne, v, ne[0] * sizeof *v);
        mem_free(v);
    } else {
        gguf_write_tensor(w, name, f32 ? 0 : 30, vector ? 1 : 2, ne, t->data, t->bytes);
    }
}

/* For "model.layers.<n>.<part>" the number and the part; NULL for a tensor of no layer. */
static const char *part_of(const char *name, uint32_t *layer)
{
    int at = 0;
    if (sscanf(name, "model.layers.%u.%n", layer, &at) != 1 || at == 0) return NULL;
    return name + at;
}

/* Writes one matrix of all experts; `t` is that of expert 0. */
static void put_experts(struct gguf_write *w, struct checkpoint *s,
                        const struct checkpoint_tensor *t, const char *name, uint32_t layer,
                        bool single)
{
    struct buf all = { 0 };
    char from[160], to[160], head[160];
    const char *zero = strstr(t->name, ".0.") ? strstr(strstr(t->name, "experts"), ".0.") : NULL;
    uint64_t n = 0;
    CHECK(zero != NULL);
    checkpoint_print(head, sizeof head, "%.*s", (int)(zero - t->name), t->name);
    for (;; n++) {
        checkpoint_print(from, sizeof from, "%s.%llu.%s", head, (unsigned long long)n, zero + 3);
        struct checkpoint_tensor *one = checkpoint_find(s, from);
        if (!one) break;
        checkpoint_print(to, sizeof to, "blk.%u.%s.%llu.weight", layer, name,
                         (unsigned long long)n);
        if (single) put(w, to, one);
        buf_add(&all, one->data, one->bytes);
    }
    checkpoint_print(to, sizeof to, "blk.%u.%s_exps.weight", layer, name);
    if (!single)
        gguf_write_tensor(w, to, 30, 3, (uint64_t[]){ t->shape[1], t->shape[0], n }, all.data,
                          all.len);
    buf_release(&all);
}

/* kv_b [n_heads (nope + v), kv_lora] → k_b [n_heads][kv_lora][nope] and v_b
 * [n_heads][v][kv_lora]. */
static void put_split_kv_b(struct gguf_write *w, const struct checkpoint_tensor *t,
                           const struct model_config *c, uint32_t layer)
{
    const struct mla_config *m = &c->mla;
    const size_t per_head = m->nope + m->v, row = (size_t)m->kv_lora;
    const uint16_t *from = (const uint16_t *)t->data;
    uint16_t *k = MEM_ARRAY(uint16_t, c->n_heads * row * m->nope),
             *v = MEM_ARRAY(uint16_t, c->n_heads * row * m->v);
    char name[64];
    for (size_t h = 0; h < c->n_heads; h++)
        for (size_t i = 0; i < per_head; i++)
            for (size_t j = 0; j < row; j++) {
                uint16_t x = from[(h * per_head + i) * row + j];
                if (i < m->nope) k[(h * row + j) * m->nope + i] = x;
                else v[(h * m->v + (i - m->nope)) * row + j] = x;
            }
    checkpoint_print(name, sizeof name, "blk.%u.attn_k_b.weight", layer);
    gguf_write_tensor(w, name, 30, 3, (uint64_t[]){ m->nope, row, c->n_heads }, k,
                      c->n_heads * row * m->nope * 2);
    checkpoint_print(name, sizeof name, "blk.%u.attn_v_b.weight", layer);
    gguf_write_tensor(w, name, 30, 3, (uint64_t[]){ row, m->v, c->n_heads }, v,
                      c->n_heads * row * m->v * 2);
    mem_free(k);
    mem_free(v);
}

static void put_tensor(struct gguf_write *w, struct checkpoint *s, struct checkpoint_tensor *t,
                       const struct gguf_variant *f, const struct model_config *c)
{
    uint32_t layer = 0;
    char name[160];
    const char *part = part_of(t->name, &layer);
    if (strstr(t->name, "mtp_") || (part && layer >= c->n_layers && !f->draft)) return;
    for (size_t i = 0; part && i < COUNT_OF(EXPERT_NAMES); i++)
        if (strcmp(part, EXPERT_NAMES[i][0]) == 0)
            put_experts(w, s, t, EXPERT_NAMES[i][1], layer, f->single_experts);
    if (part && strstr(part, "experts.") && !strstr(part, "shared_experts")) return;
    if (f->interleave && part && (strstr(part, "q_proj") || strstr(part, "k_proj")))
        interleave(t, c->head_dim);
    if (f->split_kv_b && part && strstr(part, "kv_b_proj")) {
        put_split_kv_b(w, t, c, layer);
        return;
    }
    for (size_t i = 0; i < COUNT_OF(NAMES); i++)
        if (strcmp(part ? part : t->name, NAMES[i][0]) == 0) {
            if (part) checkpoint_print(name, sizeof name, "blk.%u.%s", layer, NAMES[i][1]);
            else checkpoint_print(name, sizeof name, "%s", NAMES[i][1]);
            put(w, name, t);
            return;
        }
    test_fail(__FILE__, __LINE__, "%s: no name in GGUF", t->name);
}

/* ---- metadata ---- */

static void put_u32(struct gguf_write *w, const struct gguf_variant *f, const char *key, uint32_t v)
{
    char full[128];
    checkpoint_print(full, sizeof full, "%s.%s", f->arch, key);
    gguf_write_u32(w, full, v);
}

static void put_f32(struct gguf_write *w, const struct gguf_variant *f, const char *key, double v)
{
    char full[128];
    checkpoint_print(full, sizeof full, "%s.%s", f->arch, key);
    gguf_write_f32(w, full, (float)v);
}

static void put_latent(struct gguf_write *w, const struct gguf_variant *f,
                       const struct model_config *c)
{
    const struct mla_config *m = &c->mla;
    char key[64];
    if (m->q_lora) put_u32(w, f, "attention.q_lora_rank", m->q_lora);
    put_u32(w, f, "attention.kv_lora_rank", m->kv_lora);
    put_u32(w, f, "rope.dimension_count", m->rope);
    put_u32(w, f, "attention.head_count_kv", f->split_kv_b ? 1 : c->n_heads);
    put_u32(w, f, "attention.key_length", f->split_kv_b ? m->kv_lora + m->rope : m->nope + m->rope);
    put_u32(w, f, "attention.value_length", f->split_kv_b ? m->kv_lora : m->v);
    if (f->split_kv_b) {
        put_u32(w, f, "attention.key_length_mla", m->nope + m->rope);
        put_u32(w, f, "attention.value_length_mla", m->v);
    }
    checkpoint_print(key, sizeof key, "%s.rope.scaling.type", f->arch);
    gguf_write_text(w, key, "yarn");
    put_f32(w, f, "rope.scaling.factor", c->rope.factor);
    put_u32(w, f, "rope.scaling.original_context_length", (uint32_t)c->rope.original_max);
    put_f32(w, f, "rope.scaling.yarn_log_multiplier",
            (sqrt(c->rope.score_factor) - 1) / log(c->rope.factor));
    if (f->draft) put_u32(w, f, "nextn_predict_layers", 1);
}

static void put_moe(struct gguf_write *w, const struct gguf_variant *f,
                    const struct model_config *c)
{
    const struct moe_config *m = &c->moe;
    char key[64];
    put_u32(w, f, "expert_count", m->n_experts);
    put_u32(w, f, "expert_used_count", m->n_used);
    if (strcmp(f->arch, "llama") == 0)
        return; /* Mixtral's experts have the size of
                 * feed_forward_length */
    put_u32(w, f, "expert_feed_forward_length", m->intermediate);
    if (!model_is_latent(c)) return;
    put_u32(w, f, "expert_shared_count", m->shared_intermediate / m->intermediate);
    put_f32(w, f, "expert_weights_scale", (double)m->scale);
    put_u32(w, f, "expert_gating_func", m->score == ROUTE_SIGMOID ? 2 : 1);
    checkpoint_print(key, sizeof key, "%s.expert_weights_norm", f->arch);
    gguf_write_bool(w, key, m->norm != NORM_NONE);
    if (m->n_groups == 1) return;
    put_u32(w, f, "expert_group_count", m->n_groups);
    put_u32(w, f, "expert_group_used_count", m->topk_groups);
}

/* llama3 scaling as factors by which each frequency was divided. */
static void put_factors(struct gguf_write *w, const struct model_config *c)
{
    double scaled[KERNEL_HEAD_DIM_MAX], plain[KERNEL_HEAD_DIM_MAX];
    float factors[KERNEL_HEAD_DIM_MAX];
    struct model_config none = *c;
    none.rope.kind = ROPE_PLAIN;
    rope_inv_freq(c, NULL, scaled);
    rope_inv_freq(&none, NULL, plain);
    for (uint32_t i = 0; i < c->head_dim / 2; i++) factors[i] = (float)(plain[i] / scaled[i]);
    gguf_write_tensor(w, "rope_freqs.weight", 0, 1, (uint64_t[]){ c->head_dim / 2 }, factors,
                      c->head_dim / 2 * 4);
}

static void put_metadata(struct gguf_write *w, const struct gguf_variant *f,
                         const struct model_config *c)
{
    gguf_write_text(w, "general.architecture", f->arch);
    put_u32(w, f, "block_count", c->n_layers + f->draft);
    put_u32(w, f, "embedding_length", c->hidden);
    put_u32(w, f, "feed_forward_length", c->intermediate);
    put_u32(w, f, "attention.head_count", c->n_heads);
    put_u32(w, f, "context_length", c->max_position);
    put_f32(w, f, "rope.freq_base", c->rope_theta);
    put_f32(w, f, "attention.layer_norm_rms_epsilon", (double)c->rms_eps);
    if (model_is_latent(c)) {
        put_latent(w, f, c);
    } else {
        put_u32(w, f, "attention.head_count_kv", c->n_kv_heads);
        put_u32(w, f, "attention.key_length", c->head_dim);
        put_u32(w, f, "attention.value_length", c->head_dim);
    }
    if (c->moe.n_experts) put_moe(w, f, c);
}

/* ---- the test ---- */

static void check_variant(const struct gguf_variant *f, size_t i)
{
    struct rig r;
    struct gguf_write w = { 0 };
    struct buf file = { 0 };
    char path[4096], name[64];
    rig_open(&r, golden(f->golden, "model").text, "auto");
    struct checkpoint *s = checkpoint_read(golden(f->golden, "model").text);
    put_metadata(&w, f, &r.m->config);
    for (size_t t = 0; t < s->n; t++) put_tensor(&w, s, &s->t[t], f, &r.m->config);
    if (r.m->config.rope.kind == ROPE_LLAMA3) put_factors(&w, &r.m->config);
    gguf_write_finish(&w, &file);
    checkpoint_release(s);
    rig_close(&r);
    checkpoint_print(name, sizeof name, "%zu-%s.gguf", i, f->golden);
    const char *folder = test_tmpdir();
    checkpoint_put_file(folder, name, buf_str(&file));
    buf_release(&file);
    checkpoint_print(path, sizeof path, "%s/%s", folder, name);
    check_golden(f->golden, path, "auto");
}

TEST(gguf_files_give_the_same_answers)
{
    for (size_t i = 0; i < COUNT_OF(VARIANTS); i++) check_variant(&VARIANTS[i], i);
}

TEST_MAIN(CASE_T(gguf_files_give_the_same_answers, 240))
