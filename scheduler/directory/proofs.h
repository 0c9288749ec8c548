/* proofs.h - which records of a snapshot the cluster secret proves, without computing it again for
 * those that the last snapshot had too.
 *
 * A verdict is kept by the record's bytes, identity and proof: not by a hash of them, since whoever
 * can write to the directory could look for a record that has the hash of a proven one. Only the
 * last snapshot's verdicts are kept, so there are at most DIRECTORY_NODES_MAX. A zeroed struct is
 * ready for use. Thread: the owner's. */
#ifndef BATON_SCHEDULER_DIRECTORY_PROOFS_H
#define BATON_SCHEDULER_DIRECTORY_PROOFS_H

#include "scheduler/directory/directory.h"
#include "shared/base/map.h"

struct proofs {
    struct map verdicts;
    uint64_t n_computed;
};

/* Moves the proven ones of nodes[n] to the front, in their order, and returns how many these are.
 * Takes the identities out of all of them, so that the records outlive the snapshot. *unproven (may
 * be NULL): the last of the others; node 0 when there is none. own_host: as for
 * node_record_is_proven. */
size_t proofs_keep_proven(struct proofs *p, struct str secret, const char *own_host,
                          struct node_record *nodes, size_t n, struct node_record *unproven);
void proofs_release(struct proofs *p);

#endif
