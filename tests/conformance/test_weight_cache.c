/* test_weight_cache.c - the weight cache (shared/model/load/weight_cache.h): a model from the cache
 * gives the same bits as from its own files, and an entry that is damaged or belongs to other
 * weights is refused and written again. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shared/base/hash/hash.h"
#include "shared/model/load/weight_cache.h"
#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/model_rig.h"

enum { N_IDS = 7 };

static const int32_t IDS[N_IDS] = { 3, 1, 4, 1, 5, 9, 2 };

struct result {
    uint64_t logits; /* hash of all logits */
    size_t n;
    bool mapped; /* the weights in use were mapped from the cache */
};

/* Has this process mapped an entry of the cache? */
static bool maps_a_copy(void)
{
    char line[4096];
    bool found = false;
    FILE *f = fopen("/proc/self/maps", "re");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f))
        found = found || strstr(line, ".packed\n") || strstr(line, ".experts\n");
    fclose(f);
    return found;
}

static struct result run(const char *model, enum activations activations, enum quantize quantize,
                         const char *folder)
{
    struct rig r;
    rig_open_packed(&r, model, "auto", activations, quantize, folder);
    struct result result = { .n = (size_t)N_IDS * r.n_vocab };
    float *logits = MEM_ARRAY(float, result.n);
    feed_all(&r, &(struct feed){ .table = 0, .ids = IDS, .n = N_IDS - 1 }, 1, logits);
    feed_all(&r,
             &(struct feed){
                 .table = 0, .ids = IDS + N_IDS - 1, .n = 1, .pos = N_IDS - 1, .generated = true },
             1, logits + (size_t)(N_IDS - 1) * r.n_vocab);
    result.logits = hash_64(logits, result.n * sizeof *logits, 0);
    mem_free(logits);
    result.mapped = maps_a_copy();
    CHECK((r.m->mapped_bytes > 0) == result.mapped);
    rig_close(&r);
    CHECK(!maps_a_copy()); /* weight_release unmaps all of it */
    return result;
}

static bool same(const struct result *a, const struct result *b)
{
    return a->n == b->n && a->logits == b->logits;
}

/* The only file of `folder` whose name ends in `end`; false if there is none. */
static bool find_file(const char *folder, const char *end, struct path *out)
{
    DIR *d = opendir(folder);
    struct dirent *e;
    int n = 0;
    CHECK(d != NULL);
    while ((e = readdir(d)))
        if (str_ends(str_of(e->d_name), end)) {
            checkpoint_print(out->text, sizeof out->text, "%s/%s", folder, e->d_name);
            n++;
        }
    closedir(d);
    CHECK(n <= 1);
    return n == 1;
}

static ino_t inode_of(const char *path)
{
    struct stat st;
    CHECK(stat(path, &st) == 0);
    return st.st_ino;
}

static struct path sub_folder(const char *name)
{
    struct path p;
    checkpoint_print(p.text, sizeof p.text, "%s/%s", test_tmpdir(), name);
    return p;
}

/* ---- the same bits ---- */

/* Hashes of the table, which has the shape, offset and hash of every weight, for
 * WEIGHT_CACHE_VERSION. If this test fails after a change to packing, raise that number and enter
 * the new values here; otherwise old entries would be used with new code. */
static const struct {
    const char *model;
    enum quantize quantize;
    enum activations activations;
    uint64_t table;
} BYTES[] = {
    { "llama", QUANTIZE_NONE, ACTIVATIONS_FAST, 0x4020382c0def0bb6 },
    { "qwen2", QUANTIZE_WINT8, ACTIVATIONS_FAST, 0x31db53969324825a },
    { "qwen3_moe", QUANTIZE_WINT4, ACTIVATIONS_FAST, 0x6f4999ed89e9996f },
    { "ernie_moe", QUANTIZE_BLOCK_FP8, ACTIVATIONS_F32, 0xc8c0f2988ffc0e4d },
    { "deepseek_v3", QUANTIZE_NONE, ACTIVATIONS_F32, 0xf920e6db2e4efe66 },
    { "deepseek_v3_fp8", QUANTIZE_NONE, ACTIVATIONS_FAST, 0x4ed55f6e3076e452 },
};

