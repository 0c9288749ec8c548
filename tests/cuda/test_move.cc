/* test_move.cc - rows that move by drafts that were right: after it, an uploaded step is the one that
 * the host would have uploaded if it had known. And which drafts are right. */
#include <stdlib.h>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/inputs/move_rows.h"
#include "tests/cuda/device_case.h"

/* Fixed numbers, the same on all machines. */
struct numbers {
    uint64_t state;
    uint32_t below(uint32_t n)
    {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (uint32_t)(state >> 33) % n;
    }
};

template <class T> static std::vector<T> back(const device_bytes &from, size_t n)
{
    std::vector<T> v(n);
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaMemcpy(v.data(), from.p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}

/* ---- lists ---- */

enum { BLOCK = 16, N_ACCEPTED = 40, MOST = 8 };

/* Sequences of which some move, as the host uploads them, and as they are. */
struct moving_list {
    std::vector<std::vector<int32_t>> tables;
    std::vector<attn_seq> before, after;
    std::vector<kernel_move> moves;
    std::vector<int32_t> accepted;
    int32_t n_rows = 0;
    bool is_alone = true;

    void add(numbers &r, bool is_decode, int32_t n_q, int32_t pos)
    {
        attn_seq s = { n_rows, n_q, pos, nullptr, is_decode, 0, 0 };
        uint32_t by = 0;
        if (is_decode && r.below(3) > 0) {
            kernel_move m = {};
            m.by[0] = r.below(4) > 0 ? 1 + r.below(N_ACCEPTED) : 0;
            m.by[1] = r.below(2) ? 1 + r.below(N_ACCEPTED) : 0;
            moves.push_back(m);
            s.move = (uint32_t)moves.size(), s.n_most = 2 * MOST;
            for (uint32_t i : m.by) by += i ? (uint32_t)accepted[i - 1] : 0;
        }
        before.push_back(s);
        s.pos_begin += (int32_t)by, s.move = 0, s.n_most = 0;
        after.push_back(s);
        n_rows += n_q;
        is_alone &= n_q == 1 && is_decode;
    }
    moving_list(uint64_t seed, int32_t rows_of_seq, bool has_prompts, int32_t pos_max)
    {
        numbers r = { seed };
        for (int i = 0; i < N_ACCEPTED; i++) accepted.push_back((int32_t)r.below(MOST + 1));
        for (uint32_t n = 1 + r.below(40); n > 0; n--)
            add(r, true, 1 + (int32_t)r.below((uint32_t)rows_of_seq),
                (int32_t)r.below((uint32_t)pos_max));
        for (uint32_t n = has_prompts ? 1 + r.below(3) : 0; n > 0; n--)
            add(r, false, 1 + (int32_t)r.below(500), (int32_t)r.below(2000));
        for (size_t i = 0; i < before.size(); i++) { /* some begin with the same blocks */
            const size_t n = (size_t)(pos_max + 4000) / BLOCK;
            std::vector<int32_t> table(n);
            const size_t n_same = i > 0 && r.below(2) ? r.below((uint32_t)n) : 0;
            for (size_t k = 0; k < n; k++)
                table[k] = k < n_same ? tables[i - 1][k] : (int32_t)(i * n + k);
            tables.push_back(table);
        }
        for (size_t i = 0; i < before.size(); i++)
            before[i].block_table = after[i].block_table = tables[i].data();
    }
};

static void check_list(const moving_list &l, bool is_large)
{
    std::vector<cuda_attn_row> rows((size_t)l.n_rows), want((size_t)l.n_rows);
    cuda_attn_counts bounds, counts;
    attention_list_rows(&bounds, l.before.data(), (int32_t)l.before.size(), BLOCK, is_large,
                        rows.data());
    attention_list_rows(&counts, l.after.data(), (int32_t)l.after.size(), BLOCK, is_large,
                        want.data());
    CHECK(attention_fits_capture(&bounds, &counts));
    for (cuda_attn_row &row : rows)
        row.n_old = (int32_t)l.before[(size_t)row.seq].move, row.table = 7;
    const device_bytes on_rows(rows), on_counts(&bounds, sizeof bounds), moves(l.moves),
        accepted(l.accepted);
    const attention_move_call call = { (cuda_attn_row *)on_rows.p,
                                       (cuda_attn_counts *)on_counts.p,
                                       bounds.n_rows,
                                       bounds.n_decode,
                                       (const kernel_move *)moves.p,
                                       (const int32_t *)accepted.p,
                                       is_large,
                                       l.is_alone };
    GOOD(attention_move_rows(nullptr, &call));
    const std::vector<cuda_attn_row> got = back<cuda_attn_row>(on_rows, rows.size());
    for (size_t i = 0; i < got.size(); i++) {
        CHECK_EQ_INT(got[i].row, want[i].row);
        CHECK_EQ_INT(got[i].pos, want[i].pos);
        CHECK_EQ_INT(got[i].seq, want[i].seq);
        CHECK_EQ_INT(got[i].segment, want[i].segment);
        CHECK_EQ_INT(got[i].per_segment, want[i].per_segment);
        CHECK_EQ_INT(got[i].n_old, want[i].n_old);
        CHECK_EQ_INT(got[i].table, 7);
        /* with another sequence a row may share more than the host knew */
        CHECK(got[i].shared >= 0 && got[i].shared <= want[i].shared);
        if (i > 0 && got[i].seq == got[i - 1].seq) CHECK_EQ_INT(got[i].shared, want[i].shared);
    }
    const cuda_attn_counts now = back<cuda_attn_counts>(on_counts, 1)[0];
    CHECK_EQ_INT(now.n_segments, counts.n_segments);
    CHECK_EQ_INT(now.n_segments_decode, counts.n_segments_decode);
    CHECK_EQ_INT(now.n_keys_max, counts.n_keys_max);
    CHECK_EQ_INT(now.n_keys_prefill, counts.n_keys_prefill);
    CHECK_EQ_INT(now.n_rows, counts.n_rows);
}

TEST(lists_are_numbered_as_if_the_host_had_known)
{
    need_gpu();
    for (uint64_t seed = 0; seed < 12; seed++)
        for (int32_t pos_max : { 40, 700, 8300, 40000 }) { /* segments grow from 8,192 keys on */
            check_list(moving_list(seed, 1, false, pos_max), seed % 2);
            check_list(moving_list(seed + 100, 9, false, pos_max), seed % 3 == 0);
            check_list(moving_list(seed + 200, 9, true, pos_max), false);
        }
}

/* ---- rows ---- */

TEST(rows_move_by_both_numbers)
{
    need_gpu();
    const std::vector<int32_t> accepted = { 2, 0, 5, 1 };
    std::vector<kernel_move> moves(3);
    moves[0] = { 0, 2, { 1, 0 }, 1, 0, 0, 0 }; /* a step's: its token, too */
    moves[1] = { 2, 1, { 3, 4 }, 0, 4, 0, 0 }; /* a chained pass's */
    moves[2] = { 3, 3, { 0, 0 }, 0, 0, 1, 1 }; /* of a pass only the row that chooses */
    std::vector<sample_row_params> params(2);
    params[0].index = 4, params[0].after = 3, params[0].n_chosen = 1;
    params[1].index = 6, params[1].after = 1;
    const device_bytes on_moves(moves), on_accepted(accepted),
        ids(std::vector<int32_t>{ -11, 8, 7, 7, 7, 7, 7 }),
        pos(std::vector<int32_t>{ 10, 11, 20, 30, 31, 32, 40 }),
        from(std::vector<int32_t>{ 0, 1, 2, 3, 4, 5, 6 }), logits(std::vector<int32_t>{ 0, 3 }),
        on_params(params);
    const move_rows_call call = { (const kernel_move *)on_moves.p,
                                  3,
                                  2,
                                  (const int32_t *)on_accepted.p,
                                  (int32_t *)ids.p,
                                  (int32_t *)pos.p,
                                  (int32_t *)from.p,
                                  (int32_t *)logits.p,
                                  (sample_row_params *)on_params.p };
    GOOD(move_rows(nullptr, &call));
    CHECK((back<int32_t>(ids, 7) == std::vector<int32_t>{ -13, 8, 7, 7, 7, 7, 7 }));
    CHECK((back<int32_t>(pos, 7) == std::vector<int32_t>{ 12, 13, 26, 30, 31, 32, 40 }));
    CHECK((back<int32_t>(from, 7) == std::vector<int32_t>{ 0, 1, 3, 3, 4, 5, 6 }));
    CHECK((back<int32_t>(logits, 2) == std::vector<int32_t>{ 0, 5 }));
    const std::vector<sample_row_params> got = back<sample_row_params>(on_params, 2);
    CHECK(got[0].index == 9 && got[0].n_chosen == 6 && got[1].index == 8 && got[1].n_chosen == 0);
}

/* ---- which drafts are right ---- */

/* Three sequences with three, no and two drafts, which are known, or kept; and a row of a prompt. */
TEST(drafts_are_right_up_to_the_first_wrong_one)
{
    need_gpu();
    std::vector<sample_row_params> params(9);
    params[0].n_verify = 3, params[6].n_verify = 2;
    const std::vector<int32_t> logit_rows = { 0, 1, 2, 3, 4, 5, 6, 7, 8 };
    /* chosen by rows 0.., then what passes keep */
    const std::vector<int32_t> kept = { 21, 22, 99, 24, 5, 6, 31, 32, 33, 22, 31, 32 };
    const std::vector<int32_t> ids = { 1, 21, -10, 23, 2, 3, 4, -11, -12 };
    const device_bytes on_params(params), on_rows(logit_rows), on_kept(kept), on_ids(ids),
        accepted(std::vector<int32_t>(9, -7));
    const sample_verify_call call = { (const sample_row_params *)on_params.p,
                                      9,
                                      (const int32_t *)on_ids.p,
                                      (const int32_t *)on_rows.p,
                                      (const int32_t *)on_kept.p,
                                      (int32_t *)accepted.p };
    GOOD(sample_verify(nullptr, &call));
    const std::vector<int32_t> got = back<int32_t>(accepted, 9);
    CHECK_EQ_INT(got[0], 2); /* the third, 23, is not 99 */
    CHECK_EQ_INT(got[4], 0);
    CHECK_EQ_INT(got[6], 2);
}

TEST_MAIN(CASE_T(lists_are_numbered_as_if_the_host_had_known, 120), CASE(rows_move_by_both_numbers),
          CASE(drafts_are_right_up_to_the_first_wrong_one))
