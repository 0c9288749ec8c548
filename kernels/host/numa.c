/* kernels/host/numa.c - see numa.h. Source of the format:
 * Documentation/ABI/stable/sysfs-devices-node of Linux. Thread: any. */
#include "kernels/host/numa.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIST_BYTES = 4096, PATH_BYTES = 512 };

/* A number of at most six digits; -1: none. */
static long read_number(const char **at)
{
    if (!isdigit((unsigned char)**at)) return -1;
    char *end;
    long n = strtol(*at, &end, 10);
    if (end - *at > 6) return -1;
    *at = end;
    return n;
}

bool numa_cpu_list_read(const char *text, cpu_set_t *out)
{
    const char *at = text;
    while (*at && *at != '\n') {
        long first = read_number(&at), last = first;
        if (first >= 0 && *at == '-') {
            at++;
            last = read_number(&at);
        }
        if (first < 0 || last < first || (*at && *at != ',' && *at != '\n')) return false;
        for (long i = first; i <= last && i < CPU_SETSIZE; i++) CPU_SET((size_t)i, out);
        if (*at == ',') at++;
    }
    return true;
}

static bool read_list(const char *path, cpu_set_t *out)
{
    char text[LIST_BYTES];
    FILE *f = fopen(path, "re");
    CPU_ZERO(out);
    if (!f) return false;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    return n + 1 < sizeof text && numa_cpu_list_read(text, out);
}

static bool read_nodes(const char *folder, struct numa_nodes *out)
{
    char path[PATH_BYTES];
    cpu_set_t online, mine;
    out->n = 0;
    snprintf(path, sizeof path, "%s/online", folder);
    if (sched_getaffinity(0, sizeof mine, &mine) != 0 || !read_list(path, &online)) return false;
    for (int i = 0; i < CPU_SETSIZE; i++) {
        cpu_set_t cpus;
        if (!CPU_ISSET((size_t)i, &online)) continue;
        snprintf(path, sizeof path, "%s/node%d/cpulist", folder, i);
        if (!read_list(path, &cpus)) return false;
        CPU_AND(&cpus, &cpus, &mine);
        if (CPU_COUNT(&cpus) == 0) continue;
        if (out->n == NUMA_NODES_MAX) return false;
        out->cpus[out->n++] = cpus;
    }
    return out->n > 0;
}

void numa_nodes_read(const char *folder, struct numa_nodes *out)
{
    if (!read_nodes(folder ? folder : "/sys/devices/system/node", out)) out->n = 1;
}

int numa_node_of_thread(const struct numa_nodes *nodes, int i, int n)
{
    int all = 0, before = 0;
    if (nodes->n == 1) return 0;
    for (int k = 0; k < nodes->n; k++) all += CPU_COUNT(&nodes->cpus[k]);
    for (int k = 0; k < nodes->n; k++) {
        before += CPU_COUNT(&nodes->cpus[k]);
        if ((long)i * all < (long)before * n) return k;
    }
    return nodes->n - 1;
}
