/* recovery_page.c - see recovery_page.h. */
#include "scheduler/recovery_page.h"

#include "scheduler/breaker.h"
#include "scheduler/pressure/pressure.h"
#include "scheduler/retry.h"
#include "scheduler/view.h"
#include "shared/base/mem.h"

static const char HEAD[] =
    "# What a failure does to a request\n"
    "\n"
    "A request belongs to its entry node, the one that the client talks to, and is there in\n"
    "one of the states below. A failure is a *loss*; one table says what the request does\n"
    "about each loss in each state. This page is printed by `baton docs recovery` from the\n"
    "tables that the program acts by; a test holds it against the program.\n"
    "\n"
    "## The table\n"
    "\n"
    "| action | what happens |\n"
    "|---|---|\n"
    "| ignore | the state does not depend on what was lost |\n"
    "| requeue | placed again after 50 ms; it costs no move |\n"
    "| move | a new attempt elsewhere at once, which continues behind the last token "
    "delivered |\n"
    "| compute | no node has kept the answer for a client that comes back ([resume.md]"
    "(resume.md)): it is a new request now, by the limits of its tenant and in line, as is one "
    "that nobody had before |\n"
    "| fail | the request ends with the error |\n"
    "\n"
    "A request moves at most %d times, then it fails with 503; after %d moves it is not\n"
    "split any more. Requeued for want of room, be it of places or of blocks, and without\n"
    "a token delivered for `--max-queue-time`, it fails with 429; being handed back by a\n"
    "node that leaves or changes its role begins that time anew. A loss after the last\n"
    "token ends the request well, whatever the cell says. No token is delivered twice, and\n"
    "none is left out, in any cell.\n"
    "\n";

static const char LOSSES[] =
    "\n"
    "| loss | what was lost |\n"
    "|---|---|\n"
    "| prefill_node, decode_node | the link to the node: its process is dead, frozen, or "
    "cannot be reached |\n"
    "| busy | a node refuses: it holds as many as it takes |\n"
    "| peer | a node reports trouble and does not say whose, or that it is nobody's |\n"
    "| request | the request itself is at fault; no other node can serve it |\n"
    "| node | a node reports that it cannot serve |\n"
    "| stuck | no answer within the time limit of the state |\n"
    "| pair | a prefill and a decode node that both live cannot exchange KV or messages |\n"
    "| handed_back | a node shuts down, changes its role, has no blocks, or has evicted the KV "
    "that it was chosen for, and gives the request back |\n"
    "| directory | Redis, or who else holds the view, cannot be reached when the request "
    "needs it |\n"
    "\n"
    "`baton_request_losses_total{state,loss,action}` counts what was done; besides the\n"
    "table's actions it has `end`: the answer was complete. The node that reports a failure\n"
    "says whom it blames (itself, the pair, nobody, or that it hands the request back); of\n"
    "a node of an older release, which does not say, the status decides, and the node is\n"
    "avoided.\n"
    "\n"
    "Why, where state and loss do not say it:\n"
    "\n";

static const char BREAKERS[] =
    "\n"
    "## Nodes and pairs that fail\n"
    "\n"
    "Each entry node keeps a breaker for every node, and every pair of nodes, that failed.\n"
    "While it is open no request is placed there; when its pause is over one request probes\n"
    "it, and all others go elsewhere until that one has a token. So a pair whose data path\n"
    "is cut costs the requests that are on it when that is noticed, and then one for each\n"
    "pause: %d s, and twice as long each time, at most %d s.\n"
    "`baton_breaker_transitions_total{scope,to}` counts the changes.\n"
    "\n";