static uint64_t table_hash(const char *path)
{
    struct buf b = { 0 };
    struct err err;
    CHECK_OK(file_read(path, 1 << 30, &b, &err));
    const struct weight_cache_header *h = (const struct weight_cache_header *)(const void *)b.data;
    uint64_t hash = hash_64(h + 1, h->n_weights * sizeof(struct weight_cache_entry), 0);
    buf_release(&b);
    return hash;
}

TEST(the_same_bits_and_the_bytes_of_this_version)
{
    bool changed = false;
    for (size_t i = 0; i < COUNT_OF(BYTES); i++) {
        const struct path model = golden(BYTES[i].model, "model"),
                          folder = sub_folder(BYTES[i].model);
        const struct result plain = run(model.text, BYTES[i].activations, BYTES[i].quantize, NULL);
        CHECK(!plain.mapped);
        const struct result made = run(model.text, BYTES[i].activations, BYTES[i].quantize,
                                       folder.text);
        struct path copy, rest;
        CHECK(find_file(folder.text, ".packed", &copy) && !find_file(folder.text, ".new", &rest));
        const ino_t inode = inode_of(copy.text);
        const struct result mapped = run(model.text, BYTES[i].activations, BYTES[i].quantize,
                                         folder.text);
        CHECK(made.mapped && mapped.mapped && same(&plain, &made) && same(&plain, &mapped));
        CHECK(inode_of(copy.text) == inode);
        uint64_t table = table_hash(copy.text);
        if (table != BYTES[i].table)
            fprintf(stderr, "%s: the table's hash is 0x%016llx\n", BYTES[i].model,
                    (unsigned long long)table);
        changed = changed || table != BYTES[i].table;
    }
    if (changed)
        test_fail(__FILE__, __LINE__,
                  "packed bytes have changed: raise WEIGHT_CACHE_VERSION and write the hashes "
                  "above into this test");
}

/* The number of entries in a folder, and a number that changes when one of them is replaced. */
static int count_copies(const char *folder, uint64_t *which)
{
    DIR *d = opendir(folder);
    struct dirent *e;
    int n = 0;
    CHECK(d != NULL);
    for (*which = 0; (e = readdir(d));) {
        if (!str_ends(str_of(e->d_name), ".packed")) continue;
        *which += hash_64(&e->d_ino, sizeof e->d_ino, 0);
        n++;
    }
    closedir(d);
    return n;
}

/* Each quantization of a model has its own entry, and each entry is used again. */
TEST(copies_side_by_side)
{
    const struct path model = golden("qwen2", "model");
    const char *folder = test_tmpdir();
    uint64_t which[2];
    for (int round = 0; round < 2; round++) {
        for (int q = QUANTIZE_NONE; q <= QUANTIZE_BLOCK_FP8; q++) {
            const struct result plain = run(model.text, ACTIVATIONS_FAST, (enum quantize)q, NULL);
            const struct result copied = run(model.text, ACTIVATIONS_FAST, (enum quantize)q,
                                             folder);
            CHECK(copied.mapped && same(&plain, &copied));
        }
        CHECK_EQ_INT(count_copies(folder, &which[round]), 4);
    }
    CHECK(which[0] == which[1]);
}

/* ---- what is refused ---- */

struct damage {
    const char *what;
    off_t at;     /* if negative, from the end */
    off_t length; /* >= 0: truncate to it; -1: change the byte at `at`; -2: append a byte */
};

static void damage(const char *path, const struct damage *d)
{
    struct stat st;
    uint8_t byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && fstat(fd, &st) == 0);
    off_t at = d->at < 0 ? st.st_size + d->at : d->at;
    if (d->length >= 0) CHECK(ftruncate(fd, d->length) == 0);
    else if (d->length == -2) CHECK(ftruncate(fd, st.st_size + 1) == 0);
    else {
        CHECK(pread(fd, &byte, 1, at) == 1);
        byte ^= 0x20;
        CHECK(pwrite(fd, &byte, 1, at) == 1);
    }
    close(fd);
}

