/* decoder_draft.c - the draft layer of multi-token prediction: one more layer of the decoder, whose
 * input joins a hidden state with the embedding of the next token (struct model_draft).
 *
 * Its embedding and head are nearly always copies of the model's; only ones that differ are packed.
 * Thread: the loading one to bind, the engine thread for passes. */
#include <stdio.h>
#include <string.h>

#include "shared/model/decoder.h"
#include "shared/model/decoder_state.h"
#include "shared/model/model_ops.h"

/* ---- names ---- */

enum { NAME_MAX = TENSOR_NAME_BYTES_MAX / 4 };

/* `name` with the number of the model's layers in place of "%u". */
static const char *expand(const struct model *m, const char *name, char out[NAME_MAX])
{
    const char *at = strstr(name, "%u");
    if (at) snprintf(out, NAME_MAX, "%.*s%u%s", (int)(at - name), name, m->config.n_layers, at + 2);
    else snprintf(out, NAME_MAX, "%s", name);
    return out;
}

static bool has_draft(const struct model *m) { return m->config.n_draft_layers > 0; }

bool decoder_draft_is_there(const struct model *m)
{
    const struct model_draft_names *n = m->ops->draft;
    const struct weights *w = m->draft_weights ? m->draft_weights : m->weights;
    char name[NAME_MAX];
    if (!n) return false;
    return w->dummy ? m->config.n_next > 0
                    : weights_find(w, expand(m, n->norm_embed, name)) != NULL;
}

/* ---- bind ---- */

static struct matrix_spec spec_of(const struct model *m, const char *const name[2], size_t n_out,
                                  size_t n_in, char prefix[NAME_MAX])
{
    return (struct matrix_spec){
        .prefix = expand(m, name[0], prefix), .leaf = name[1], .n_out = n_out, .n_in = n_in
    };
}

static enum status bind_norm(struct binder *b, const char *name, float **to)
{
    char full[NAME_MAX];
    return bind_vector(b, "", expand(b->m, name, full), b->m->config.hidden, to);
}

static enum status bind_norms(struct binder *b, struct decoder_draft *d)
{
    const struct model_draft_names *n = b->m->ops->draft;
    TRY(bind_norm(b, n->norm_embed, &d->norm_embed));
    TRY(bind_norm(b, n->norm_hidden, &d->norm_hidden));
    return n->norm_out ? bind_norm(b, n->norm_out, &d->norm_out) : OK;
}

static enum status bind_projection(struct binder *b, struct decoder_draft *d)
{
    const struct model *m = b->m;
    const size_t hidden = m->config.hidden;
    char prefix[NAME_MAX];
    struct matrix_spec s = spec_of(m, m->ops->draft->projection, hidden, 2 * hidden, prefix);
    d->projection_cut = share_cut(&m->share, hidden, bind_unit(b, &s, BIND_AS_STORED));
    s.part = &d->projection_cut.mine;
    return bind_matrix(b, &s, BIND_AS_STORED, &d->projection);
}

/* Does the layer have a table of its own, other than the model's one named `model_name`? */
static bool has_own(struct binder *b, const char *const name[2], const char *model_name)
{
    char prefix[NAME_MAX], full[TENSOR_NAME_BYTES_MAX];
    if (!name[0]) return false;
    snprintf(full, sizeof full, "%s%s.weight", expand(b->m, name[0], prefix), name[1]);
    const struct weights_tensor *own = weights_take(b->m->weights, full),
                                *model = weights_find(b->m->weights, model_name);
    if (!own) return false;
    return !model || own->dtype != model->dtype || own->bytes != model->bytes ||
           memcmp(own->data, model->data, own->bytes) != 0;
}

static enum status bind_tables(struct binder *b, struct decoder *all)
{
    const struct model *m = b->m;
    const struct model_draft_names *n = m->ops->draft;
    char prefix[NAME_MAX];
    struct decoder_draft *d = &all->draft;
    if (has_own(b, n->embed, "model.embed_tokens.weight")) {
        struct matrix_spec s = spec_of(m, n->embed, m->config.n_vocab, m->config.hidden, prefix);
        s.is_table = true;
        TRY(bind_matrix(b, &s, BIND_AS_STORED, &d->embed));
    }
    if (!has_own(b, n->head, "lm_head.weight")) return OK;
    struct matrix_spec s = spec_of(m, n->head, m->config.n_vocab, m->config.hidden, prefix);
    s.part = &all->head_cut.mine;
    return bind_matrix(b, &s, BIND_AS_STORED, &d->head);
}

static enum status bind_all(struct binder *b, struct decoder *d)
{
    char layer[NAME_MAX];
    TRY(bind_norms(b, &d->draft));
    TRY(bind_projection(b, &d->draft));
    TRY(bind_tables(b, d));
    return decoder_bind_layer(b, &d->layers[b->m->config.n_layers],
                              expand(b->m, b->m->ops->draft->layer, layer));
}

/* Tensors of files of their own are found as those of the model are. */
enum status decoder_draft_bind(struct binder *b, struct decoder *d)
{
    struct model *m = b->m;
    struct weights *files = m->weights;
    if (!has_draft(m)) return OK;
    if (m->draft_weights) m->weights = m->draft_weights;
    const enum status st = bind_all(b, d);
    m->weights = files;
    return st == OK ? OK : err_prefix(b->err, "the draft layer: ");
}

void decoder_draft_bind_work(struct binder *b, struct decoder_draft *d)
{
    const size_t hidden = b->m->config.hidden;
    if (!has_draft(b->m)) return;
    b->m->max_draft_rows = b->m->max_rows < MODEL_DRAFT_ROWS_MAX ? b->m->max_rows
                                                                 : MODEL_DRAFT_ROWS_MAX;
    d->from_rows = bind_host(b, b->m->max_draft_rows, sizeof *d->from_rows);
    bind_floats(b, b->m->max_draft_rows, hidden, &d->x);
    bind_floats(b, b->m->max_draft_rows, 2 * hidden, &d->both);
    bind_reserve(b, b->m->max_draft_rows, 2 * hidden);
}

