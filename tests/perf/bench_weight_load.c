/* bench_weight_load.c - how fast a model's weights are loaded, next to the disk's rate for the same bytes.
 *
 *     bench_weight_load MODEL [isa] [threads] [none|wint8|wint4|block_wise_fp8] [ROUNDS] [dummy]
 *     defaults: auto, 2, none, 1; isa "cuda" loads onto the GPU
 *
 * Each round drops the files from memory and reads them (several parts at once, which disks are
 * fastest at), drops them again and loads the model (cold), and loads it once more (warm). With
 * dummy it only measures generating dummy weights from a config.json. Each line is "WHAT GB SECONDS
 * GB/s"; the last is cold over disk. It prints how much was still in memory after dropping: tmpfs
 * and some virtual disks keep what they were told to drop. */
#include <dirent.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/quantize.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/model/load/file_map.h"
#include "shared/model/load/model_files.h"
#include "shared/model/model.h"

enum { FILES_MAX = 512, READERS = 8, PART = 8 << 20, PATH_MAX_BYTES = 4096 };

struct files {
    char path[FILES_MAX][PATH_MAX_BYTES];
    size_t bytes[FILES_MAX], n, all;
};

static void add_file(struct files *f, const char *path)
{
    struct stat st;
    if (f->n == FILES_MAX || strlen(path) >= PATH_MAX_BYTES || stat(path, &st) != 0 ||
        !S_ISREG(st.st_mode))
        return;
    snprintf(f->path[f->n], PATH_MAX_BYTES, "%s", path);
    f->bytes[f->n++] = (size_t)st.st_size;
    f->all += (size_t)st.st_size;
}

static void list_files(struct files *f, const char *model)
{
    char path[2 * PATH_MAX_BYTES];
    DIR *d = opendir(model);
    if (!d) add_file(f, model);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        if (!str_ends(str_of(e->d_name), ".safetensors")) continue;
        snprintf(path, sizeof path, "%s/%s", model, e->d_name);
        add_file(f, path);
    }
    if (d) closedir(d);
}

/* ---- the disk ---- */

static double still_in_memory(const struct files *f)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t n = 0, all = 0;
    for (size_t i = 0; i < f->n; i++) {
        struct file_map map;
        if (file_map_open(f->path[i], &map, NULL) != OK || !map.data) continue;
        const size_t pages = (map.bytes + page - 1) / page;
        unsigned char *in = mem_calloc(pages, 1);
        if (mincore((void *)(uintptr_t)map.data, map.bytes, in) == 0)
            for (size_t p = 0; p < pages; p++) n += in[p] & 1;
        all += pages;
        mem_free(in);
        file_map_close(&map);
    }
    return all ? (double)n / (double)all : 0;
}

static void drop_files(const struct files *f)
{
    for (size_t i = 0; i < f->n; i++) {
        int fd = open(f->path[i], O_RDONLY | O_CLOEXEC);
        if (fd < 0) continue;
        (void)fdatasync(fd);
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* the result is printed */
        close(fd);
    }
    const double left = still_in_memory(f);
    if (left > 0.01)
        printf("note: %.0f %% of the files stayed in memory when they were dropped\n", left * 100);
}

struct sweep {
    const struct files *files;
    atomic_size_t next; /* part of all files; taken once each */
    atomic_size_t read;
};

static void *read_parts(void *arg)
{
    struct sweep *s = arg;
    char *to = mem_aligned(4096, PART);
    for (;;) {
        size_t part = atomic_fetch_add(&s->next, 1), i = 0;
        for (; i < s->files->n && part >= (s->files->bytes[i] + PART - 1) / PART; i++)
            part -= (s->files->bytes[i] + PART - 1) / PART;
        if (i == s->files->n) break;
        int fd = open(s->files->path[i], O_RDONLY | O_CLOEXEC);
        ssize_t got = fd >= 0 ? pread(fd, to, PART, (off_t)(part * PART)) : -1;
        if (got > 0) atomic_fetch_add(&s->read, (size_t)got);
        if (fd >= 0) close(fd);
    }
    mem_free(to);
    return NULL;
}

static double speed(const char *what, size_t bytes, uint64_t ns)
{
    const double rate = (double)bytes / (double)ns;
    printf("%-10s %8.3f GB %8.3f s %8.2f GB/s\n", what, (double)bytes / 1e9, (double)ns / 1e9,
           rate);
    fflush(stdout);
    return rate;
}

static double read_disk(const struct files *f)
{
    struct sweep s = { .files = f };
    pthread_t threads[READERS];
    size_t n = 0;
    const uint64_t t0 = clock_ns();
    while (n < READERS && thread_start(&threads[n], read_parts, &s) == OK) n++;
    for (size_t i = 0; i < n; i++) pthread_join(threads[i], NULL);
    const uint64_t ns = clock_ns() - t0;
    if (atomic_load(&s.read) != f->all) {
        fprintf(stderr, "bench_weight_load: only %zu of %zu bytes could be read\n",
                atomic_load(&s.read), f->all);
        exit(1);
    }
    return speed("disk", f->all, ns);
}

/* ---- the model ---- */

static double load(const char *what, const struct model_options *o, size_t bytes)
{
    struct model *m;
    struct err err;
    const uint64_t t0 = clock_ns();
    if (model_load(o, &m, &err) != OK) {
        fprintf(stderr, "bench_weight_load: %s\n", err.text);
        exit(1);
    }
    const double rate = speed(what, bytes ? bytes : m->weight_bytes, clock_ns() - t0);
    model_free(m);
    return rate;
}

int main(int argc, char **argv)
{
    struct files *f = MEM_NEW(struct files);
    struct model_options o = { .max_rows = 16, .max_model_len = 16 };
    struct buf path = { 0 };
    struct err err = { 0 };
    if (argc < 2 || model_find(argv[1], &path, &err) != OK ||
        quantize_from_name(argc > 4 ? argv[4] : "none", &o.quantize, &err) != OK ||
        kernel_ctx_create(kernel_options_default(argc > 2 ? argv[2] : "auto", ACTIVATIONS_FAST,
                                                 argc > 3 ? atoi(argv[3]) : 2),
                          &o.kernels, &err) != OK) {
        fprintf(
            stderr,
            "%s%susage: bench_weight_load MODEL [isa] [threads] [none|wint8|wint4|block_wise_fp8] "
            "[ROUNDS] [dummy]\n",
            err.text, err.text[0] ? "\n" : "");
        return 2;
    }
    o.path = path.data;
    o.dummy = argc > 6 && strcmp(argv[6], "dummy") == 0;
    list_files(f, path.data);
    for (int round = 0; round < (argc > 5 ? atoi(argv[5]) : 1); round++) {
        if (o.dummy) {
            load("dummy weights", &o, 0);
            continue;
        }
        drop_files(f);
        const double disk = read_disk(f);
        drop_files(f);
        const double cold = load("cold", &o, f->all);
        load("warm", &o, f->all);
        printf("cold/disk  %.2f\n", cold / disk);
    }
    kernel_ctx_free(o.kernels);
    buf_release(&path);
    mem_free(f);
    return 0;
}
