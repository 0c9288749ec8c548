/* test_retry.c - every cell of the recovery table, and which loss each status stands for. */
#include <string.h>

#include "scheduler/retry.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* One letter per loss, in the order of enum request_loss: Ignore, reQueue, Move, Compute, Fail.
 * Derived from what each state still needs, not copied from the table. */
static const struct {
    enum request_state state;
    const char *name, *actions;
} WANT[] = {
    /* No node has anything of it yet: only the request itself can fail. */
    { REQUEST_PLACING, "placing", "IIIIIIIIII" },
    /* Both nodes are needed; one that is busy or gives the request back is no loss. Only a
     * reservation is answered at once, so nothing else is stuck after some time. */
    { REQUEST_CREDIT, "credit", "MMQMFMIMQI" },
    { REQUEST_RESERVE, "reserve", "MMQMFMMMQI" },
    { REQUEST_PREFILL, "prefill", "MMQMFMIMQI" },
    /* The prefill node is done; a refusal in mid-answer needs another node. */
    { REQUEST_DECODE, "decode", "IMMMFMIMQI" },
    /* One node does both: there is no prefill node to lose. */
    { REQUEST_RUN, "run", "IMQMFMIIQI" },
    /* Whatever happens to the node that may have kept the answer, it can be computed again. */
    { REQUEST_ATTACH, "attach", "ICIIIICIII" },
    { REQUEST_ENDED, "ended", "IIIIIIIIII" },
};

static char letter(enum request_action a)
{
    switch (a) {
    case ACTION_IGNORE: return 'I';
    case ACTION_REQUEUE: return 'Q';
    case ACTION_MOVE: return 'M';
    case ACTION_FAIL: return 'F';
    case ACTION_COMPUTE: return 'C';
    case ACTION_END:
    case ACTION_N: break;
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
        for (uint32_t blame = BLAME_UNSAID; blame <= BLAME_NODE; blame++)
            if (retry_loss_of(want[i].st, blame) != want[i].loss)
                test_fail(__FILE__, __LINE__, "%s is loss %s, not %s", status_name(want[i].st),
                          request_loss_name(retry_loss_of(want[i].st, blame)),
                          request_loss_name(want[i].loss));
    /* An unknown status of a newer peer is that node's trouble, not the request's; an unknown blame
     * is none. */
    CHECK_EQ_INT(retry_loss_of((enum status) - 9999, BLAME_UNSAID), LOSS_NODE);
    CHECK_EQ_INT(retry_loss_of(ERR_IO, BLAME_N), LOSS_PEER);
    CHECK_EQ_INT(retry_loss_of(ERR_IO, UINT32_MAX), LOSS_PEER);
}

TEST(a_pair_and_a_request_handed_back_are_losses_of_their_own)
{
    static const enum status troubles[] = { ERR_PEER_LOST, ERR_PEER_REFUSED, ERR_PEER_MISMATCH,
                                            ERR_CHECKSUM,  ERR_IO,           ERR_TIMEOUT,
                                            ERR_NOMEM,     ERR_INTERNAL };
    for (size_t i = 0; i < COUNT_OF(troubles); i++)
        CHECK_EQ_INT(retry_loss_of(troubles[i], BLAME_PAIR), LOSS_PAIR);
    CHECK_EQ_INT(retry_loss_of(ERR_FULL, BLAME_PAIR), LOSS_BUSY);
    CHECK_EQ_INT(retry_loss_of(ERR_BUSY, BLAME_HANDED_BACK), LOSS_HANDED_BACK);
    /* No other node serves a request that is itself at fault, whoever is blamed. */
    CHECK_EQ_INT(retry_loss_of(ERR_TOO_LONG, BLAME_PAIR), LOSS_REQUEST);
    CHECK_EQ_INT(retry_loss_of(ERR_INVALID, BLAME_HANDED_BACK), LOSS_REQUEST);
}

TEST(names_are_there_and_told_apart)
{
    for (int a = 0; a < REQUEST_N_LOSSES; a++)
        for (int b = 0; b < a; b++)
            CHECK(strcmp(request_loss_name((enum request_loss)a),
                         request_loss_name((enum request_loss)b)) != 0);
    CHECK_EQ_STR(request_loss_name(LOSS_PREFILL_NODE), "prefill_node");
    CHECK_EQ_STR(request_loss_name(LOSS_DIRECTORY), "directory");
    CHECK_EQ_STR(retry_action_name(ACTION_IGNORE), "ignore");
    CHECK_EQ_STR(retry_action_name(ACTION_COMPUTE), "compute");
    CHECK_EQ_STR(retry_action_name(ACTION_END), "end");
}

TEST(reasons_are_of_their_cells)
{
    CHECK(strstr(retry_reason(REQUEST_RUN, LOSS_PAIR), "there is none"));
    CHECK(strstr(retry_reason(REQUEST_CREDIT, LOSS_PAIR), "avoids the pair"));
    CHECK(strstr(retry_reason(REQUEST_ATTACH, LOSS_PAIR), "counts as lost"));
    CHECK(strstr(retry_reason(REQUEST_ATTACH, LOSS_DIRECTORY), "placing goes ahead"));
    CHECK(retry_reason(REQUEST_PLACING, LOSS_PAIR) == NULL);
    CHECK(retry_reason(REQUEST_ENDED, LOSS_HANDED_BACK) == NULL);
    CHECK(retry_reason(REQUEST_CREDIT, LOSS_PREFILL_NODE) == NULL);
}

TEST_MAIN(CASE(every_cell_is_as_written_down), CASE(every_status_stands_for_one_loss),
          CASE(a_pair_and_a_request_handed_back_are_losses_of_their_own),
          CASE(names_are_there_and_told_apart), CASE(reasons_are_of_their_cells))