void decoder_draft_release(struct kernel_ctx *k, struct decoder_draft *d)
{
    weight_release(k, &d->projection);
    weight_release(k, &d->embed);
    weight_release(k, &d->head);
}

/* ---- a pass ---- */

/* The rows of d->x, or of d->draft.x, that the pass begins with. Returns whether some hidden states
 * come from elsewhere. */
static bool list_rows(struct decoder_draft *d, const struct model_draft *r)
{
    int32_t *to = d->from_rows;
    bool from_host = false;
    for (uint32_t i = 0; i < r->n_hidden; i++) {
        const struct model_hidden_rows *h = &r->hidden[i];
        from_host |= h->host != NULL;
        for (uint32_t j = 0; j < h->n; j++) *to++ = h->host ? 0 : (int32_t)(h->first + j);
    }
    return from_host;
}

/* Copies hidden states to the right halves of `both`. r NULL: all are of rows. */
static void take_hidden(const struct model *m, const struct model_draft *r,
                        const struct kernel_step *step)
{
    const struct decoder *d = m->decoder;
    struct kernel_ctx *k = m->kernels;
    const size_t hidden = m->config.hidden;
    float *to = d->draft.both + hidden;
    k->ops->copy_rows(k, to, 2 * hidden, step->program == KERNEL_PASS ? d->x : d->draft.x, hidden,
                      step->from_rows, (size_t)step->n_rows, hidden);
    for (uint32_t i = 0; r && i < r->n_hidden; i++) {
        const struct model_hidden_rows *h = &r->hidden[i];
        for (uint32_t j = 0; h->host && j < h->n; j++)
            device_upload(k->device, to + 2 * hidden * j, h->host + hidden * j,
                          hidden * sizeof *to);
        to += 2 * hidden * h->n;
    }
}

/* Makes the rows of the layer's input, x. */
static void join(const struct decoder_step *s, const struct model_draft *r,
                 const struct kernel_step *step)
{
    struct kernel_ctx *k = s->m->kernels;
    const struct decoder *d = s->m->decoder;
    const struct decoder_draft *draft = &d->draft;
    const size_t hidden = s->m->config.hidden, n = s->n_rows;
    const float eps = s->m->config.rms_eps;
    const struct share_cut *cut = &draft->projection_cut;
    float *both = draft->both, *right = both + hidden;
    const struct matmul_args product = {
        .w = &draft->projection,
        .x = both,
        .x_stride = 2 * hidden,
        .n_rows = n,
        .y = s->x + cut->mine.first,
        .y_stride = hidden,
    };
    take_hidden(s->m, r, step);
    if (step->program == KERNEL_PASS)
        k->ops->rms_norm(k, right, 2 * hidden, right, 2 * hidden, d->final_norm, n, hidden, eps);
    k->ops->rms_norm(k, right, 2 * hidden, right, 2 * hidden, draft->norm_hidden, n, hidden, eps);
    k->ops->embed(k, s->x, draft->embed.data ? &draft->embed : &d->embed, step->ids, n);
    k->ops->rms_norm(k, both, 2 * hidden, s->x, hidden, draft->norm_embed, n, hidden, eps);
    if (cut->mine.n > 0 && decoder_goes_on(s)) k->ops->matmul(k, &product, 1); /* [R, H] */
    decoder_gather(s, s->x, hidden, product.y, hidden, n, cut);
}

static void compute(struct model *m, const struct model_batch *b, const struct model_draft *r,
                    const struct kernel_step *step)
{
    struct decoder *d = m->decoder;
    const struct decoder_step s = decoder_step_of(m, b, step, d->draft.x);
    const struct weight *head = d->draft.head.data ? &d->draft.head
                                : d->head.data     ? &d->head
                                                   : &d->embed;
    if (s.n_rows > 0) join(&s, r, step);
    decoder_layer_forward(&s, d, m->config.n_layers);
    if (step->n_logits > 0)
        decoder_head_forward(&s, d, step, head,
                             d->draft.norm_out ? d->draft.norm_out : d->final_norm,
                             d->logits ? d->logits : b->logits);
}

void decoder_draft_capture(struct model *m, const struct model_batch *b,
                           const struct kernel_step *step)
{
    compute(m, b, NULL, step);
}

bool decoder_draft_forward(struct model *m, const struct model_draft *r)
{
    struct kernel_ctx *k = m->kernels;
    struct kernel_step step = decoder_begin(m, &r->batch);
    step.program = r->chained ? KERNEL_CHAINED_PASS : KERNEL_PASS;
    step.first_kept = (int32_t)model_kept_of_pass(m, r->i_pass, 0);
    step.n_kept = (int32_t)r->n_kept;
    step.eager |= list_rows(&m->decoder->draft, r);
    step.from_rows = m->decoder->draft.from_rows;
    k->step_ops->upload(k, &step);
    m->n_step_rows = (uint32_t)step.n_rows;
    if (device_fault(k->device, NULL) != OK) return false; /* nothing was submitted */
    if (!step.graph_launched) compute(m, &r->batch, r, &step);
    k->step_ops->submit(k);
    return decoder_end(m, &r->batch, &step);
}

void decoder_get_hidden(struct model *m, uint32_t row, float *out)
{
    const size_t hidden = m->config.hidden;
    device_download(m->kernels->device, out, m->decoder->x + row * hidden, hidden * sizeof *out);
}
