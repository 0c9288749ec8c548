/* tiers.c - checks the memories behind the KV cache: host memory of --swap-space, the folder of
 * --kv-cache-dir, or those of a node's ranks in it, and the room on its disk. Thread: main. */
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "deploy/doctor/doctor.h"
#include "deploy/launch/ranks.h"
#include "deploy/tiers/rank_folder.h"
#include "shared/kv/tier/disk/disk_folder.h"

static const double GIB = 1 << 30;

static void check_host(struct doctor *d)
{
    const double asked = config_float(d->c, "swap-space");
    uint64_t limit, left = doctor_free_memory(&limit);
    left /= ranks_on_host(d->c);
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

/* How many ranks a node has; doctor_check_options says what is wrong with them. */
static uint32_t ranks_of_node(const struct doctor *d)
{
    struct ranks r;
    struct err err = { 0 };
    return ranks_read(d->c, 0, &r, &err) == OK && r.tp.size ? r.tp.size : 1;
}

/* The folders that the ranks of a node will use; *held: bytes that they have. */
static enum status check_folders(const char *folder, uint32_t n_ranks, uint64_t *held,
                                 struct err *err)
{
    char path[RANK_FOLDER_MAX];
    *held = 0;
    for (uint32_t r = 0; r < n_ranks; r++) {
        rank_folder(folder, r, n_ranks, path);
        TRY(disk_folder_check(path, err));
        *held += bytes_in(path);
    }
    return OK;
}

static void check_disk(struct doctor *d)
{
    const char *folder = config_string(d->c, "kv-cache-dir");
    const double asked = config_float(d->c, "kv-cache-disk");
    const uint32_t n_ranks = ranks_of_node(d);
    struct err err = { 0 };
    char parts[64] = "";
    uint64_t held;
    if (!folder) return;
    if (check_folders(folder, n_ranks, &held, &err) != OK) {
        doctor_fix(doctor_add(d, "KV on disk", DOCTOR_FAIL, "%s", err.text),
                   "give a folder on a local disk that this user may write to");
        return;
    }
    const uint64_t room = free_at(folder) + held;
    if (n_ranks > 1)
        snprintf(parts, sizeof parts, ", %.2f for each of %u ranks", asked / n_ranks, n_ranks);
    struct doctor_line *line = doctor_add(
        d, "KV on disk", DOCTOR_OK,
        "%.1f GiB asked in %.300s%s, which has %.1f GiB and room for %.1f", asked, folder, parts,
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
