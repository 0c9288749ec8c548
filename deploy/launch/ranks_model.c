/* ranks_model.c - see ranks_model.h. */
#include "deploy/launch/ranks_model.h"

#include <stdlib.h>
#include <string.h>

#include "deploy/node/node_balance.h"
#include "deploy/node/node_model.h"
#include "kernels/device.h"
#include "shared/base/mem.h"

enum status ranks_check_gpus(const struct config *c, const struct ranks *r, int n_gpus,
                             struct err *err)
{
    const char *by = config_source_text(c, "tensor-parallel-size"),
               *listed = getenv("CUDA_VISIBLE_DEVICES");
    if (strcmp(by, "MP_NUM") != 0 || r->tp.size <= (uint32_t)n_gpus) return OK;
    return err_field(err, ERR_CONFIG, "tensor-parallel-size",
                     "MP_NUM gives this host %u ranks, and there are %d GPUs%s%s; list one for "
                     "each in CUDA_VISIBLE_DEVICES, or give MP_NUM %d for each host",
                     r->tp.size, n_gpus, listed ? ", CUDA_VISIBLE_DEVICES=" : "",
                     listed ? listed : "", n_gpus);
}

/* A GPU that is there is not opened: that would take memory on it. */
static enum status check_device(const struct config *c, const struct ranks *r, struct err *err)
{
    struct device *d;
    if (strcmp(config_string(c, "device"), "cuda") != 0) return OK;
    const int n_gpus = device_count("cuda");
    if (n_gpus > 0) return ranks_check_gpus(c, r, n_gpus, err);
    if (device_open("cuda", &d, err) != OK) return err_prefix(err, "--device cuda: ");
    device_close(d); /* it has come meanwhile */
    return OK;
}

enum status ranks_read_model(const struct config *c, struct model_config *m, struct err *err)
{
    struct model_generation generation;
    struct buf path = { 0 };
    enum status st = node_options_find_model(config_string(c, "model"), &path, err);
    if (st == OK) st = node_model_config(path.data, m, &generation, err);
    buf_release(&path);
    return st;
}

/* Who gave the size by a variable reads that name first. */
static void name_size(const struct config *c, struct err *err)
{
    const char *by = config_source_text(c, "tensor-parallel-size");
    if (by[0] != '-' && config_is_set(c, "tensor-parallel-size"))
        (void)err_prefix(err, "%s, for each host: ", by);
}

uint64_t ranks_copies_max(const struct ranks *r, const struct model_config *m)
{
    return (uint64_t)m->moe.n_experts * (r->size * r->tp.size - 1);
}

static void note_experts(const struct ranks *r, const struct model_config *m, uint32_t n_copies,
                         struct buf *notes)
{
    const uint32_t n_ranks = r->size * r->tp.size, n = m->moe.n_experts;
    if (n == 0) {
        buf_printf(notes,
                   "note: --enable-expert-parallel: the model has no experts to share; each of the "
                   "%u nodes computes alone, and they share the requests\n",
                   r->size);
        return;
    }
    if (n + n_copies < n_ranks)
        buf_printf(notes,
                   "warning: %u experts for %u ranks: some ranks have none; give "
                   "--data-parallel-size %u or less\n",
                   n, n_ranks, n > r->tp.size ? n / r->tp.size : 1);
    if (n_copies > ranks_copies_max(r, m))
        buf_printf(notes,
                   "warning: --num-redundant-experts %u: %llu copies are one of each expert on "
                   "every rank; more take memory and share no load\n",
                   n_copies, (unsigned long long)ranks_copies_max(r, m));
}

static enum status check_experts(const struct config *c, const struct ranks *r,
                                 const struct model_config *m, struct buf *notes, struct err *err)
{
    struct node_balance_options balance;
    TRY(node_balance_read(c, &balance, err));
    const uint32_t n_copies = (uint32_t)balance.n_redundant;
    if (m->moe.n_experts) TRY(node_balance_check_copies(m->moe.n_experts, n_copies, err));
    note_experts(r, m, n_copies, notes);
    return OK;
}

enum status ranks_check_model(const struct config *c, const struct ranks *r, struct buf *notes,
                              struct err *err)
{
    const struct model_share share = { .tp_size = r->tp.size };
    TRY(check_device(c, r, err));
    struct model_config *m = MEM_NEW(struct model_config);
    enum status st = ranks_read_model(c, m, err);
    if (st == OK && (st = model_share_check(&share, m, err)) != OK) name_size(c, err);
    if (st == OK && r->experts) st = check_experts(c, r, m, notes, err);
    mem_free(m);
    return st;
}
