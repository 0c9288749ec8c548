/* host_memory.c - reads /proc/meminfo and the memory control group (version 2, then version 1).
 * Thread: any. */
#include "kernels/host/host_memory.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* First number of a one-number file; false for "max" and absent files. */
static bool read_number(const char *path, uint64_t *out)
{
    FILE *f = fopen(path, "re");
    if (!f) return false;
    bool ok = fscanf(f, "%" SCNu64, out) == 1;
    fclose(f);
    return ok;
}

/* Sum of the values of the lines "<name> <number>" whose name is one of the two. */
static uint64_t read_fields(const char *path, const char *a, const char *b)
{
    char line[256], name[128];
    uint64_t sum = 0, v;
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "%127s %" SCNu64, name, &v) == 2 &&
            (strcmp(name, a) == 0 || strcmp(name, b) == 0))
            sum += v;
    fclose(f);
    return sum;
}

static uint64_t cgroup_available(const char *folder, const char *max_name, const char *used_name)
{
    char path[512];
    uint64_t max, used;
    snprintf(path, sizeof path, "%s/%s", folder, max_name);
    if (!read_number(path, &max)) return UINT64_MAX;
    snprintf(path, sizeof path, "%s/%s", folder, used_name);
    if (!read_number(path, &used)) return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    /* the kernel reclaims it when needed */
    uint64_t cache = read_fields(path, "inactive_file", "active_file");
    used = used > cache ? used - cache : 0;
    return max > used ? max - used : 0;
}

/* Available by the process's own group and by the root, as containers see it. LIMIT: limits of
 * groups between the two are not read. */
static uint64_t cgroups_available(void)
{
    uint64_t available = cgroup_available("/sys/fs/cgroup", "memory.max", "memory.current");
    uint64_t v1 = cgroup_available("/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                   "memory.usage_in_bytes");
    if (v1 < available) available = v1;
    char line[256], folder[300];
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f) return available;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "0::/", 4) != 0 || line[4] == 0) continue;
        snprintf(folder, sizeof folder, "/sys/fs/cgroup%s", line + 3);
        uint64_t own = cgroup_available(folder, "memory.max", "memory.current");
        if (own < available) available = own;
    }
    fclose(f);
    return available;
}

uint64_t host_memory_available(void)
{
    uint64_t kib = read_fields("/proc/meminfo", "MemAvailable:", "");
    uint64_t machine = kib ? kib * 1024 : UINT64_MAX, available = cgroups_available();
    return machine < available ? machine : available;
}
