/* hugepages.c - checks that the KV cache may use huge pages, which save address translations of the
 * CPU and of RDMA devices. Thread: main. */
#include <stdio.h>
#include <string.h>

#include "deploy/doctor/doctor.h"

/* The bracketed word of "always [madvise] never". */
static const char *chosen_word(const char *path, char *out, size_t cap)
{
    char text[128];
    snprintf(out, cap, "not there");
    if (!doctor_read_line(path, text, sizeof text)) return out;
    const char *open = strchr(text, '[');
    if (open) snprintf(out, cap, "%.*s", (int)strcspn(open + 1, "]"), open + 1);
    return out;
}

static unsigned long long meminfo(const char *name)
{
    char line[128], format[48];
    unsigned long long value = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    if (!f) return 0;
    snprintf(format, sizeof format, "%s: %%llu", name);
    while (fgets(line, sizeof line, f))
        if (sscanf(line, format, &value) == 1) break;
    fclose(f);
    return value;
}

void doctor_check_huge_pages(struct doctor *d)
{
    if (doctor_on_gpu(d)) return; /* with a GPU neither weights nor KV cache are in host memory */
    char private[32], shared[32], reserved[64] = "none reserved";
    unsigned long long total = meminfo("HugePages_Total"), left = meminfo("HugePages_Free"),
                       kib = meminfo("Hugepagesize");
    chosen_word("/sys/kernel/mm/transparent_hugepage/enabled", private, sizeof private);
    chosen_word("/sys/kernel/mm/transparent_hugepage/shmem_enabled", shared, sizeof shared);
    if (total)
        snprintf(reserved, sizeof reserved, "%llu of %llu reserved ones of %llu KiB free", left,
                 total, kib);
    bool off = strcmp(private, "never") == 0 || strcmp(private, "not there") == 0;
    struct doctor_line *line = doctor_add(d, "huge pages", off ? DOCTOR_WARN : DOCTOR_OK,
                                          "transparent: %s; for shared memory: %s; %s", private,
                                          shared, reserved);
    if (off) doctor_fix(line, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    else if (strcmp(shared, "never") == 0 || strcmp(shared, "deny") == 0)
        doctor_fix(line, "the KV cache is shared memory: echo advise > "
                         "/sys/kernel/mm/transparent_hugepage/shmem_enabled makes it use them");
}
