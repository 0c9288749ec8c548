/* simt_warp.cc - shuffles, votes, matches and reductions: each is computed for all lanes of the
 * mask by the lane that arrives last.
 *
 * A shuffle from a lane outside the mask is undefined on a GPU and ends the process here. Thread:
 * simt_block.h. */
#include <string.h>
#include <time.h>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"

struct shuffle_call : simt_warp_call {
    unsigned long long bits, result;
    int lane, width;
};

struct vote_call : simt_warp_call {
    unsigned long long bits;
    unsigned result;
};

/* As in PTX's shfl, lanes read within their segment of `width` lanes; a lane that would read beyond
 * it gets its own value. */
static int source_of(simt_shuffle how, int lane, int argument, int width)
{
    int first = lane & ~(width - 1), at = lane & (width - 1);
    switch (how) {
    case SIMT_SHUFFLE_INDEX: return first + (argument & (width - 1));
    case SIMT_SHUFFLE_UP: return at - argument >= 0 ? lane - argument : lane;
    case SIMT_SHUFFLE_DOWN: return at + argument < width ? lane + argument : lane;
    default: return (lane ^ argument) < first + width ? lane ^ argument : lane;
    }
}

static void perform_shuffle(simt_warp_call *const lanes[32], unsigned mask)
{
    for (unsigned left = mask; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        shuffle_call *c = static_cast<shuffle_call *>(lanes[lane]);
        int from = source_of((simt_shuffle)(c->variant & 3), lane, c->lane, c->width);
        if (from < 0 || from > 31 || !(mask >> from & 1))
            simt_die("%s: lane %d reads lane %d, which is not in the mask %08x", c->what, lane,
                     from, mask);
        c->result = static_cast<shuffle_call *>(lanes[from])->bits;
    }
}

unsigned long long simt_shuffle_bits(simt_shuffle how, unsigned mask, unsigned long long bits,
                                     int lane, int width)
{
    static const char *const NAMES[] = { "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                         "__shfl_xor_sync" };
    if (width <= 0 || width > 32 || (width & (width - 1)))
        simt_die("%s: a width of %d", NAMES[how], width);
    if (how != SIMT_SHUFFLE_INDEX && (lane < 0 || lane > 31))
        simt_die("%s: by %d lanes", NAMES[how], lane);
    shuffle_call c;
    c.what = NAMES[how], c.mask = mask, c.variant = width << 2 | how, c.perform = perform_shuffle;
    c.bits = c.result = bits, c.lane = lane, c.width = width;
    simt_warp_collect(&c);
    return c.result;
}

static unsigned lanes_equal(simt_warp_call *const lanes[32], unsigned mask, unsigned long long bits)
{
    unsigned same = 0;
    for (unsigned left = mask; left; left &= left - 1)
        if (static_cast<vote_call *>(lanes[__builtin_ctz(left)])->bits == bits)
            same |= left & -left;
    return same;
}

static void perform_vote(simt_warp_call *const lanes[32], unsigned mask)
{
    const vote_call *first = static_cast<vote_call *>(lanes[__builtin_ctz(mask)]);
    unsigned ballot = first->variant == SIMT_BALLOT ? lanes_equal(lanes, mask, 1) : 0;
    unsigned all = first->variant == SIMT_MATCH_ALL && lanes_equal(lanes, mask, first->bits) == mask
                       ? mask
                       : 0;
    for (unsigned left = mask; left; left &= left - 1) {
        vote_call *c = static_cast<vote_call *>(lanes[__builtin_ctz(left)]);
        c->result = c->variant == SIMT_MATCH_ANY ? lanes_equal(lanes, mask, c->bits) : ballot | all;
    }
}

unsigned simt_vote_bits(simt_vote how, unsigned mask, unsigned long long bits)
{
    static const char *const NAMES[] = { "__syncwarp", "a vote", "__match_any_sync",
                                         "__match_all_sync" };
    vote_call c;
    c.what = NAMES[how], c.mask = mask, c.variant = how, c.perform = perform_vote;
    c.bits = bits, c.result = 0, c.orders_memory = how == SIMT_SYNC;
    simt_warp_collect(&c);
    return c.result;
}

static unsigned combine(int how, unsigned a, unsigned b)
{
    switch (how) {
    case SIMT_REDUCE_ADD: return a + b;
    case SIMT_REDUCE_MIN: return a < b ? a : b;
    case SIMT_REDUCE_MAX: return a > b ? a : b;
    case SIMT_REDUCE_MIN_SIGNED: return (int)a < (int)b ? a : b;
    case SIMT_REDUCE_MAX_SIGNED: return (int)a > (int)b ? a : b;
    case SIMT_REDUCE_AND: return a & b;
    case SIMT_REDUCE_OR: return a | b;
    default: return a ^ b;
    }
}

static void perform_reduce(simt_warp_call *const lanes[32], unsigned mask)
{
    const vote_call *first = static_cast<vote_call *>(lanes[__builtin_ctz(mask)]);
    unsigned result = (unsigned)first->bits;
    for (unsigned left = mask & (mask - 1); left; left &= left - 1)
        result = combine(first->variant, result,
                         (unsigned)static_cast<vote_call *>(lanes[__builtin_ctz(left)])->bits);
    for (unsigned left = mask; left; left &= left - 1)
        static_cast<vote_call *>(lanes[__builtin_ctz(left)])->result = result;
}

unsigned simt_reduce_bits(simt_reduce how, unsigned mask, unsigned bits)
{
    vote_call c;
    c.what = "__reduce_sync", c.mask = mask, c.variant = how, c.perform = perform_reduce;
    c.bits = bits, c.result = 0;
    simt_warp_collect(&c);
    return c.result;
}

long long simt_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}
