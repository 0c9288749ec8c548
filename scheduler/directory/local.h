/* local.h - direct calls into a `local` directory, for the directory server (server.h).
 *
 * They take effect and answer at once. `d` must be a directory of backend "local". A reservation is
 * named by placement.request: for this process's own requests the request's id, for those of other
 * processes an id that their entry node made. Thread: loop. */
#ifndef BATON_SCHEDULER_DIRECTORY_LOCAL_H
#define BATON_SCHEDULER_DIRECTORY_LOCAL_H

#include "scheduler/directory/directory.h"

bool directory_is_local(const struct directory *d);
/* ERR_FULL: DIRECTORY_NODES_MAX others are alive. */
enum status directory_local_publish(struct directory *d, const struct node_record *r) MUST_CHECK;
void directory_local_leave(struct directory *d, uint64_t node);
/* Extends the reservations of entry node `owner` (not 0) by a lease: it was heard from. */
void directory_local_renew_owner(struct directory *d, uint64_t owner);
/* Makes the next fencing numbers greater than `seen`. */
void directory_local_raise_fence(struct directory *d, uint64_t seen);
/* As directory_reserve, for `owner` (0: this process, whose reservations need no lease). ERR_BUSY,
 * ERR_NOT_FOUND; ERR_FULL: too many reservations. */
enum status directory_local_reserve(struct directory *d, const struct placement *p, uint64_t owner,
                                    struct directory_placed *placed) MUST_CHECK;
void directory_local_computed(struct directory *d, uint64_t id);
void directory_local_release(struct directory *d, uint64_t id);
/* As directory_meter, for any topic; sums [r->n_uses] is what out->sums points to. ERR_FULL: err
 * has the sentence. */
enum status directory_local_meter(struct directory *d, const char *topic,
                                  const struct meter_report *r, struct meter_sum *sums,
                                  struct meter_sums *out, struct err *err) MUST_CHECK;
/* Returns the live nodes of `topic` with their placed load (mem_free), and the text of all
 * topics. */
struct node_record *directory_local_view(struct directory *d, const char *topic, size_t *n,
                                         char topics[512]);

#endif
