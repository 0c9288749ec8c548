/* weight_cache_format.c - header and table of a cache file: computes them for planned weights and
 * checks those of a file.
 *
 * Thread: any. */
#include <inttypes.h>
#include <string.h>

#include "kernels/host/pages.h"
#include "shared/base/hash/hash.h"
#include "shared/model/load/weight_cache.h"

static const char MAGIC[8] = "batonpk";

_Static_assert(sizeof(struct weight_cache_header) == 48 && sizeof(struct weight_cache_entry) == 48,
               "no holes that a hash would cover");

static uint64_t hash_of(const struct weight_cache_header *head,
                        const struct weight_cache_entry *table)
{
    struct weight_cache_header h = *head;
    h.hash = 0;
    return hash_64(table, h.n_weights * sizeof *table, hash_64(&h, sizeof h, 0));
}

size_t weight_cache_lay_out(struct weight_cache_header *head, struct weight_cache_entry *table,
                            const struct weight_cache_key *key, const struct weight *plan, size_t n)
{
    const size_t first = pages_round(sizeof *head + n * sizeof *table);
    uint64_t at = first;
    for (size_t i = 0; i < n; at += plan[i++].bytes)
        table[i] = (struct weight_cache_entry){
            .n_out = plan[i].n_out,
            .n_in = plan[i].n_in,
            .at = at,
            .bytes = plan[i].bytes,
            .layout = plan[i].layout,
            .paired = plan[i].paired,
        };
    *head = (struct weight_cache_header){
        .version = WEIGHT_CACHE_VERSION, .n_weights = (uint32_t)n, .key = *key, .bytes = at
    };
    memcpy(head->magic, MAGIC, sizeof MAGIC);
    return first;
}

void weight_cache_seal(struct weight_cache_header *head, const struct weight_cache_entry *table)
{
    head->hash = hash_of(head, table);
}

/* Each offset must equal the one that the plan gives, so no entry can point outside the file. */
static enum status check_table(const struct weight_cache_entry *have, const struct weight *plan,
                               size_t n, uint64_t first, struct err *err)
{
    uint64_t at = first;
    for (size_t i = 0; i < n; at += plan[i++].bytes)
        if (have[i].n_out != plan[i].n_out || have[i].n_in != plan[i].n_in || have[i].at != at ||
            have[i].bytes != plan[i].bytes || have[i].layout != plan[i].layout ||
            have[i].paired != plan[i].paired)
            return err_set(err, ERR_STALE,
                           "its weight %zu is %" PRIu64 " x %" PRIu64 " in layout %" PRId32
                           ", the model's %zu x %zu in layout %d",
                           i, have[i].n_out, have[i].n_in, have[i].layout, plan[i].n_out,
                           plan[i].n_in, plan[i].layout);
    return OK;
}

static enum status check_key(const struct weight_cache_header *h,
                             const struct weight_cache_key *key, size_t n, struct err *err)
{
    if (h->version != WEIGHT_CACHE_VERSION)
        return err_set(err, ERR_STALE, "it is of version %" PRIu32 ", this program's is %d",
                       h->version, WEIGHT_CACHE_VERSION);
    if (h->key.weights != key->weights)
        return err_set(err, ERR_STALE, "it has other weights, or another layout of them");
    if (h->key.files != key->files)
        return err_set(err, ERR_STALE, "the model's files have changed since it was made");
    if (h->n_weights != n)
        return err_set(err, ERR_STALE, "it has %" PRIu32 " weights, the model %zu", h->n_weights,
                       n);
    return OK;
}

enum status weight_cache_check(const void *file, size_t size, const struct weight_cache_key *key,
                               const struct weight *plan, size_t n, struct err *err)
{
    const struct weight_cache_header *h = file;
    const struct weight_cache_entry *table = (const struct weight_cache_entry *)(h + 1);
    uint64_t total = pages_round(sizeof *h + n * sizeof *table);
    if (size < sizeof *h || memcmp(h->magic, MAGIC, sizeof MAGIC) != 0)
        return err_set(err, ERR_FORMAT, "it is not a file of packed weights");
    TRY(check_key(h, key, n, err));
    for (size_t i = 0; i < n; i++) total += plan[i].bytes;
    if (size != h->bytes || size != total)
        return err_set(err, ERR_FORMAT,
                       "it has %zu bytes, its header says %" PRIu64 " and the model takes %" PRIu64,
                       size, h->bytes, total);
    if (h->hash != hash_of(h, table))
        return err_set(err, ERR_FORMAT, "its table does not agree with its hash");
    return check_table(table, plan, n, pages_round(sizeof *h + n * sizeof *table), err);
}
