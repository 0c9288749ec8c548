/* open_files.h - how many descriptors this process may have: every connection is one.
 *
 * Systems start a process with a soft limit of 1,024, for programs that use select(), and a hard
 * one far above, to which a process may raise the soft one. Thread: any. */
#ifndef BATON_NET_OPEN_FILES_H
#define BATON_NET_OPEN_FILES_H

#include <stdint.h>

/* Raises the soft limit to the hard one, and returns it: the old one if the system refuses. */
uint64_t open_files_raise(void);
/* The hard limit. */
uint64_t open_files_limit(void);
/* What a port with so many clients needs: one descriptor each, beside those of peers, Redis, shared
 * memory, the model's files and the log. */
uint64_t open_files_wanted(uint64_t n_connections);

#endif
