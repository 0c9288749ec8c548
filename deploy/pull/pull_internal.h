/* pull_internal.h - the state of a pull, for pull.c (the order of things) and pull_files.c (what is
 * fetched) only. Thread: main. */
#ifndef BATON_DEPLOY_PULL_PULL_INTERNAL_H
#define BATON_DEPLOY_PULL_PULL_INTERNAL_H

#include <signal.h>

#include "deploy/pull/fetch/fetch.h"
#include "deploy/pull/pull.h"

struct pull_stop {
    int fd; /* readable when a signal came */
    sigset_t before;
};

struct pull {
    const struct pull_options *o;
    struct pull_source source;
    struct buf source_name; /* of the marker: the same for every mirror of a hub */
    struct model_hub hub;   /* of a repository */
    struct pull_folder folder;
    struct file_list list;
    struct fetch *fetch;
    struct pull_stop stop;
    struct progress progress;
    uint64_t n_fetched; /* bytes that had to come, so far */
};

/* Brings the chosen files: afterwards each is whole and checked, at its place or in the folder's
 * staging. Of a checkpoint with an index that first, since it decides about the shards. */
enum status pull_files(struct pull *p, struct err *err) MUST_CHECK;

#endif