static const char BREAKERS_END[] =
    "\n"
    "*Failed*: one request or transfer went wrong (a checksum, say); %d in a row are as if\n"
    "it were broken. *Broken*: lost, refused, not compatible, or without progress for its\n"
    "time limit. *Worked*: the first token of an attempt came. *Taken*: a request is placed\n"
    "there. *Given up*: the request that probed it ended for another reason. Failures of\n"
    "requests that were placed before the breaker opened change nothing, as does the end\n"
    "of answers that had begun. At most %d are kept: one that is closed is forgotten first,\n"
    "then the open one whose pause ends first, one that is being probed never. What is known\n"
    "of a node that the directory does not list any more is kept for %d s, since a directory\n"
    "that lost its records lists the nodes again.\n"
    "\n"
    "A node whose link was lost has an open breaker, and is not chosen before its link is\n"
    "up again, however long the directory lists it or cannot be reached; it is dialed every\n"
    "second. When there is no other node for a second, requests do not wait for the probe\n"
    "of one that has a link.\n"
    "\n"
    "While the directory cannot be reached nobody counts what all entry nodes together have\n"
    "placed, nor says what of it has ended. %.1f s after its last answer an entry node counts\n"
    "its own placements and nothing else, so that no request waits in line for load that may\n"
    "long be over. What a node gets too much meanwhile waits there or is handed back.\n"
    "\n"
    "## Two attempts at once\n"
    "\n"
    "A request is sent to two nodes at once (hedging) only where its client asks for it:\n"
    "with the header `x-baton-hedge-ms: N`, 1 to 60000. When a sequence of it has no token\n"
    "N ms after it was placed, a second attempt at it starts on other nodes. Time in line\n"
    "is no node's fault and does not count. Whichever has the first token goes on with the\n"
    "answer, and the other is cancelled at once on all its nodes. On the CPU, and on GPUs\n"
    "with `--deterministic`, both would give the same answer bit for bit.\n"
    "\n"
    "* A sequence has one second attempt at most, on none of the first one's nodes nor on\n"
    "  those that failed it before. It begins only where there is room that nobody wants at\n"
    "  that moment: while all other nodes are full, somebody waits in line, or the tenant\n"
    "  has no tokens for the prompt beside what its refused requests were promised, the\n"
    "  first stays alone. So the second never waits, nor goes before anybody who does; who\n"
    "  comes while it runs finds its place taken.\n"
    "* An attempt that loses something in the race leaves it to the other one, whatever the\n"
    "  table above says. The one that is left is a request as any, and is moved as any.\n"
    "  In the next section each of the two is a request: neither waits for the other.\n"
    "* The tenant pays for the prompt twice, from when the second has its nodes. The second\n"
    "  attempt is no request: neither `requests_per_minute` and `concurrent` nor\n"
    "  `--max-concurrency` count it.\n"
    "* A request that looks for a kept answer ([resume.md](resume.md)) is not hedged; one\n"
    "  whose second attempt goes on is resumed at that one's nodes. A trace says in `hedged`\n"
    "  which attempt answered, `first` or `second`; without a second one it has no such\n"
    "  member.\n"
    "* `baton_hedges_total{outcome}` counts the sequences that were due for a second attempt:\n"
    "  which one went on, or `none`: no second began, since no other node had room or the\n"
    "  first was just sooner, or there was no token.\n"
    "\n"
    "## Why nodes do not wait for each other\n"
    "\n"
    "A deadlock needs requests in a circle, each of which holds memory on one node and\n"
    "waits for memory that the next one holds. Here such waits have an order, and whatever\n"
    "would have to wait outside of it is refused instead.\n"
    "\n"
    "| state | holds KV blocks on | waits for | until |\n"
    "|---|---|---|---|\n";

/* What a request has on other nodes, state by state, in the order in which it takes it. */
static const struct {
    enum request_state state;
    const char *holds, *waits, *until;
} HOLDS[] = {
    { REQUEST_ATTACH, "no node; a sequence that a decode node has kept goes on there as in decode",
      "the answers of nodes that may have kept it",
      "0.1 s, or 0.5 s for the node that its client names, seen and linked or not; where it may "
      "not be computed again 10 s more, or until the links to those that were asked are lost" },
    { REQUEST_PLACING, "no node", "its turn in line, then a node with room, by the view",
      "`--max-queue-time`, or `--placement-timeout` from when there was no node; until then it "
      "keeps its place in line" },
    { REQUEST_CREDIT, "no node (its place is counted in the directory)",
      "a start credit: the prompts before it in the prefill node's line",
      "`--scheduler-ttl`; the line moves, since prompts with a credit wait only for what follows, "
      "and a credit that is not used ends after 15 s" },
    { REQUEST_RESERVE, "no node (the credit is its only hold)",
      "the decode node's answer: blocks, or that there are none",
      "5 s; the decode node never queues a reservation" },
    { REQUEST_PREFILL,
      "the decode node, for the whole prompt; the prefill node, for what is computed",
      "the prefill engine's steps, and the transfer",
      "progress: the engine's is watched, bytes that do not move end the transfer within 3 s, an "
      "unanswered OPEN or FINISH within 5 s, a first token that is lost within 3 s" },
    { REQUEST_DECODE, "the decode node", "the decode engine's steps, and its own node's blocks",
      "progress; when blocks run out the engine takes those of the newest sequence, which waits "
      "for others without holding any, or goes on elsewhere (below)" },
    { REQUEST_RUN, "one node", "that node's steps and blocks", "as in decode" },
    { REQUEST_ENDED, "nothing, once the transfer is fenced", "nothing", "-" },
};

