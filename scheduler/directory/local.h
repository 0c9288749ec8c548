/* directory/local.h - the view itself, as the row `local` keeps it in this process and
 * directory_serve gives it to others.
 *
 * Direct calls for the holder's side: they take effect and answer at once. `d` is a directory of
 * row "local". A reservation is named by placement.request; the process's own ones by the request's
 * id, those of others by an id their entry made. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_LOCAL_H
#define BATON_SCHEDULER_DIRECTORY_LOCAL_H

#include "scheduler/directory/directory.h"

bool directory_is_local(const struct directory *d);
/* ERR_FULL: DIRECTORY_NODES_MAX others are alive. */
enum status directory_local_publish(struct directory *d, const struct node_record *r) MUST_CHECK;
void directory_local_leave(struct directory *d, uint64_t node);
/* The entry `owner` (not 0) was heard of: its reservations stand for another lease. */
void directory_local_renew_owner(struct directory *d, uint64_t owner);
/* Fencing numbers from now on are above `seen`. */
void directory_local_raise_fence(struct directory *d, uint64_t seen);
/* owner 0: this process, whose reservations need no lease. ERR_BUSY, ERR_NOT_FOUND; ERR_FULL: too
 * many reservations. */
enum status directory_local_reserve(struct directory *d, const struct placement *p, uint64_t owner,
                                    uint64_t *fence) MUST_CHECK;
void directory_local_release(struct directory *d, uint64_t id);
/* The live nodes of `topic` with their placed load, and the text of all topics. Returns an array
 * (mem_free). */
struct node_record *directory_local_view(struct directory *d, const char *topic, size_t *n,
                                         char topics[512]);

#endif
