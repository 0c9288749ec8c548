/* local_state.h - the struct of a `local` directory, for local.c and local_backend.c only.
 * Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_LOCAL_STATE_H
#define BATON_SCHEDULER_DIRECTORY_LOCAL_STATE_H

#include "scheduler/directory/local.h"
#include "shared/base/list.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/map.h"

struct directory_local {
    struct directory base;
    struct directory_options o;
    char topic[NODE_NAME_MAX];
    struct map nodes, loads, reservations, owners; /* by id */
    struct map meter_books;                        /* struct meter_book, by topic */
    struct map prefix_tables;                      /* struct prefix_table, by topic */
    struct list by_lease, by_end, owners_by_lease, calls;
    size_t n_calls;
    uint64_t fence;
    struct loop_timer *wake; /* NULL: no answer is due */
    bool answering, closed;
    struct gauge *m_nodes, *m_reservations;
    struct log_repeats refused_reports;
};

/* Empties nodes, owners, reservations, loads, meter books and prefix tables. */
void directory_local_drop_all(struct directory_local *d);

#endif
