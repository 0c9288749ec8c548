/* numa.h - the memory nodes of this host whose processors the process may use: where compute
 * threads belong.
 *
 * A processor reads its own node's memory about twice as fast as another's. Most machines have one
 * node; then nothing here matters. Life cycle: a value, read once when a pool is made. Thread:
 * any. */
#ifndef BATON_KERNELS_HOST_NUMA_H
#define BATON_KERNELS_HOST_NUMA_H

#include <sched.h>
#include <stdbool.h>

enum { NUMA_NODES_MAX = 16 };

struct numa_nodes {
    int n;                          /* 1 at least */
    cpu_set_t cpus[NUMA_NODES_MAX]; /* of each, none empty; of a single node they are not looked
                                     * at */
};

/* From a folder like /sys/devices/system/node (NULL: that one) and the calling thread's affinity.
 * Nodes without a processor that may be used are left out. One node where the folder says nothing
 * or more than fits. */
void numa_nodes_read(const char *folder, struct numa_nodes *out);
/* A list as the kernel writes it, "0-3,8,10-11\n", added to `out`; false when it is something else.
 * Numbers over CPU_SETSIZE are left out. */
bool numa_cpu_list_read(const char *text, cpu_set_t *out);
/* The node of thread i of n: threads are spread as the processors are. */
int numa_node_of_thread(const struct numa_nodes *nodes, int i, int n);

#endif
