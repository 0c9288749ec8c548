/* simt_table.h - the tables behind simt_memory.h, for the files that fill them: device memory,
 * pinned memory, memory of other processes.
 *
 * Thread: any, with the state lock held, unless a function says otherwise. */
#ifndef BATON_TESTS_SIMT_SIMT_TABLE_H
#define BATON_TESTS_SIMT_SIMT_TABLE_H

#ifdef __cplusplus
#include <stdint.h>

#include <map>

#include "tests/simt/include/simt.h"

enum { SIMT_ALIGNMENT = 256, SIMT_FRESH = 0xff };
static const size_t SIMT_GUARD = 1 << 20; /* large enough that an index that is wrong by a row
                                           * or two hits it; it takes address space only */

struct simt_allocation {
    char *data; /* behind the front guard */
    size_t data_bytes;
    char *p;
    size_t bytes;
    int fd;
    uint64_t nonce; /* in the memfd's name */
    bool is_imported;
    int n_opened;   /* times that cudaIpcOpenMemHandle returned it */
    uint64_t owner; /* imported: the exporter's nonce */
};

struct simt_tables {
    std::map<const char *, simt_allocation> device; /* by p */
    std::map<const char *, size_t> pinned, registered;
    size_t used = 0;
    bool is_open = false;
};

simt_tables &simt_tables_of(void);

simt_allocation *simt_find_device(const void *p);
/* Bytes from p to the end of the pinned block that holds it, or 0. */
size_t simt_pinned_from(const void *p);

size_t simt_page_bytes(void);
size_t simt_round_up(size_t n, size_t unit);
/* Reserves guard, data and guard, and maps the file in between, accessible. NULL: no address space.
 * Any thread. */
char *simt_map(int fd, size_t data_bytes);
void simt_protect(const simt_allocation &a, int how);
void simt_poison_slack(const simt_allocation &a);
/* Runs the queued operations first; called without the state lock. */
cudaError_t simt_free_device(void *p, bool is_imported);
/* From now on the signal handler prints a sentence about a fault before the default action. */
void simt_catch_faults(void);
#endif
#endif
