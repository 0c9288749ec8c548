/* fake_backend.h - a backend without a model: the test double of shared/serve/backend.h.
 *
 * Every sequence answers with the tokens of `answer`, then the end token, unless max_tokens comes
 * first; with ignore_eos the answer repeats. One token per turn of the loop. Logprobs are a
 * function of position and id, so that tests know them. It keeps the contract: no sink function
 * inside submit or cancel, one on_end each. Thread: loop. */
#ifndef BATON_TESTS_UNIT_SERVE_FAKE_BACKEND_H
#define BATON_TESTS_UNIT_SERVE_FAKE_BACKEND_H

#include <stdio.h>
#include <string.h>

#include "shared/base/list.h"
#include "shared/base/mem.h"
#include "shared/net/loop.h"
#include "shared/serve/backend.h"

enum { FAKE_ANSWER_MAX = 256, FAKE_EOS = 3 };

struct fake_seq {
    struct list node;
    uint64_t id;
    struct gen_request r; /* tokens copied */
    struct gen_sink sink;
    uint32_t n_out, n_prompt_lp;
    bool canceled;
};

struct fake_backend {
    struct loop *loop;
    struct loop_timer *tick;
    struct list live;
    uint64_t last_id;
    int32_t answer[FAKE_ANSWER_MAX];
    uint32_t n_answer;
    uint32_t n_live, n_submitted, n_canceled, max_live; /* max_live 0: no limit */
    enum status refuse;                                 /* submit fails with this, ... */
    uint32_t retry_after_s;                             /* ... and says this */
    const char *retry;
    bool takes_others;
    uint64_t all_prompts;     /* as the last that follows none said */
    struct gen_limits limits; /* of every tenant */
    uint32_t limits_of;       /* the last that was asked for */
    enum status fail;         /* sequences end with this ... */
    uint32_t fail_after;      /* ... after so many tokens */
    uint32_t n_late;          /* so many that follow another end with ERR_BUSY, without a token */
    uint32_t first_waits;     /* one that follows none does so too, after as many steps */
    bool hold;                /* no progress, but cancel works */
    bool not_ready;
    uint64_t node;           /* tokens come from this node; 0: from one that keeps nothing */
    uint64_t model_bits;     /* that are of this model; both 0: nobody says so */
    bool models_differ;      /* each sequence is of another one */
    struct gen_request last; /* of the last submit; its pointers are invalid */
    struct logit_bias last_bias[8];
    uint64_t seeds[16]; /* of the first submits */
    char last_name[160];
};

static inline void fake_logprobs(struct token_logprobs *t, int32_t id, uint32_t position, int32_t n)
{
    *t = (struct token_logprobs){ .id = id, .rank = 1 };
    if (n < 0) return;
    t->logprob = -0.1f * (float)(position + 1);
    t->n_top = (uint32_t)n;
    for (int32_t i = 0; i < n; i++) {
        t->top[i].id = (id + i) % 500;
        t->top[i].logprob = t->logprob - (float)i;
    }
}

static inline void fake_end(struct fake_backend *f, struct fake_seq *s, enum status st,
                            enum finish_reason finish, int32_t stop)
{
    struct gen_end end = {
        .status = st, .finish = finish, .stop_token = stop, .n_output = s->n_out
    };
    snprintf(end.trace.prefill_node, sizeof end.trace.prefill_node, "p0");
    snprintf(end.trace.decode_node, sizeof end.trace.decode_node, "d0");
    snprintf(end.trace.transport, sizeof end.trace.transport, "mem");
    end.trace.kv_bytes = 4096;
    end.trace.kv_ns = 9000;
    end.trace.kv_busy_ns = 2000;
    end.trace.kv_link_speed = 50000000000;
    end.trace.n_cached = s->r.n_tokens > 1 ? 1 : 0;
    end.trace.total_ns = 1500000;
    if (st != OK) snprintf(end.text, sizeof end.text, "the fake failed on purpose");
    if (status_class_of(st) == CLASS_BUSY)
        end.retry_after_s = f->retry_after_s ? f->retry_after_s : 7;
    end.takes_others = f->takes_others;
    list_remove(&s->node);
    f->n_live--;
    struct gen_sink sink = s->sink;
    mem_free((void *)s->r.tokens);
    mem_free(s);
    sink.on_end(sink.arg, &end);
}

static inline int32_t fake_next(const struct fake_backend *f, const struct fake_seq *s)
{
    if (s->n_out < f->n_answer) return f->answer[s->n_out];
    if (s->r.sampling.ignore_eos || s->n_out < s->r.sampling.min_tokens)
        return f->answer[s->n_out % (f->n_answer ? f->n_answer : 1)];
    return FAKE_EOS;
}

static inline bool fake_is_stop(const struct fake_seq *s, int32_t id)
{
    if (s->n_out < s->r.sampling.min_tokens) return false;
    for (uint32_t i = 0; i < s->r.sampling.n_stop_ids; i++)
        if (s->r.sampling.stop_ids[i] == id) return true;
    return id == FAKE_EOS && !s->r.sampling.ignore_eos;
}

