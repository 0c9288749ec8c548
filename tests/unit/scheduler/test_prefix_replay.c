/* test_prefix_replay.c - a short trace of conversations, replayed over simulated nodes: the table
 * finds nearly what is found when every cache is known. tests/perf/bench_prefix.c replays long
 * ones. */
#include "tests/fixtures/prefix_replay.h"
#include "tests/harness/test.h"

static struct replay_result run(const struct trace *t, enum replay_policy policy,
                                uint32_t n_prefill, uint32_t blocks)
{
    const struct replay_options o = { .policy = policy,
                                      .n_prefill = n_prefill,
                                      .n_decode = 1,
                                      .prefill_blocks = blocks,
                                      .divide = 1,
                                      .block_tokens = 64,
                                      .busy = 0.9,
                                      .times = 1,
                                      .token_s = 0.03,
                                      .seed = 1 };
    return replay_run(t, &o);
}

static void compare(uint32_t n_prefill, uint32_t blocks)
{
    struct trace t;
    CHECK(trace_read(test_data("traces/sessions.jsonl"), SIZE_MAX, &t));
    const struct replay_result load = run(&t, REPLAY_LOAD, n_prefill, blocks),
                               table = run(&t, REPLAY_TABLE, n_prefill, blocks),
                               known = run(&t, REPLAY_KNOWN, n_prefill, blocks);
    printf("%u nodes with %u blocks: load alone %.3f, prefix table %.3f, every cache known %.3f\n",
           n_prefill, blocks, load.hit, table.hit, known.hit);
    CHECK(table.hit >= 0.9 * known.hit);
    CHECK(table.hit > 1.2 * load.hit);
    CHECK(table.expected > 0.8 * table.hit && table.expected < 1.1 * table.hit);
    CHECK(table.ttft_s < load.ttft_s);
    trace_release(&t);
}

TEST(replay_four_nodes_that_hold_much) { compare(4, 1000); }

TEST(replay_eight_nodes_that_hold_little) { compare(8, 150); }

TEST_MAIN(CASE_T(replay_four_nodes_that_hold_much, 60),
          CASE_T(replay_eight_nodes_that_hold_little, 60))
