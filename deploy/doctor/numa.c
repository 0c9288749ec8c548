/* numa.c - on which NUMA nodes this process may run and take memory. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"

enum { LIST_MAX = 4096, NODES_MAX = 1024 };

bool doctor_list_has(const char *list, long n)
{
    const char *at = list;
    char *end;
    while (*at >= '0' && *at <= '9') {
        long first = strtol(at, &end, 10), last = *end == '-' ? strtol(end + 1, &end, 10) : first;
        if (n >= first && n <= last) return true;
        if (*end != ',') return false;
        at = end + 1;
    }
    return false;
}

bool doctor_runs_on_node(int node)
{
    char path[96], cpus[LIST_MAX];
    cpu_set_t allowed;
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || !doctor_read_line(path, cpus, sizeof cpus)) return false;
    for (long cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET((size_t)cpu, &allowed) && doctor_list_has(cpus, cpu)) return true;
    return false;
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
