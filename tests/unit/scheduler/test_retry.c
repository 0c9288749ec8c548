/* test_retry.c - every cell of the recovery table, and which loss each status stands for. */
#include <string.h>

#include "scheduler/retry.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* One letter per loss, in the order of enum request_loss: Ignore, reQueue, Move, Fail. Derived from
 * what each state still needs, not copied from the table. */
static const struct {
    enum request_state state;
    const char *name, *actions;
} WANT[] = {
    /* No node has anything of it yet: only the request itself can fail. */
    { REQUEST_PLACING, "placing", "IIIIFII" },
    /* Both nodes are needed; a busy node is no loss. */
    { REQUEST_CREDIT, "credit", "MMQMFMM" },
    { REQUEST_RESERVE, "reserve", "MMQMFMM" },
    { REQUEST_PREFILL, "prefill", "MMQMFMM" },
    /* The prefill node is done; a refusal in mid-answer needs another node. */
    { REQUEST_DECODE, "decode", "IMMMFMM" },
    /* One node does both: there is no prefill node to lose. */
    { REQUEST_RUN, "run", "IMQMFMM" },
    { REQUEST_ENDED, "ended", "IIIIIII" },
};

static char letter(enum request_action a)
{
    switch (a) {
    case ACTION_IGNORE: return 'I';
    case ACTION_REQUEUE: return 'Q';
    case ACTION_MOVE: return 'M';
    case ACTION_FAIL: return 'F';
    }
    return '?';
}

TEST(every_cell_is_as_written_down)
{
    CHECK_EQ_INT(COUNT_OF(WANT), REQUEST_N_STATES);
    for (size_t i = 0; i < COUNT_OF(WANT); i++) {
        CHECK_EQ_INT(strlen(WANT[i].actions), REQUEST_N_LOSSES);
        CHECK_EQ_STR(request_state_name(WANT[i].state), WANT[i].name);
        for (int loss = 0; loss < REQUEST_N_LOSSES; loss++)
            if (letter(retry_action(WANT[i].state, (enum request_loss)loss)) !=
                WANT[i].actions[loss])
                test_fail(__FILE__, __LINE__, "state %s, loss %d: action %c, not %c", WANT[i].name,
                          loss, letter(retry_action(WANT[i].state, (enum request_loss)loss)),
                          WANT[i].actions[loss]);
    }
}

TEST(every_status_stands_for_one_loss)
{
    static const struct {
        enum status st;
        enum request_loss loss;
    } want[] = {
        { ERR_BUSY, LOSS_BUSY },
        { ERR_FULL, LOSS_BUSY },
        { ERR_UNAVAILABLE, LOSS_BUSY },
        { ERR_INVALID, LOSS_REQUEST },
        { ERR_TOO_LONG, LOSS_REQUEST },
        { ERR_NOT_FOUND, LOSS_REQUEST },
        { ERR_UNSUPPORTED, LOSS_REQUEST },
        { ERR_FORMAT, LOSS_REQUEST },
        { ERR_UNAUTHORIZED, LOSS_REQUEST },
        { ERR_TIMEOUT, LOSS_PEER },
        { ERR_CANCELED, LOSS_PEER },
        { ERR_NOMEM, LOSS_PEER },
        { ERR_PEER_LOST, LOSS_PEER },
        { ERR_PEER_REFUSED, LOSS_PEER },
        { ERR_PEER_MISMATCH, LOSS_PEER },
        { ERR_STALE, LOSS_PEER },
        { ERR_CHECKSUM, LOSS_PEER },
        { ERR_IO, LOSS_PEER },
        { ERR_NODEV, LOSS_NODE },
        { ERR_CONFIG, LOSS_NODE },
        { ERR_INTERNAL, LOSS_NODE },
    };
    for (size_t i = 0; i < COUNT_OF(want); i++)
        if (retry_loss_of(want[i].st) != want[i].loss)
            test_fail(__FILE__, __LINE__, "%s is loss %d, not %d", status_name(want[i].st),
                      retry_loss_of(want[i].st), want[i].loss);
    /* An unknown status of a newer peer is that node's trouble, not the request's. */
    CHECK_EQ_INT(retry_loss_of((enum status) - 9999), LOSS_NODE);
}

TEST_MAIN(CASE(every_cell_is_as_written_down), CASE(every_status_stands_for_one_loss))
