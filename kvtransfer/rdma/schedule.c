/* schedule.c - see schedule.h. */
#include "kvtransfer/rdma/schedule.h"

/* ---- pairs ---- */

static uint32_t common_bits(const uint8_t *a, const uint8_t *b)
{
    uint32_t n = 0;
    while (n < 128 && !((a[n / 8] ^ b[n / 8]) & (0x80 >> n % 8))) n++;
    return n;
}

/* How well two ports match; -1: not at all. A common GID type and a common prefix count more than
 * any distance of indices. */
static int score(const struct rdma_port_addr *a, uint32_t i, const struct rdma_port_addr *b,
                 uint32_t j)
{
    if (a->link != b->link) return -1;
    uint32_t prefix = common_bits(a->gid, b->gid);
    uint32_t far = i > j ? i - j : j - i;
    return (a->gid_type == b->gid_type ? 1 << 16 : 0) + (int)(prefix << 4) +
           (int)(RDMA_RAILS_MAX - far);
}

/* Finds the best pair whose `mine` has no partner yet and whose `theirs` has `uses` partners. */
static bool best_pair(const struct rdma_port_addr *mine, uint32_t n_mine,
                      const struct rdma_port_addr *theirs, uint32_t n_theirs,
                      const uint32_t *of_mine, const uint32_t *of_theirs, bool exclusive,
                      struct rdma_pair *out)
{
    int best = -1;
    for (uint32_t i = 0; i < n_mine; i++)
        for (uint32_t j = 0; j < n_theirs; j++) {
            if (exclusive ? of_mine[i] || of_theirs[j] : of_mine[i] && of_theirs[j]) continue;
            int s = score(&mine[i], i, &theirs[j], j);
            if (s <= best) continue;
            best = s;
            *out = (struct rdma_pair){ i, j };
        }
    return best >= 0;
}

uint32_t rdma_schedule_pair(const struct rdma_port_addr *mine, uint32_t n_mine,
                            const struct rdma_port_addr *theirs, uint32_t n_theirs,
                            struct rdma_pair out[RDMA_RAILS_MAX])
{
    uint32_t of_mine[RDMA_RAILS_MAX] = { 0 }, of_theirs[RDMA_RAILS_MAX] = { 0 }, n = 0;
    struct rdma_pair p;
    for (int exclusive = 1; exclusive >= 0; exclusive--)
        while (n < RDMA_RAILS_MAX &&
               best_pair(mine, n_mine, theirs, n_theirs, of_mine, of_theirs, exclusive, &p)) {
            of_mine[p.mine]++;
            of_theirs[p.theirs]++;
            uint32_t at = n++;
            for (; at > 0 && out[at - 1].mine > p.mine; at--) out[at] = out[at - 1];
            out[at] = p;
        }
    return n;
}

/* ---- choice, rest ---- */

uint32_t rdma_schedule_pick(const struct rdma_qp_load *loads, uint32_t n, uint64_t bytes)
{
    uint32_t best = n;
    double least = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!loads[i].usable) continue;
        double when = (double)(loads[i].in_flight + bytes) /
                      (double)(loads[i].bytes_per_s ? loads[i].bytes_per_s : 1);
        if (best == n || when < least) {
            best = i;
            least = when;
        }
    }
    return best;
}

uint32_t rdma_schedule_backoff_ms(uint32_t n_failed, bool others_up)
{
    if (!others_up) return RDMA_RETRY_ALONE_MS;
    uint32_t ms = RDMA_RETRY_FIRST_MS;
    for (uint32_t i = 0; i < n_failed && ms < RDMA_RETRY_MAX_MS; i++) ms *= 2;
    return ms < RDMA_RETRY_MAX_MS ? ms : RDMA_RETRY_MAX_MS;
}

uint32_t rdma_schedule_timeout_ms(uint32_t exponent)
{
    return (uint32_t)(((UINT64_C(4096) << (exponent & 31)) + 999999) / 1000000);
}
