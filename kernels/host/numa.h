/* numa.h - the NUMA nodes of this host whose CPUs the process may use, for binding compute threads.
 *
 * A CPU reads its own node's memory about twice as fast as another's. Most machines have one node,
 * for which nothing here matters. Life cycle: a value, read once when a pool is created. Thread:
 * any. */
#ifndef BATON_KERNELS_HOST_NUMA_H
#define BATON_KERNELS_HOST_NUMA_H

#include <sched.h>
#include <stdbool.h>

enum { NUMA_NODES_MAX = 16 };

struct numa_nodes {
    int n;                          /* 1 at least */
    cpu_set_t cpus[NUMA_NODES_MAX]; /* of each node, none empty; unused for a single node */
};

/* Reads a folder like /sys/devices/system/node (NULL: that one) and the calling thread's affinity.
 * Leaves out nodes without a usable CPU. One node if the folder has none or more than fit. */
void numa_nodes_read(const char *folder, struct numa_nodes *out);
/* Adds a list as the kernel writes it, "0-3,8,10-11\n", to `out`; false if it is malformed. Ignores
 * numbers over CPU_SETSIZE. */
bool numa_cpu_list_read(const char *text, cpu_set_t *out);
/* The node of thread i of n: threads are spread like the CPUs. */
int numa_node_of_thread(const struct numa_nodes *nodes, int i, int n);

#endif
