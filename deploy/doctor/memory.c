/* memory.c - checks memory: what is free, what a cgroup allows, what may be locked.
 * Thread: main. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "deploy/doctor/doctor.h"
#include "deploy/node/node_options.h"
#include "kernels/host/host_memory.h"
#include "kvtransfer/staging.h"

static const double GIB = 1 << 30;

/* Reads a file that holds one number; false when it is absent or says "max". */
static bool read_number(const char *path, uint64_t *out)
{
    char text[64];
    FILE *f = fopen(path, "r");
    if (!f) return false;
    bool ok = fgets(text, sizeof text, f) && text[0] >= '0' && text[0] <= '9';
    fclose(f);
    if (ok) *out = strtoull(text, NULL, 10);
    return ok;
}

static uint64_t mem_available(void)
{
    char line[128];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    if (!f) return 0;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
    fclose(f);
    return (uint64_t)kib * 1024;
}

/* Limit and use of this process's cgroup: version 2, else version 1, where a huge number means "no
 * limit". */
static bool cgroup_memory(uint64_t *limit, uint64_t *used)
{
    static const char *const files[][2] = {
        { "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current" },
        { "/sys/fs/cgroup/memory/memory.limit_in_bytes",
          "/sys/fs/cgroup/memory/memory.usage_in_bytes" },
    };
    for (size_t i = 0; i < 2; i++)
        if (read_number(files[i][0], limit) && read_number(files[i][1], used))
            return *limit < (uint64_t)1 << 60;
    return false;
}

uint64_t doctor_free_memory(uint64_t *limit)
{
    uint64_t available = mem_available(), used = 0;
    *limit = 0;
    if (!cgroup_memory(limit, &used)) {
        *limit = 0;
        return available;
    }
    uint64_t left = *limit > used ? *limit - used : 0;
    return left < available ? left : available;
}

static void check_free(struct doctor *d)
{
    uint64_t limit, left = doctor_free_memory(&limit);
    double wanted = config_is_set(d->c, "kv-cache-memory") ? config_float(d->c, "kv-cache-memory")
                                                           : 0;
    char cgroup[64] = "no cgroup limit";
    if (doctor_on_gpu(d)) { /* the KV cache is on the GPU */
        if (d->gpu_free && wanted * GIB > (double)d->gpu_free)
            doctor_fix(doctor_add(d, "GPU memory", DOCTOR_FAIL,
                                  "%.1f GiB are free, but --kv-cache-memory is %.1f GiB",
                                  (double)d->gpu_free / GIB, wanted),
                       "lower --kv-cache-memory");
        wanted = 0;
    }
    if (limit) snprintf(cgroup, sizeof cgroup, "cgroup limit %.1f GiB", (double)limit / GIB);
    if (wanted * GIB > (double)left) {
        doctor_fix(doctor_add(d, "memory", DOCTOR_FAIL,
                              "%.1f GiB may be used (%s), but --kv-cache-memory is %.1f GiB",
                              (double)left / GIB, cgroup, wanted),
                   "lower --kv-cache-memory");
        return;
    }
    doctor_add(d, "memory", DOCTOR_OK, "%.1f GiB may be used, %s", (double)left / GIB, cgroup);
}

/* Bytes that the KV cache of a node with these options takes; at most, when the model is not
 * known. */
static uint64_t kv_bytes_of(const struct doctor *d)
{
    if (d->kv_bytes) return d->kv_bytes;
    if (config_is_set(d->c, "kv-cache-memory"))
        return (uint64_t)(config_float(d->c, "kv-cache-memory") * GIB);
    return host_memory_available() / NODE_KV_SHARE;
}

/* May this process exceed RLIMIT_MEMLOCK? Yes with CAP_IPC_LOCK (bit 14, capability(7)). */
static bool may_lock_all(void)
{
    char line[128];
    unsigned long long effective = 0;
    FILE *f = fopen("/proc/self/status", "r");
    if (!f) return false;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "CapEff: %llx", &effective) == 1) break;
    fclose(f);
    return effective >> 14 & 1;
}

static bool has_rdma_device(void)
{
    const struct dirent *e;
    bool found = false;
    DIR *dir = opendir("/sys/class/infiniband");
    while (dir && (e = readdir(dir))) found |= e->d_name[0] != '.';
    if (dir) closedir(dir);
    return found;
}

/* Registering memory locks it, because devices use its physical addresses. This concerns rdma, and
 * ucx over the same NICs. */
static void check_locked(struct doctor *d)
{
    enum doctor_asked rdma = doctor_asked_for(d->c, "rdma"), ucx = doctor_asked_for(d->c, "ucx"),
                      asked = rdma > ucx ? rdma : ucx;
    /* A GPU's pool has no host pages to lock, but the staging memory of puts has. */
    const bool gpu = doctor_on_gpu(d);
    const char *what = gpu           ? "staging memory takes"
                       : d->kv_bytes ? "the KV cache takes"
                                     : "the KV cache of any model takes at most";
    const double kv = gpu ? (double)KVT_STAGING_BYTES : (double)kv_bytes_of(d);
    struct rlimit r;
    if (getrlimit(RLIMIT_MEMLOCK, &r) != 0) return;
    /* with a device rdma will be used */
    if (rdma == DOCTOR_ALLOWED && has_rdma_device()) asked = DOCTOR_ASKED;
    bool enough = r.rlim_cur == RLIM_INFINITY || (double)r.rlim_cur > kv;
    if (r.rlim_cur == RLIM_INFINITY) {
        doctor_add(d, "locked memory", DOCTOR_OK, "unlimited");
    } else if (asked < DOCTOR_ASKED) {
        doctor_add(d, "locked memory", DOCTOR_OK,
                   "%.1f MiB; rdma and ucx, which need more, are not used",
                   (double)r.rlim_cur / (1 << 20));
    } else if (enough || may_lock_all()) {
        doctor_add(d, "locked memory", DOCTOR_OK, "%.1f MiB%s; %s %.1f MiB",
                   (double)r.rlim_cur / (1 << 20),
                   enough ? "" : ", but this process may exceed it (CAP_IPC_LOCK)", what,
                   kv / (1 << 20));
    } else {
        struct doctor_line *line = doctor_add(d, "locked memory", doctor_missing(asked),
                                              "%.1f MiB, but registering locks more: %s %.1f MiB",
                                              (double)r.rlim_cur / (1 << 20), what, kv / (1 << 20));
        doctor_fix(line, "ulimit -l unlimited (LimitMEMLOCK=infinity in a systemd unit, --ulimit "
                         "memlock=-1 for a container); over rdma a NIC that pages on "
                         "demand does without, slower at first touch");
    }
}

void doctor_check_memory(struct doctor *d)
{
    check_free(d);
    check_locked(d);
}