TEST(damaged_copies_are_made_anew)
{
    static const struct damage DAMAGES[] = {
        { "empty", 0, 0 },
        { "cut in its head", 0, 40 },
        { "cut in its table", 0, 100 },
        { "cut behind its table", 0, 4096 },
        { "one byte longer", 0, -2 },
        { "of another kind", 1, -1 },
        { "of another version", offsetof(struct weight_cache_header, version), -1 },
        { "of other weights", offsetof(struct weight_cache_header, key.weights), -1 },
        { "of older files", offsetof(struct weight_cache_header, key.files), -1 },
        { "with another number of weights", offsetof(struct weight_cache_header, n_weights), -1 },
        { "with another length in its head", offsetof(struct weight_cache_header, bytes), -1 },
        { "with another hash", offsetof(struct weight_cache_header, hash), -1 },
        { "with another shape",
          sizeof(struct weight_cache_header) + offsetof(struct weight_cache_entry, n_in), -1 },
        { "with a weight elsewhere",
          sizeof(struct weight_cache_header) + sizeof(struct weight_cache_entry) +
              offsetof(struct weight_cache_entry, at),
          -1 },
        { "with a bit turned in its first weight", 4096 * 2 + 3, -1 },
        { "with a bit turned in its last weight", -4096, -1 },
    };
    const struct path model = golden("qwen3", "model");
    const char *folder = test_tmpdir();
    const struct result plain = run(model.text, ACTIVATIONS_FAST, QUANTIZE_WINT8, NULL);
    struct path copy;
    CHECK(run(model.text, ACTIVATIONS_FAST, QUANTIZE_WINT8, folder).mapped &&
          find_file(folder, ".packed", &copy));
    const uint64_t table = table_hash(copy.text);
    for (size_t i = 0; i < COUNT_OF(DAMAGES); i++) {
        /* so that its inode is not reused */
        const int keep = open(copy.text, O_RDONLY | O_CLOEXEC);
        const ino_t before = inode_of(copy.text);
        damage(copy.text, &DAMAGES[i]);
        const struct result after = run(model.text, ACTIVATIONS_FAST, QUANTIZE_WINT8, folder);
        if (!after.mapped || !same(&plain, &after) || inode_of(copy.text) == before ||
            table_hash(copy.text) != table)
            test_fail(__FILE__, __LINE__, "a copy %s: mapped %d, same bits %d, made anew %d",
                      DAMAGES[i].what, after.mapped, same(&plain, &after),
                      inode_of(copy.text) != before);
        close(keep);
    }
}

/* A checkpoint that was written again, even with the same bytes, is packed again. */
TEST(changed_files_are_packed_anew)
{
    struct checkpoint *s = checkpoint_read(golden("qwen2", "model").text);
    struct path model = sub_folder("model"), folder = sub_folder("copies"), copy, file;
    struct buf config = { 0 };
    struct err err;
    CHECK(mkdir(model.text, 0755) == 0);
    CHECK_OK(file_read(golden("qwen2", "model/config.json").text, 1 << 20, &config, &err));
    checkpoint_write_folder(s, model.text, buf_str(&config));
    const struct result first = run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, folder.text);
    CHECK(find_file(folder.text, ".packed", &copy) && find_file(model.text, ".safetensors", &file));
    const int keep = open(copy.text, O_RDONLY | O_CLOEXEC);
    const ino_t inode = inode_of(copy.text);
    CHECK(utimensat(AT_FDCWD, file.text,
                    (struct timespec[]){ { .tv_sec = 1000 }, { .tv_sec = 1000 } }, 0) == 0);
    const struct result second = run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, folder.text);
    CHECK(first.mapped && second.mapped && same(&first, &second) && inode_of(copy.text) != inode);
    close(keep);
    checkpoint_release(s);
    buf_release(&config);
}

/* ---- folders of no use ---- */

TEST(a_folder_that_is_none_is_no_fault_of_the_model)
{
    const struct path model = golden("llama", "model");
    const struct result plain = run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, NULL),
                        other = run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE,
                                    "/dev/null/copies");
    CHECK(!other.mapped && same(&plain, &other));
}

TEST(a_full_disk_is_no_fault_of_the_model)
{
    const struct path model = golden("llama", "model");
    const char *folder = test_tmpdir();
    struct path rest;
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    /* writing beyond fails like a full disk */
    CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 8192, 8192 }) == 0);
    const struct result plain = run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, NULL),
                        other = run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, folder);
    CHECK(!other.mapped && same(&plain, &other));
    CHECK(!find_file(folder, ".packed", &rest) && !find_file(folder, ".new", &rest));
}

