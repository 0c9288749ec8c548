/* tiers.c - checks the memories behind the KV cache: host memory of --swap-space, the folder of
 * --kv-cache-dir and the room on its disk. Thread: main. */
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "deploy/doctor/doctor.h"
#include "shared/kv/tier/disk/disk_folder.h"

static const double GIB = 1 << 30;

static void check_host(struct doctor *d)
{
    const double asked = config_float(d->c, "swap-space");
    uint64_t limit, left = doctor_free_memory(&limit);
    const uint64_t pool = doctor_on_gpu(d) ? 0 : d->kv_bytes, room = left > pool ? left - pool : 0;
    if (asked <= 0) return;
    if (asked * GIB <= (double)room) {
        doctor_add(d, "swap space", DOCTOR_OK, "%.1f GiB asked for each rank, %.1f GiB left for it",
                   asked, (double)room / GIB);
        return;
    }
    doctor_fix(doctor_add(d, "swap space", DOCTOR_WARN,
                          "--swap-space is %.1f GiB, but the KV cache leaves %.1f GiB", asked,
                          (double)room / GIB),
               "the node takes what there is, less an eighth: lower --swap-space or free memory");
}

/* Bytes that segments have there already: they are among those of --kv-cache-disk. */
static uint64_t bytes_in(const char *folder)
{
    uint64_t bytes = 0;
    char path[PATH_MAX];
    const struct dirent *e;
    struct stat st;
    DIR *dir = opendir(folder);
    while (dir && (e = readdir(dir)))
        if (strncmp(e->d_name, "segment-", 8) == 0 &&
            (size_t)snprintf(path, sizeof path, "%s/%s", folder, e->d_name) < sizeof path &&
            stat(path, &st) == 0)
            bytes += (uint64_t)st.st_blocks * 512;
    if (dir) closedir(dir);
    return bytes;
}

/* Of the folder's file system, which is that of the nearest folder above if it is not made yet. */
static uint64_t free_at(const char *folder)
{
    char path[PATH_MAX];
    struct statvfs fs;
    snprintf(path, sizeof path, "%s", folder);
    while (statvfs(path, &fs) != 0) {
        char *slash = strrchr(path, '/');
        if (!slash) return statvfs(".", &fs) == 0 ? (uint64_t)fs.f_bavail * fs.f_frsize : 0;
        slash[slash == path] = 0;
    }
    return (uint64_t)fs.f_bavail * fs.f_frsize;
}

static void check_disk(struct doctor *d)
{
    const char *folder = config_string(d->c, "kv-cache-dir");
    const double asked = config_float(d->c, "kv-cache-disk");
    struct err err = { 0 };
    if (!folder) return;
    if (disk_folder_check(folder, &err) != OK) {
        doctor_fix(doctor_add(d, "KV on disk", DOCTOR_FAIL, "%s", err.text),
                   "give a folder on a local disk that this user may write to");
        return;
    }
    const uint64_t held = bytes_in(folder), room = free_at(folder) + held;
    struct doctor_line *line = doctor_add(
        d, "KV on disk", DOCTOR_OK,
        "%.1f GiB asked in %.300s, which has %.1f GiB and room for %.1f", asked, folder,
        (double)held / GIB, (double)room / GIB);
    if (asked * GIB <= (double)room) return;
    line->result = DOCTOR_WARN;
    doctor_fix(line, "the node keeps what fits and says that the disk is full: lower "
                     "--kv-cache-disk or free room");
}

void doctor_check_tiers(struct doctor *d)
{
    check_host(d);
    check_disk(d);
}
