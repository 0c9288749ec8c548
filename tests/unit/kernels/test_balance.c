/* test_balance.c - placements of experts: against the published example of EPLB, against the best
 * there is (by exhaustive search of small cases), and what must hold of each. */
#include <stdio.h>
#include <string.h>

#include "kernels/ep/balance.h"
#include "kernels/ep/ep_backend.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { LOGICAL_MAX = 512, RANKS_MAX = 64 };

static uint64_t the_seed = 19;
static uint64_t draw(uint64_t n)
{
    the_seed = the_seed * 6364136223846793005u + 1442695040888963407u;
    return (the_seed >> 33) % n;
}

/* ---- what holds of every placement ---- */

/* ep takes it, and no rank has more slots than another but for one if they are `even`. */
static void check(const struct balance_out *b, bool even)
{
    const struct ep_placement p = balance_placement(b);
    struct err err = { 0 };
    if (ep_placement_check(&p, b->n_ranks, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    for (int32_t r = 0; r < b->n_ranks && even; r++) {
        const int32_t n = b->first[r + 1] - b->first[r], least = b->n_physical / b->n_ranks;
        CHECK(n == least || (n == least + 1 && b->n_physical % b->n_ranks > 0));
    }
}

static const int32_t *map_of(const struct balance_out *b, int32_t map)
{
    return b->logical + map * b->n_physical;
}

static int32_t count_in(const struct balance_out *b, int32_t map, int32_t rank, int32_t e)
{
    int32_t n = 0;
    for (int32_t x = b->first[rank]; x < b->first[rank + 1]; x++) n += map_of(b, map)[x] == e;
    return n;
}

static int32_t count_copies(const struct balance_out *b, int32_t map, int32_t e)
{
    int32_t n = 0;
    for (int32_t r = 0; r < b->n_ranks; r++) n += count_in(b, map, r, e);
    return n;
}

/* The largest load of a rank. */
static double largest(const struct balance_out *b, const uint64_t *load, int32_t map)
{
    double sum = 0;
    for (int32_t e = 0; e < b->n_logical; e++) sum += (double)load[map * b->n_logical + e];
    return balance_imbalance(b, load, map) * sum / b->n_ranks;
}

/* ---- by number ---- */

TEST(even_is_contiguous_and_copies_are_elsewhere)
{
    for (int32_t n = 1; n <= 20; n++)
        for (int32_t ranks = 1; ranks <= 9; ranks++)
            for (int32_t redundant = 0; redundant <= 12; redundant++) {
                struct balance_out b = balance_even(n, ranks, redundant);
                int32_t least = n + redundant, most = 0;
                check(&b, true);
                CHECK_EQ_INT(b.n_physical, n + redundant);
                for (int32_t r = 0; r < ranks; r++) {
                    const int32_t first = r * n / ranks, end = (r + 1) * n / ranks;
                    for (int32_t e = first; e < end; e++)
                        CHECK_EQ_INT(b.logical[b.first[r] + e - first], e);
                    /* two of one on a rank: only if it has all */
                    bool all = true, twice = false;
                    for (int32_t e = 0; e < n; e++) {
                        all = all && count_in(&b, 0, r, e) > 0;
                        twice = twice || count_in(&b, 0, r, e) > 1;
                    }
                    CHECK(all || !twice);
                }
                for (int32_t e = 0; e < n; e++) {
                    const int32_t copies = count_copies(&b, 0, e);
                    least = copies < least ? copies : least;
                    most = copies > most ? copies : most;
                }
                if (redundant <= n) CHECK(most - least <= 1);
                balance_release(&b);
            }
}

/* ---- the published example ---- */

/* README.md of github.com/deepseek-ai/EPLB, "Interface and Example": two layers of 12 experts, 4
 * redundant, 4 groups, 2 hosts, 8 ranks. What it prints there has ranks with loads of up to 156 and
 * 179.5. */
TEST(eplb_is_as_good_as_the_published_example)
{
    static const uint64_t load[2][12] = { { 90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86 },
                                          { 20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16,
                                            27 } };
    static const double published[2] = { 156, 179.5 };
    struct balance_out b = balance_eplb(load[0], 2, 12, 8, 2, 4, 4);
    check(&b, true);
    for (int32_t m = 0; m < 2; m++) {
        printf("    layer %d: %.1f, published %.1f\n", m, largest(&b, load[0], m), published[m]);
        CHECK(largest(&b, load[0], m) <= published[m] + 1e-6);
        bool on_first = false; /* host; whole groups of three experts are, or are not */
        for (int32_t e = 0; e < 12; e++) {
            int32_t n = 0;
            for (int32_t r = 0; r < 4; r++) n += count_in(&b, m, r, e);
            if (e % 3 == 0) on_first = n > 0;
            CHECK_EQ_INT(n, on_first ? count_copies(&b, m, e) : 0);
        }
    }
    balance_release(&b);
}

/* ---- the optimum ---- */

enum { SMALL = 12 };

/* All ways to give n experts copies, and to place these in ranks with room. */
struct search {
    const uint64_t *load;
    int32_t n, n_ranks, room[SMALL], copies[SMALL];
    double total[SMALL], best;
};

/* Places what is left of expert e's copies, in ranks from `rank` on, then the other experts. */
static void place_from(struct search *s, int32_t e, int32_t left, int32_t rank)
{
    if (left == 0) {
        e++;
        rank = 0;
        if (e < s->n) left = s->copies[e];
    }
    if (e == s->n) {
        double most = 0;
        for (int32_t r = 0; r < s->n_ranks; r++) most = s->total[r] > most ? s->total[r] : most;
        s->best = most < s->best ? most : s->best;
        return;
    }
    for (int32_t r = rank; r < s->n_ranks; r++) {
        const double of_one = (double)s->load[e] / s->copies[e];
        if (s->room[r] == 0 || s->total[r] + of_one >= s->best) continue;
        const double before = s->total[r];
        s->room[r]--;
        s->total[r] += of_one;
        place_from(s, e, left - 1, r);
        s->room[r]++;
        s->total[r] = before;
    }
}

static void copy_from(struct search *s, int32_t e, int32_t spare)
{
    if (e + 1 == s->n) {
        s->copies[e] = 1 + spare;
        place_from(s, 0, s->copies[0], 0);
        return;
    }
    for (int32_t i = 0; i <= spare; i++) {
        s->copies[e] = 1 + i;
        copy_from(s, e + 1, spare - i);
    }
}

/* The least that the largest load of ranks with first[r + 1] - first[r] slots can be. */
static double optimum(const uint64_t *load, int32_t n, const int32_t *first, int32_t n_ranks)
{
    struct search s = { .load = load, .n = n, .n_ranks = n_ranks, .best = 1e18 };
    for (int32_t r = 0; r < n_ranks; r++) s.room[r] = first[r + 1] - first[r];
    copy_from(&s, 0, first[n_ranks] - first[0] - n);
    return s.best;
}

/* Loads of which some are like each other, some are many times the others'. */
static void draw_load(uint64_t *load, int32_t n)
{
    const uint64_t kind = draw(4);
    for (int32_t e = 0; e < n; e++) {
        load[e] = kind == 0 ? 500 + draw(100) : 1 + draw(1000);
        if (kind == 2) load[e] = 1000 / (1 + draw(50));
        if (kind == 3 && draw(3) == 0) load[e] *= 10;
    }
}

TEST(eplb_is_within_a_third_of_the_optimum)
{
    double worst = 0, sum = 0;
    int n_optimal = 0;
    for (int i = 0; i < 1000; i++) {
        const int32_t n = 2 + (int32_t)draw(5), ranks = 2 + (int32_t)draw(3),
                      redundant = (int32_t)draw((uint64_t)(10 - n));
        uint64_t load[SMALL];
        draw_load(load, n);
        struct balance_out b = balance_eplb(load, 1, n, ranks, 1, 1, redundant);
        check(&b, true);
        const double best = optimum(load, n, b.first, ranks), ratio = largest(&b, load, 0) / best;
        if (ratio > 4.0 / 3)
            test_fail(__FILE__, __LINE__, "case %d: %d experts, %d ranks, %d redundant: %g of %g",
                      i, n, ranks, redundant, largest(&b, load, 0), best);
        CHECK(ratio > 1 - 1e-9);
        worst = ratio > worst ? ratio : worst;
        sum += ratio;
        n_optimal += ratio < 1 + 1e-9;
        balance_release(&b);
    }
    printf("    worst %.3f, mean %.4f of the optimum, which %d of 1000 reach\n", worst, sum / 1000,
           n_optimal);
}

/* 4 groups of 2 experts on 2 hosts of 2 ranks: the optimum of all ways to give groups to hosts. */
TEST(eplb_by_host_is_within_a_third_of_the_optimum)
{
    static const int32_t groups[3][4] = { { 0, 1, 2, 3 }, { 0, 2, 1, 3 }, { 0, 3, 1, 2 } };
    double worst = 0;
    for (int i = 0; i < 200; i++) {
        uint64_t load[8], host[4];
        double best = 1e18;
        draw_load(load, 8);
        struct balance_out b = balance_eplb(load, 1, 8, 4, 2, 4, 4);
        check(&b, true);
        for (int way = 0; way < 3; way++) {
            double most = 0;
            for (int h = 0; h < 2; h++) {
                for (int e = 0; e < 4; e++) host[e] = load[2 * groups[way][2 * h + e / 2] + e % 2];
                const double of_host = optimum(host, 4, b.first + 2 * h, 2);
                most = of_host > most ? of_host : most;
            }
            best = most < best ? most : best;
        }
        const double ratio = largest(&b, load, 0) / best;
        CHECK(ratio > 1 - 1e-9 && ratio <= 4.0 / 3);
        worst = ratio > worst ? ratio : worst;
        balance_release(&b);
    }
    printf("    worst %.3f of the optimum\n", worst);
}

/* ---- EPLB on sizes of real models ---- */

static void draw_skewed(uint64_t *load, int32_t n_maps, int32_t n)
{
    for (int32_t m = 0; m < n_maps; m++)
        for (int32_t e = 0; e < n; e++) /* the hot experts are neighbours, others in each layer */
            load[m * n + e] = (uint64_t)(100000 / (1 + (e + 37 * m) % n)) + draw(100);
}

TEST(eplb_evens_a_skewed_load_out)
{
    static const struct {
        int32_t n, ranks, hosts, groups, redundant;
    } sizes[] = {
        { 64, 8, 1, 1, 16 }, { 128, 8, 1, 1, 32 }, { 256, 64, 8, 8, 64 }, { 256, 64, 5, 8, 32 }
    };
    enum { MAPS_N = 4 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        static uint64_t load[MAPS_N * LOGICAL_MAX];
        draw_skewed(load, MAPS_N, sizes[i].n);
        struct balance_out even = balance_even(sizes[i].n, sizes[i].ranks, 0),
                           b = balance_eplb(load, MAPS_N, sizes[i].n, sizes[i].ranks,
                                            sizes[i].hosts, sizes[i].groups, sizes[i].redundant);
        check(&b, true);
        for (int32_t m = 0; m < MAPS_N; m++) {
            const double before = balance_imbalance(&even, load + m * sizes[i].n, 0),
                         after = balance_imbalance(&b, load, m);
            printf("    %d experts, %d ranks, %d redundant, layer %d: imbalance %.2f, then %.3f\n",
                   sizes[i].n, sizes[i].ranks, sizes[i].redundant, m, before, after);
            CHECK(before > 2);
            if (sizes[i].hosts != 8) CHECK(after < 1.2);
            else CHECK(after < before / 2); /* a host has whole groups, one of them the hot one */
        }
        balance_release(&even);
        balance_release(&b);
    }
}

TEST(eplb_of_no_load_spreads_copies)
{
    const uint64_t load[12] = { 0 };
    struct balance_out b = balance_eplb(load, 1, 12, 4, 1, 1, 8);
    check(&b, true);
    for (int32_t e = 0; e < 12; e++) {
        CHECK(count_copies(&b, 0, e) <= 2);
        for (int32_t r = 0; r < 4; r++) CHECK(count_in(&b, 0, r, e) <= 1);
    }
    CHECK(balance_imbalance(&b, load, 0) == 1);
    balance_release(&b);
}

/* ---- after a loss ---- */

/* Checks that ranks kept what they held, and that there are no more slots than lost experts need. */
static void check_kept(const struct balance_out *old, const struct balance_out *b,
                       const int32_t *was)
{
    int32_t kept = 0, most_lost = 0;
    check(b, false);
    CHECK_EQ_INT(b->n_maps, old->n_maps);
    for (int32_t r = 0; r < b->n_ranks; r++) {
        const int32_t n = was[r] < 0 ? 0 : old->first[was[r] + 1] - old->first[was[r]];
        CHECK(b->first[r + 1] - b->first[r] >= n);
        for (int32_t m = 0; m < b->n_maps && n > 0; m++)
            CHECK(memcmp(map_of(b, m) + b->first[r], map_of(old, m) + old->first[was[r]],
                         (size_t)n * sizeof(int32_t)) == 0);
        kept += n;
    }
    for (int32_t m = 0; m < old->n_maps; m++) {
        int32_t lost = 0;
        for (int32_t e = 0; e < old->n_logical; e++) {
            int32_t n = 0;
            for (int32_t r = 0; r < b->n_ranks; r++)
                n += was[r] < 0 ? 0 : count_in(old, m, was[r], e);
            lost += n == 0;
        }
        most_lost = lost > most_lost ? lost : most_lost;
    }
    CHECK_EQ_INT(b->n_physical, kept + most_lost);
}

/* Some of n ranks in any order, and newcomers. */
static int32_t draw_members(int32_t n, int32_t *was)
{
    int32_t order[RANKS_MAX], ranks = 0;
    for (int32_t r = 0; r < n; r++) order[r] = r;
    for (int32_t r = 0; r < n; r++) {
        const int32_t other = (int32_t)draw((uint64_t)n), t = order[r];
        order[r] = order[other];
        order[other] = t;
    }
    const int32_t stay = (int32_t)draw((uint64_t)n + 1);
    for (int32_t r = 0; r < stay; r++) was[ranks++] = draw(8) == 0 ? -1 : order[r];
    if (ranks == 0 || draw(3) == 0) was[ranks++] = -1;
    return ranks;
}

TEST(keep_moves_nothing_that_a_rank_holds)
{
    for (int i = 0; i < 2000; i++) {
        enum { MAPS_N = 3 };
        const int32_t n = 1 + (int32_t)draw(40), ranks = 1 + (int32_t)draw(9),
                      redundant = (int32_t)draw(12), maps = 1 + (int32_t)draw(MAPS_N);
        uint64_t load[MAPS_N * 40];
        for (int32_t m = 0; m < maps; m++) draw_load(load + m * n, n);
        struct balance_out b = draw(2) ? balance_eplb(load, maps, n, ranks, 1, 1, redundant)
                                       : balance_even(n, ranks, redundant);
        for (int lost = 0; lost < 3; lost++) { /* one loss after the other */
            int32_t was[RANKS_MAX];
            const int32_t left = draw_members(b.n_ranks, was);
            struct balance_out next = balance_keep(&b, left, was, draw(2) ? load : NULL);
            check_kept(&b, &next, was);
            balance_release(&b);
            b = next;
        }
        balance_release(&b);
    }
}

TEST(keep_gives_lost_experts_to_the_ranks_with_the_least)
{
    const int32_t was[] = { 2, 0, -1 }, all[] = { 0, 1, 2 }, without_2[] = { 0, 1 };
    const uint64_t load[9] = { 50, 50, 50, 7, 90, 7, 5, 5, 5 };
    struct balance_out old = balance_even(9, 3, 0);
    struct balance_out b = balance_keep(&old, 3, was, NULL); /* rank 1 is lost, one is new */
    CHECK_EQ_INT(b.first[3] - b.first[2], 3);                /* the newcomer had the fewest */
    CHECK_EQ_INT(count_in(&b, 0, 2, 3) + count_in(&b, 0, 2, 4) + count_in(&b, 0, 2, 5), 3);
    balance_release(&b);
    b = balance_keep(&old, 3, all, load); /* nobody is lost */
    CHECK_EQ_INT(b.n_physical, 9);
    CHECK(memcmp(b.logical, old.logical, 9 * sizeof(int32_t)) == 0);
    balance_release(&b);
    b = balance_keep(&old, 2, was, load); /* of ranks 2, with 15 rows, and 0, with 150 */
    CHECK_EQ_INT(b.first[1], 6);
    balance_release(&b);
    b = balance_keep(&old, 2, without_2, NULL); /* 3 experts for 2 ranks */
    CHECK_EQ_INT(b.first[1], 5);
    balance_release(&b);
    balance_release(&old);
}

/* Layers that lost fewer experts than others have copies of the hot ones in the slots left. */
TEST(keep_fills_slots_that_a_layer_does_not_need)
{
    const int32_t was[] = { 0, 1 };
    const uint64_t load[12] = { 1, 1, 1, 1, 1, 9, 9, 1, 1, 1, 1, 1 };
    int32_t first[] = { 0, 3, 6, 9 },
            logical[] = { 0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 5, 5 };
    const struct balance_out old = { 2, 3, 6, 9, first, logical };
    struct balance_out b = balance_keep(&old, 2, was, load); /* layer 1 has lost expert 5 */
    check_kept(&old, &b, was);
    CHECK_EQ_INT(b.n_physical, 7);
    CHECK_EQ_INT(count_copies(&b, 1, 5), 1);
    const int32_t r = b.first[1] == 4 ? 0 : 1; /* the rank with the slot more */
    CHECK_EQ_INT(map_of(&b, 0)[b.first[r] + 3], r == 0 ? 5 : 0);
    balance_release(&b);
}

TEST_MAIN(CASE(even_is_contiguous_and_copies_are_elsewhere),
          CASE(eplb_is_as_good_as_the_published_example),
          CASE_T(eplb_is_within_a_third_of_the_optimum, 300),
          CASE_T(eplb_by_host_is_within_a_third_of_the_optimum, 120),
          CASE(eplb_evens_a_skewed_load_out), CASE(eplb_of_no_load_spreads_copies),
          CASE_T(keep_moves_nothing_that_a_rank_holds, 120),
          CASE(keep_gives_lost_experts_to_the_ranks_with_the_least),
          CASE(keep_fills_slots_that_a_layer_does_not_need))
