/* model.c - checks the model of --model: where it is, what it is, how much its KV cache takes.
 * Reads only the headers of the weights. Thread: main. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "deploy/doctor/doctor.h"
#include "deploy/node/node_model.h"
#include "deploy/node/node_options.h"
#include "kernels/host/host_memory.h"
#include "shared/model/load/model_files.h"
#include "shared/model/load/weights.h"
#include "shared/model/model_registry.h"

static const double MIB = 1 << 20;

/* False, with a line added, if the CPU or GPU cannot hold KV of this type. */
static bool check_kv_dtype(struct doctor *d, const struct model_config *m, struct kv_layout *l)
{
    struct err err = { 0 };
    enum activations activations;
    enum dtype kv;
    enum status st = node_options_arithmetic(d->c, &activations, &kv, &err);
    if (st == OK) st = kernel_kv_check(activations, kv, model_is_latent(m), &err);
    model_config_kv_layout(m, NULL, kv, (uint32_t)config_int(d->c, "block-size"), 1, l);
    if (st == OK) st = kv_layout_check(l, &err);
    if (st != OK) doctor_add(d, "KV cache", DOCTOR_FAIL, "%s", err.text);
    return st == OK;
}

/* Tokens of one context: --max-model-len, at most what the model was trained for. */
static uint64_t check_context(struct doctor *d, const struct model_config *m)
{
    uint64_t context = (uint64_t)config_int(d->c, "max-model-len");
    if (!m->max_position || m->max_position >= context) return context;
    if (config_is_set(d->c, "max-model-len"))
        doctor_fix(doctor_add(d, "context", DOCTOR_FAIL,
                              "--max-model-len %llu is more than the %u positions that the "
                              "model was trained for",
                              (unsigned long long)context, m->max_position),
                   "lower --max-model-len");
    return m->max_position;
}

/* The KV cache of a node on the CPU: as the node will reckon, once the weights are loaded. */
static uint64_t kv_bytes_of(const struct config *c, uint64_t weights, uint64_t block_bytes,
                            uint64_t most)
{
    uint64_t available = host_memory_available(),
             room = (available > weights ? available - weights : 0) / NODE_KV_SHARE,
             given = config_is_set(c, "kv-cache-memory")
                         ? (uint64_t)(config_float(c, "kv-cache-memory") * (double)(1 << 30))
                         : 0;
    return block_bytes * node_model_kv_blocks((uint64_t)config_int(c, "num-gpu-blocks-override"),
                                              given, room, block_bytes, most);
}

/* The one line that says how large the KV cache is. */
static struct doctor_line *say_kv(struct doctor *d, const struct kv_layout *l, uint64_t context,
                                  double one)
{
    struct doctor_line *line = doctor_add(
        d, "KV cache", DOCTOR_OK,
        "%s: %.2f MiB per block of %u tokens, %.0f MiB for one context of "
        "%llu",
        kv_dtype_name(l->dtype), (double)kv_layout_block_bytes(l) / MIB, l->block_tokens, one / MIB,
        (unsigned long long)context);
    size_t n = strlen(line->text);
    if (d->kv_bytes)
        snprintf(line->text + n, sizeof line->text - n,
                 "; the node takes about %.0f MiB, for %.1f such contexts",
                 (double)d->kv_bytes / MIB, (double)d->kv_bytes / one);
    return line;
}

static void check_kv(struct doctor *d, const struct model_config *m, uint64_t weights)
{
    struct kv_layout l;
    uint64_t limit, left = doctor_on_gpu(d) ? d->gpu_room : doctor_free_memory(&limit);
    if (!check_kv_dtype(d, m, &l)) return;
    uint64_t context = check_context(d, m), seqs = (uint64_t)config_int(d->c, "max-num-seqs");
    uint64_t per_context = (context + l.block_tokens - 1) / l.block_tokens;
    double one = (double)kv_layout_block_bytes(&l) * (double)per_context, all = one * (double)seqs;
    if (!doctor_on_gpu(d))
        d->kv_bytes = kv_bytes_of(d->c, weights, kv_layout_block_bytes(&l), per_context * seqs);
    struct doctor_line *line = say_kv(d, &l, context, one);
    if (doctor_on_gpu(d) && !left) return; /* reported before */
    if (one > (double)left) {
        line->result = DOCTOR_FAIL;
        doctor_fix(line, "%.0f MiB may be used; lower --max-model-len", (double)left / MIB);
    } else if (!doctor_on_gpu(d) && one > (double)d->kv_bytes) {
        line->result = DOCTOR_FAIL;
        doctor_fix(line,
                   "not one context fits, so a node would not start: lower --max-model-len or "
                   "raise --kv-cache-memory (or --num-gpu-blocks-override)");
    } else if (all > (double)left) {
        line->result = DOCTOR_WARN;
        doctor_fix(
            line,
            "%llu of them (--max-num-seqs) would need %.0f MiB, and %.0f MiB may be used, so "
            "long contexts will wait for each other; lower --max-num-seqs or "
            "--max-model-len",
            (unsigned long long)seqs, all / MIB, (double)left / MIB);
    }
}

/* Reads only the headers; *bytes: of all weights. */
static bool check_weights(struct doctor *d, const char *path, uint64_t *bytes)
{
    struct weights *w;
    struct err err = { 0 };
    *bytes = 0;
    if (strcmp(config_string(d->c, "load-format"), "dummy") == 0) {
        doctor_add(d, "weights", DOCTOR_WARN,
                   "dummy (--load-format dummy): none are read, and answers mean nothing");
        return true;
    }
    if (weights_open(path, &w, &err) == OK) {
        for (size_t i = 0; i < w->n_tensors; i++) *bytes += w->tensors[i].bytes;
        weights_close(w);
        return true;
    }
    doctor_fix(doctor_add(d, "model", DOCTOR_FAIL, "%s", err.text),
               "copy the weights there, or give another folder or file");
    return false;
}

void doctor_check_model(struct doctor *d)
{
    const char *name = config_string(d->c, "model");
    struct model_config m = { 0 };
    struct err err = { 0 };
    struct buf path = { 0 };
    struct stat info;
    uint64_t weights;
    if (!name) return;
    if (model_find(name, &path, &err) != OK) {
        doctor_fix(doctor_add(d, "model", DOCTOR_FAIL, "%s", err.text),
                   "put the folder or file there, or give its path");
        buf_release(&path);
        return;
    }
    struct model_generation generation;
    enum status st = node_model_config(path.data, &m, &generation, &err);
    if (st == OK && !model_registry_find(m.arch, &err)) st = ERR_UNSUPPORTED;
    if (st != OK) {
        doctor_fix(doctor_add(d, "model", DOCTOR_FAIL, "%s: %s", path.data, err.text),
                   st == ERR_UNSUPPORTED ? "give a checkpoint of a supported architecture"
                                         : "copy the model anew, or give another");
    } else if (!check_weights(d, path.data, &weights)) {
    } else {
        bool file = stat(path.data, &info) == 0 && S_ISREG(info.st_mode);
        struct doctor_line *line = doctor_add(d, "model", DOCTOR_OK,
                                              "%s: %s, %u layers, %u of context", path.data, m.arch,
                                              m.n_layers, m.max_position);
        if (file)
            snprintf(line->text + strlen(line->text), sizeof line->text - strlen(line->text),
                     ", file of %.0f MiB", (double)info.st_size / MIB);
        check_kv(d, &m, weights);
    }
    buf_release(&path);
}
