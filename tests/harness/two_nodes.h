/* two_nodes.h - a host with two NUMA nodes, made of the CPUs that the test may use. */
#ifndef BATON_TESTS_HARNESS_TWO_NODES_H
#define BATON_TESTS_HARNESS_TWO_NODES_H

#include "kernels/host/numa.h"

/* Splits the CPUs into a lower and an upper half; a single CPU is in both. */
static inline struct numa_nodes two_nodes(void)
{
    struct numa_nodes nodes = { .n = 2 };
    cpu_set_t mine;
    sched_getaffinity(0, sizeof mine, &mine);
    int n = CPU_COUNT(&mine), seen = 0;
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET((size_t)i, &mine)) CPU_SET((size_t)i, &nodes.cpus[seen++ * 2 / n]);
    if (n == 1) nodes.cpus[1] = nodes.cpus[0];
    return nodes;
}

#endif
