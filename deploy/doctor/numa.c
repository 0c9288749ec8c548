/* numa.c - the NUMA nodes on which this process may run and allocate memory. Thread: main. */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "kernels/host/numa.h"

enum { LIST_MAX = 4096, NODES_MAX = 1024 };

bool doctor_list_has(const char *list, long n)
{
    cpu_set_t set; /* also for nodes: the kernel writes both alike */
    CPU_ZERO(&set);
    return numa_cpu_list_read(list, &set) && n >= 0 && n < CPU_SETSIZE &&
           CPU_ISSET((size_t)n, &set);
}

bool doctor_runs_on_node(int node)
{
    char path[96], list[LIST_MAX];
    cpu_set_t allowed, cpus;
    CPU_ZERO(&cpus);
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 ||
        !doctor_read_line(path, list, sizeof list) || !numa_cpu_list_read(list, &cpus))
        return false;
    CPU_AND(&cpus, &cpus, &allowed);
    return CPU_COUNT(&cpus) > 0;
}

bool doctor_memory_on_node(int node)
{
    char line[LIST_MAX], nodes[LIST_MAX] = "";
    FILE *f = fopen("/proc/self/status", "r");
    if (!f) return false;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "Mems_allowed_list: %4095s", nodes) == 1) break;
    fclose(f);
    return doctor_list_has(nodes, node);
}

int doctor_only_node(void)
{
    char path[96];
    int only = -1;
    for (int node = 0; node < NODES_MAX; node++) {
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d", node);
        if (access(path, F_OK) != 0 || !doctor_runs_on_node(node)) continue;
        if (only >= 0) return -1;
        only = node;
    }
    return only;
}
