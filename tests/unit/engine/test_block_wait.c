/* test_block_wait.c - how long a sequence waits for blocks, by what the running ones may still
 * generate. */
#include "shared/engine/block_wait.h"

#include "shared/base/mem.h"
#include "tests/harness/test.h"

TEST(block_wait_is_nothing_when_there_are_enough)
{
    struct block_holder h[] = { { 5, 100 } };
    CHECK_EQ_INT(block_wait_steps(h, 1, 4, 4, 16), 0);
    CHECK_EQ_INT(block_wait_steps(NULL, 0, 0, 4, 16),
                 0); /* nobody gives any back: at once, or never */
}

TEST(block_wait_ends_with_the_sequences_that_free_enough)
{
    struct block_holder h[] = { { 6, 90 }, { 2, 10 }, { 3, 30 } };
    CHECK_EQ_INT(block_wait_steps(h, 3, 0, 1, 16), 10);
    struct block_holder again[] = { { 6, 90 }, { 2, 10 }, { 3, 30 } };
    /* After 10 steps two blocks are back, and the two that run on may have taken one between them;
     * after 30 five, less the one that the last has taken. */
    CHECK_EQ_INT(block_wait_steps(again, 3, 0, 3, 16), 30);
    CHECK_EQ_INT(block_wait_steps(again, 3, 0, 4, 16), 30);
    CHECK_EQ_INT(block_wait_steps(again, 3, 0, 5, 16), 90);
    CHECK_EQ_INT(block_wait_steps(again, 3, 2, 6, 16), 30);
}

TEST(block_wait_for_more_than_all_have_is_until_all_have_ended)
{
    struct block_holder h[] = { { 1, 4000000000u }, { 1, 7 } };
    CHECK_EQ_INT(block_wait_steps(h, 2, 0, 100, 1), 4000000000u);
}

TEST_MAIN(CASE(block_wait_is_nothing_when_there_are_enough),
          CASE(block_wait_ends_with_the_sequences_that_free_enough),
          CASE(block_wait_for_more_than_all_have_is_until_all_have_ended))