static inline void fake_step(struct fake_backend *f, struct fake_seq *s)
{
    struct token_logprobs t;
    if (s->canceled) {
        fake_end(f, s, ERR_CANCELED, FINISH_NONE, -1);
        return;
    }
    if (f->hold) return;
    if (f->n_late && s->r.admission.follows) {
        f->n_late--;
        fake_end(f, s, ERR_BUSY, FINISH_ERROR, -1);
        return;
    }
    if (f->first_waits && !s->r.admission.follows) {
        if (--f->first_waits == 0) fake_end(f, s, ERR_BUSY, FINISH_ERROR, -1);
        return;
    }
    for (; s->r.prompt_logprobs && s->n_prompt_lp + 1 < s->r.n_tokens; s->n_prompt_lp++) {
        fake_logprobs(&t, s->r.tokens[s->n_prompt_lp + 1], s->n_prompt_lp + 1,
                      s->r.sampling.n_logprobs);
        s->sink.on_prompt_logprob(s->sink.arg, s->n_prompt_lp + 1, &t);
    }
    if (f->fail != OK && s->n_out == f->fail_after) {
        fake_end(f, s, f->fail, FINISH_ERROR, -1);
        return;
    }
    if (s->n_out == s->r.sampling.max_tokens) {
        fake_end(f, s, OK, FINISH_LENGTH, -1);
        return;
    }
    if ((f->node || f->model_bits) && s->sink.on_node)
        s->sink.on_node(s->sink.arg, f->node, f->model_bits + (f->models_differ ? s->id : 0));
    int32_t id = fake_next(f, s);
    bool stop = fake_is_stop(s, id);
    fake_logprobs(&t, id, s->n_out, s->r.sampling.n_logprobs);
    s->sink.on_token(s->sink.arg, s->n_out++, &t);
    if (stop && !s->canceled) fake_end(f, s, OK, FINISH_STOP, id);
}

static inline void fake_tick(void *arg)
{
    struct fake_backend *f = arg;
    LIST_FOREACH (s, &f->live, struct fake_seq, node) fake_step(f, s);
    if (f->n_live == 0) {
        loop_timer_free(f->tick);
        f->tick = NULL;
    }
}

static inline void fake_limits(void *self, uint32_t tenant, struct gen_limits *out)
{
    struct fake_backend *f = self;
    f->limits_of = tenant;
    *out = f->limits;
}

static inline enum status fake_submit(void *self, const struct gen_request *r,
                                      const struct gen_sink *sink, uint64_t *id,
                                      struct gen_refusal *why)
{
    struct fake_backend *f = self;
    if (f->refuse != OK) {
        why->retry_after_s = f->retry_after_s;
        snprintf(why->retry, sizeof why->retry, "%s", f->retry ? f->retry : "");
        why->takes_others = f->takes_others;
        return err_set(&why->err, f->refuse, "the fake refuses on purpose");
    }
    if (f->max_live && f->n_live >= f->max_live)
        return err_set(&why->err, ERR_FULL, "the fake is full");
    struct fake_seq *s = MEM_NEW(struct fake_seq);
    s->r = *r;
    s->r.tokens = mem_dup(r->tokens, r->n_tokens * sizeof *r->tokens);
    s->sink = *sink;
    s->id = *id = ++f->last_id;
    list_push(&f->live, &s->node);
    f->n_live++;
    f->last = *r;
    if (!r->admission.follows) f->all_prompts = r->admission.all_prompts;
    for (uint32_t i = 0; i < r->sampling.n_bias && i < 8; i++)
        f->last_bias[i] = r->sampling.bias[i];
    if (f->n_submitted < 16) f->seeds[f->n_submitted] = r->sampling.seed;
    snprintf(f->last_name, sizeof f->last_name, "%s", r->name);
    f->n_submitted++;
    if (!f->tick) f->tick = loop_timer_start(f->loop, 0, 1, fake_tick, f);
    return OK;
}

static inline void fake_cancel(void *self, uint64_t id)
{
    struct fake_backend *f = self;
    LIST_FOREACH (s, &f->live, struct fake_seq, node) {
        if (s->id != id || s->canceled) continue;
        s->canceled = true;
        f->n_canceled++;
    }
}

static inline void fake_stats(void *self, struct serve_backend_stats *out)
{
    struct fake_backend *f = self;
    *out = (struct serve_backend_stats){ .n_running = f->n_live, .ready = !f->not_ready };
    if (f->not_ready) snprintf(out->why, sizeof out->why, "no decode node in topic 'default'");
}

static inline bool fake_is_full(void *self, uint32_t n_more)
{
    const struct fake_backend *f = self;
    return f->refuse == ERR_FULL || (f->max_live && f->n_live + n_more >= f->max_live);
}

static inline void fake_nodes(void *self, struct buf *out)
{
    (void)self;
    buf_add_c(out, "[{\"name\":\"p0\"}]");
}

static inline struct serve_backend fake_backend_of(struct fake_backend *f, struct loop *loop)
{
    f->loop = loop;
    list_init(&f->live);
    return (struct serve_backend){ .submit = fake_submit,
                                   .limits = fake_limits,
                                   .cancel = fake_cancel,
                                   .stats = fake_stats,
                                   .is_full = fake_is_full,
                                   .nodes = fake_nodes,
                                   .self = f };
}

#endif