static const char END[] =
    "\n"
    "In words:\n"
    "\n"
    "1. Until it is in *prefill* a request holds no block anywhere: a reservation is\n"
    "   granted whole or refused at once.\n"
    "2. In *prefill* its prompt enters the prefill engine with all the blocks that it will\n"
    "   need there, or waits outside and holds none; it is never preempted. So the blocks\n"
    "   that prompts hold in an engine come back after some steps and a transfer, for which\n"
    "   the decode node has the room already: the grant says which blocks.\n"
    "3. In *decode* and *run* a sequence that needs one more block takes those of the\n"
    "   newest sequence of its own node, which may be itself, and which then waits there\n"
    "   and holds none, or is handed back and placed anew, holding none either. None takes\n"
    "   the blocks of the oldest that runs there, so that one ends; and a request is handed\n"
    "   back at most %d times for want of blocks, so none is sent around for ever.\n"
    "4. So only blocks that are granted, and whose prompt waits outside a prefill engine,\n"
    "   wait for another node. They are on the decode node, and wait for the pool of the\n"
    "   prefill node. Of a node with the role prefill no block is ever granted, and a\n"
    "   decode node prefills for no other; of two mixed nodes the one with the lower number\n"
    "   prefills (`place.c`). Along such waits the roles go from decode to mixed to\n"
    "   prefill, and the numbers of mixed nodes go down: there is no cycle.\n"
    "5. A role may change while a node runs (`baton role`). AskCredit and Reserve tell the\n"
    "   role for which the node was chosen, and a node that has another one by now hands\n"
    "   the request back. After a change it takes no reservation while a credit of a role\n"
    "   before is out, and gives no credit while a grant of a role before waits. So of what\n"
    "   waits by two roles of a node either nothing waits for its pool, or it waits for no\n"
    "   other's, and it is in no cycle; all else waits by one role of each node, in the\n"
    "   order of 4. A decode node that becomes mixed goes on to be sent KV at once.\n"
    "6. A prompt that waits for KV from a tier or a peer holds its blocks, as one that is\n"
    "   computed; it waits for copies, not for blocks. The peer lends what it has, and of\n"
    "   what only its tiers have as much as there are free blocks for, without waiting for\n"
    "   any. Both end by themselves: what has not come in time is computed.\n"
    "\n"
    "## When a node is short of blocks\n"
    "\n"
    "A decode node whose pool is used up takes the blocks of its newest sequence and tells\n"
    "that sequence's entry node how long it will wait: until enough of the others have\n"
    "ended, if each generates as much as it may, by the measured time of a step, and then\n"
    "until prompt and answer are computed again, by the measured speed of prompts. The\n"
    "entry node knows which other nodes report free blocks for all of it, and what their\n"
    "prompts in line and their speed make of it. It hands the request back (`handed_back`)\n"
    "where that is sooner, at most %d times, and looks again with each view of the nodes\n"
    "while the sequence waits; in doubt, and where a speed is not measured, it stays.\n"
    "`baton_preemptions_total{action}` at the entry node counts both, `recompute` and\n"
    "`hand_back`; `baton_engine_preemptions_total` counts sequences at their node. Both\n"
    "give the tokens that an undisturbed sequence would have given.\n";

static void write_table(struct buf *out)
{
    buf_add_c(out, "| state |");
    for (int loss = 0; loss < REQUEST_N_LOSSES; loss++)
        buf_printf(out, " %s |", request_loss_name((enum request_loss)loss));
    buf_add_c(out, "\n|---|");
    for (int loss = 0; loss < REQUEST_N_LOSSES; loss++) buf_add_c(out, "---|");
    buf_add_c(out, "\n");
    for (int s = 0; s < REQUEST_N_STATES; s++) {
        buf_printf(out, "| %s |", request_state_name((enum request_state)s));
        for (int loss = 0; loss < REQUEST_N_LOSSES; loss++) {
            enum request_action a = retry_action((enum request_state)s, (enum request_loss)loss);
            buf_printf(out, " %s |", a == ACTION_IGNORE ? "-" : retry_action_name(a));
        }
        buf_add_c(out, "\n");
    }
}

/* The states of one loss that have the same reason share a line. */
static void write_reason(enum request_loss loss, enum request_state first, struct buf *out)
{
    const char *why = retry_reason(first, loss);
    for (int s = 0; s < (int)first; s++)
        if (retry_reason((enum request_state)s, loss) == why) return; /* it has its line */
    if (!why) return;
    buf_printf(out, "| %s |", request_loss_name(loss));
    for (int s = first; s < REQUEST_N_STATES; s++)
        if (retry_reason((enum request_state)s, loss) == why)
            buf_printf(out, "%s %s", s == (int)first ? "" : ",",
                       request_state_name((enum request_state)s));
    buf_printf(out, " | %s |\n", why);
}

static void write_reasons(struct buf *out)
{
    buf_add_c(out, "| loss | in | why |\n|---|---|---|\n");
    for (int loss = 0; loss < REQUEST_N_LOSSES; loss++)
        for (int s = 0; s < REQUEST_N_STATES; s++)
            write_reason((enum request_loss)loss, (enum request_state)s, out);
}

void recovery_markdown(struct buf *out)
{
    buf_printf(out, HEAD, REQUEST_MOVES_MAX, REQUEST_SPLITS_MAX);
    write_table(out);
    buf_add_c(out, LOSSES);
    write_reasons(out);
    buf_printf(out, BREAKERS, BREAKER_PAUSE_MS / 1000, BREAKER_PAUSE_MAX_MS / 1000);
    breaker_markdown(out);
    buf_printf(out, BREAKERS_END, BREAKER_FAILURES, BREAKER_MAX, BREAKER_GONE_MS / 1000,
               VIEW_KNOWN_MS * 1e-3);
    for (size_t i = 0; i < COUNT_OF(HOLDS); i++)
        buf_printf(out, "| %s | %s | %s | %s |\n", request_state_name(HOLDS[i].state),
                   HOLDS[i].holds, HOLDS[i].waits, HOLDS[i].until);
    buf_printf(out, END, PRESSURE_HAND_BACKS_MAX, PRESSURE_HAND_BACKS_MAX);
}
