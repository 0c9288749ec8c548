/* service.c - see service.h. */
#include "deploy/service/service.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/launch/launcher_watch.h"
#include "deploy/service/service_hosts.h"
#include "deploy/service/service_model.h"
#include "kernels/device.h"

#define WAITING "MAX_CACHED_TASK_NUM"
#define USUAL   "start_server's default"

enum { BLOCKS_MAX = 1 << 30, WAITING_USUAL = 128, REQUESTS_MAX = 1 << 20 };

bool service_is_on(void)
{
    const char *on = getenv(SERVICE_VARIABLE);
    return on && *on;
}

/* ---- BLOCK_BS ---- */

static enum status read_block_bs(const char *text, double *out, struct err *err)
{
    if (str_to_f64(str_trim(str_of(text)), out) == OK && *out > 0 && *out <= 65536) return OK;
    return err_set(err, ERR_CONFIG,
                   "BLOCK_BS is \"%.80s\", but must be a number above 0, of sequences that the KV "
                   "cache has room for, up to 65536",
                   text);
}

/* The pool holds so many sequences of --max-model-len, prompt and answer together: that service's
 * total is BLOCK_BS times the longest sequence of the model, whatever MAX_DEC_LEN is. */
static enum status complete_blocks(struct config *c, struct err *err)
{
    const char *text = getenv("BLOCK_BS");
    const int64_t block = config_int(c, "block-size"), longest = config_int(c, "max-model-len");
    double sequences;
    char number[32];
    if (!text || !*text || config_is_set(c, "num-gpu-blocks-override") ||
        config_is_set(c, "kv-cache-memory"))
        return OK;
    TRY(read_block_bs(text, &sequences, err));
    const double n = floor(sequences * (double)((longest + block - 1) / block));
    if (n < 1 || n > BLOCKS_MAX)
        return err_set(err, ERR_CONFIG,
                       "BLOCK_BS %s with sequences of %lld tokens and blocks of %lld is %.0f KV "
                       "blocks; they must be 1 to %d",
                       text, (long long)longest, (long long)block, n, BLOCKS_MAX);
    snprintf(number, sizeof number, "%.0f", n);
    return config_set_from(c, "num-gpu-blocks-override", number, "BLOCK_BS", err);
}

/* ---- MAX_CACHED_TASK_NUM ---- */

static int64_t n_hosts(const struct config *c)
{
    const int64_t given = config_int(c, "nnodes");
    size_t n_listed;
    config_list(c, "ips", 0, &n_listed);
    return (int64_t)n_listed > given ? (int64_t)n_listed : given;
}

/* As many requests run as there is room for on all hosts, and so many wait; more are refused. */
static enum status complete_queue(struct config *c, struct err *err)
{
    const char *value = getenv(WAITING), *given = value && *value ? value : NULL;
    const int64_t n_run = config_int(c, "max-num-seqs") * n_hosts(c);
    int64_t n_wait = WAITING_USUAL;
    char number[32];
    if ((!given && !config_is_service(c)) || config_is_set(c, "max-concurrency") ||
        config_is_set(c, "scheduler-max-size"))
        return OK;
    if (given &&
        (str_to_i64(str_trim(str_of(given)), &n_wait) != OK || n_wait < 1 || n_wait > REQUESTS_MAX))
        return err_set(err, ERR_CONFIG, "%s is \"%.80s\", but must be a whole number from 1 to %d",
                       WAITING, given, REQUESTS_MAX);
    const int64_t n = n_run + n_wait < REQUESTS_MAX ? n_run + n_wait : REQUESTS_MAX;
    snprintf(number, sizeof number, "%lld", (long long)n);
    return config_set_from(c, "max-concurrency", number, given ? WAITING : USUAL, err);
}

/* ---- the whole ---- */

/* That service computes on GPUs; where there is none the CPU does. */
static enum status complete_device(struct config *c, struct err *err)
{
    if (config_is_set(c, "device") || device_count("cuda") < 1) return OK;
    return config_set_from(c, "device", "cuda", "start_server, which takes a GPU that is there",
                           err);
}

enum status service_complete(struct config *c, struct err *err)
{
    if (launcher_watch_has_launcher()) return OK;
    TRY(complete_blocks(c, err));
    TRY(complete_queue(c, err));
    if (!config_is_service(c)) return OK;
    TRY(complete_device(c, err));
    TRY(service_model_complete(c, err));
    return service_hosts_complete(c, err);
}
