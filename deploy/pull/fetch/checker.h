/* checker.h - threads that hash files and bring them to the disk while the network goes on.
 *
 * A part's jobs are done one after the other, in the order in which they were posted; parts are
 * divided among the threads. Every job gets exactly one result, also after a stop.
 * Life cycle: checker_create, checker_post and checker_take, checker_free once no job is left.
 * Thread: main. */
#ifndef BATON_DEPLOY_PULL_FETCH_CHECKER_H
#define BATON_DEPLOY_PULL_FETCH_CHECKER_H

#include "deploy/pull/fetch/part.h"

struct checker;

enum check_kind { CHECK_HASH, CHECK_SETTLE };

struct check_job {
    struct part *part;
    enum check_kind kind;
    uint64_t to;   /* CHECK_HASH: part_hash */
    char *journal; /* CHECK_SETTLE: part_settle; mem_free by the thread; NULL: none */
};

struct check_result {
    struct part *part;
    enum check_kind kind;
    enum status st;
    struct err err; /* when st is not OK */
};

/* `wake(arg)` is called on a checker's thread when there are results to take. NULL: no thread can
 * be started. */
struct checker *checker_create(void (*wake)(void *arg), void *arg);
/* Takes the job's journal in any case; the part's `hashing` or `settling` is set. */
void checker_post(struct checker *c, struct check_job *job);
/* Takes a result; the part's `hashing` or `settling` is cleared. False: none is there. */
bool checker_take(struct checker *c, struct check_result *out);
/* Sleeps until there is a result. */
void checker_wait(struct checker *c);
/* Waits for the jobs at work; those that hash end early. */
void checker_free(struct checker *c);

#endif