/* ---- several at once ---- */

TEST(processes_at_once_share_one_copy)
{
    enum { N = 4, ROUNDS = 3 };
    const struct path model = golden("deepseek_v3", "model");
    const struct result plain = run(model.text, ACTIVATIONS_FAST, QUANTIZE_WINT4, NULL);
    for (int round = 0; round < ROUNDS; round++) {
        char name[32];
        pid_t children[N];
        struct path rest;
        snprintf(name, sizeof name, "round%d", round);
        const struct path folder = sub_folder(name);
        for (int i = 0; i < N; i++) {
            children[i] = fork();
            CHECK(children[i] >= 0);
            if (children[i] > 0) continue;
            const struct result mine = run(model.text, ACTIVATIONS_FAST, QUANTIZE_WINT4,
                                           folder.text);
            _exit(mine.mapped && same(&plain, &mine) ? 0 : 1);
        }
        for (int i = 0; i < N; i++) {
            int status;
            CHECK(waitpid(children[i], &status, 0) == children[i]);
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        CHECK(find_file(folder.text, ".packed", &rest) && !find_file(folder.text, ".new", &rest));
    }
}

/* Waits until the file contains this text, which another process writes. The test's time limit
 * applies. */
static void await_text(const char *path, const char *text)
{
    for (bool found = false; !found; usleep(10000)) {
        struct buf b = { 0 };
        struct err err;
        CHECK_OK(file_read(path, 1 << 20, &b, &err));
        found = b.data && strstr(b.data, text);
        buf_release(&b);
    }
}

/* Once an entry has its final name all waiting processes use it at once: they check its bytes at
 * the same time, not one after the other under the lock. */
TEST(waiting_ends_with_the_copy)
{
    const struct path model = golden("llama", "model"), folder = sub_folder("copies"),
                      said = sub_folder("said");
    const struct result plain = run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, NULL);
    struct path copy;
    char away[sizeof copy.text + 8], lock[sizeof copy.text + 8];
    int status;
    CHECK(run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, folder.text).mapped &&
          find_file(folder.text, ".packed", &copy));
    snprintf(away, sizeof away, "%s.away", copy.text);
    snprintf(lock, sizeof lock, "%s.lock", copy.text);
    CHECK(rename(copy.text, away) == 0);
    const int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    CHECK(fd >= 0 && flock(fd, LOCK_EX) == 0);
    const int output = open(said.text, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    pid_t child = fork();
    CHECK(output >= 0 && child >= 0);
    if (child == 0) {
        close(fd); /* the parent holds the lock */
        dup2(output, STDERR_FILENO);
        const struct result mine = run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, folder.text);
        _exit(mine.mapped && same(&plain, &mine) ? 0 : 1);
    }
    await_text(said.text, "waiting for weight cache");
    CHECK(rename(away, copy.text) == 0);
    CHECK(waitpid(child, &status, 0) == child); /* the lock is held until here */
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(output);
    close(fd);
}

/* The partial file of a process that was killed while it wrote does no harm. */
TEST(the_rest_of_a_killed_writer)
{
    const struct path model = golden("llama", "model");
    const char *folder = test_tmpdir();
    struct path copy, rest;
    char name[sizeof copy.text + 8];
    CHECK(run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, folder).mapped &&
          find_file(folder, ".packed", &copy));
    snprintf(name, sizeof name, "%s.new", copy.text);
    CHECK(rename(copy.text, name) == 0 && truncate(name, 5000) == 0);
    CHECK(run(model.text, ACTIVATIONS_FAST, QUANTIZE_NONE, folder).mapped &&
          find_file(folder, ".packed", &copy) && !find_file(folder, ".new", &rest));
}

TEST_MAIN(CASE_T(the_same_bits_and_the_bytes_of_this_version, 240),
          CASE_T(copies_side_by_side, 120), CASE_T(damaged_copies_are_made_anew, 240),
          CASE(changed_files_are_packed_anew), CASE(a_folder_that_is_none_is_no_fault_of_the_model),
          CASE(a_full_disk_is_no_fault_of_the_model), CASE_T(processes_at_once_share_one_copy, 240),
          CASE(waiting_ends_with_the_copy), CASE(the_rest_of_a_killed_writer))
