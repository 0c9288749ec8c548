/* test_expert_cache.c - the file of packed experts that all shares of a model have
 * (shared/model/load/expert_cache.h): whoever packs an expert adds it, whoever needs it maps it, and
 * what is damaged or half written is packed again. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/host/pages.h"
#include "shared/base/hash/hash.h"
#include "shared/model/expert_store.h"
#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/model_rig.h"

enum { N_IDS = 7 };

static const int32_t IDS[N_IDS] = { 3, 1, 4, 1, 5, 9, 2 };

/* ---- models ---- */

static struct kernel_ctx *open_kernels(void)
{
    struct kernel_ctx *k;
    CHECK_OK(kernel_ctx_create(kernel_options_default("auto", ACTIVATIONS_FAST, 2), &k, NULL));
    return k;
}

struct source {
    const char *path, *folder; /* of the checkpoint; of the caches */
    enum quantize quantize;
};

/* The experts [first, first + n) of one rank of three. */
static struct model *load(struct kernel_ctx *k, const struct source *s, uint32_t first, uint32_t n)
{
    struct model *m;
    struct err err;
    const struct model_share share = {
        .tp_size = 1, .first_expert = first, .n_experts = n, .ep_size = 3
    };
    const struct model_options o = {
        .path = s->path,
        .quantize = s->quantize,
        .max_rows = 4,
        .max_model_len = 64,
        .kernels = k,
        .weight_cache_folder = s->folder,
        .share = &share,
    };
    if (model_load(&o, &m, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return m;
}

/* Hash of the logits of a model that has all experts, of which *n_mapped are mapped. */
static uint64_t answer(const char *path, enum quantize quantize, const char *folder,
                       size_t *n_mapped)
{
    struct rig r;
    rig_open_packed(&r, path, "auto", ACTIVATIONS_FAST, quantize, folder);
    float *logits = MEM_ARRAY(float, (size_t)N_IDS *r.n_vocab);
    feed_all(&r, &(struct feed){ .table = 0, .ids = IDS, .n = N_IDS }, 1, logits);
    const uint64_t h = hash_64(logits, (size_t)N_IDS * r.n_vocab * sizeof *logits, 0);
    const struct model_experts *own = r.m->expert_store->own;
    *n_mapped = 0;
    for (size_t i = 0; i < own->n_sparse * (size_t)own->n_local; i++)
        *n_mapped += own->slots[i]->is_mapped;
    mem_free(logits);
    rig_close(&r);
    return h;
}

static uint64_t plain_answer(const char *path, enum quantize quantize)
{
    size_t n_mapped;
    const uint64_t h = answer(path, quantize, NULL, &n_mapped);
    CHECK_EQ_INT(n_mapped, 0);
    return h;
}

/* ---- the file ---- */

static struct path file_in(const char *folder)
{
    DIR *d = opendir(folder);
    struct path p;
    int n = 0;
    CHECK(d != NULL);
    for (const struct dirent *e; (e = readdir(d));) {
        CHECK(!str_ends(str_of(e->d_name), ".new"));
        if (!str_ends(str_of(e->d_name), ".experts")) continue;
        checkpoint_print(p.text, sizeof p.text, "%s/%s", folder, e->d_name);
        n++;
    }
    closedir(d);
    CHECK_EQ_INT(n, 1);
    return p;
}

struct contents {
    struct buf bytes;
    const struct expert_cache_header *head;
    const struct expert_cache_entry *table;
    size_t n_entries; /* that are there */
    uint64_t end;     /* of all experts, side by side and once each */
    uint64_t hash;    /* of their shapes and bytes */
};

static struct contents read_cache(const char *path)
{
    struct contents c = { 0 };
    CHECK_OK(file_read(path, 1 << 30, &c.bytes, NULL));
    c.head = (const struct expert_cache_header *)(const void *)c.bytes.data;
    c.table = (const struct expert_cache_entry *)(c.head + 1);
    c.end = pages_round(sizeof *c.head + c.head->n * sizeof *c.table);
    for (uint32_t i = 0; i < c.head->n; i++) {
        const struct expert_cache_entry *e = &c.table[i];
        if (!e->check) continue;
        c.n_entries++;
        c.end += e->gate_up.bytes + e->down.bytes;
        c.hash = hash_64(&e->gate_up, 2 * sizeof e->gate_up, c.hash);
        c.hash = hash_64(&e->hash, sizeof e->hash, c.hash);
    }
    return c;
}

static size_t n_entries(const char *path)
{
    struct contents c = read_cache(path);
    const size_t n = c.n_entries;
    CHECK_EQ_INT(c.head->end, c.end);
    buf_release(&c.bytes);
    return n;
}

static struct path sub_folder(const char *name)
{
    struct path p;
    checkpoint_print(p.text, sizeof p.text, "%s/%s", test_tmpdir(), name);
    return p;
}

/* ---- all shares together ---- */

/* Hashes of shapes and bytes for WEIGHT_CACHE_VERSION, as in test_weight_cache.c. */
static const struct {
    const char *model;
    enum quantize quantize;
    uint64_t hash;
} BYTES[] = {
    { "qwen3_moe", QUANTIZE_WINT4, 0x0a708c9ce1164225 },
    { "ernie_moe", QUANTIZE_BLOCK_FP8, 0x916f8d037f452d47 },
    { "mixtral", QUANTIZE_WINT8, 0xed3796c909086e27 },
    { "deepseek_v3", QUANTIZE_NONE, 0xfb7a7a96de5cfc7e },
    { "deepseek_v3_fp8", QUANTIZE_NONE, 0xe25f528f4a03f937 },
};

TEST(shares_fill_one_file_from_which_a_whole_model_is_mapped)
{
    struct kernel_ctx *k = open_kernels();
    bool changed = false;
    for (size_t i = 0; i < COUNT_OF(BYTES); i++) {
        const struct path p = golden(BYTES[i].model, "model"), folder = sub_folder(BYTES[i].model);
        const struct source s = { p.text, folder.text, BYTES[i].quantize };
        const uint64_t want = plain_answer(p.text, BYTES[i].quantize);
        size_t n_mapped, layers = 0, n = 0;
        for (uint32_t first = 0; first == 0 || first < n; first += 3) {
            struct model *m = load(k, &s, first,
                                   first == 0 || n - first > 3 ? 3 : (uint32_t)n - first);
            n = m->config.moe.n_experts;
            layers = m->expert_store->n_sparse;
            CHECK(m->mapped_bytes > 0);
            model_free(m);
            CHECK_EQ_INT(n_entries(file_in(folder.text).text),
                         layers * (first + 3 < n ? first + 3 : n));
        }
        CHECK(answer(p.text, BYTES[i].quantize, folder.text, &n_mapped) == want);
        CHECK_EQ_INT(n_mapped, layers * n);
        struct contents c = read_cache(file_in(folder.text).text);
        if (c.hash != BYTES[i].hash)
            fprintf(stderr, "%s: the experts' hash is 0x%016llx\n", BYTES[i].model,
                    (unsigned long long)c.hash);
        changed = changed || c.hash != BYTES[i].hash;
        CHECK_EQ_INT(c.head->end, c.end); /* the whole model added nothing */
        buf_release(&c.bytes);
    }
    kernel_ctx_free(k);
    if (changed)
        test_fail(__FILE__, __LINE__,
                  "packed bytes have changed: raise WEIGHT_CACHE_VERSION and write the hashes "
                  "above into this test");
}

TEST(a_whole_model_fills_the_file_for_shares)
{
    struct kernel_ctx *k = open_kernels();
    const struct path p = golden("ernie_moe", "model");
    const struct source s = { p.text, test_tmpdir(), QUANTIZE_NONE };
    size_t n_mapped;
    CHECK(answer(p.text, QUANTIZE_NONE, s.folder, &n_mapped) ==
          plain_answer(p.text, QUANTIZE_NONE));
    CHECK_EQ_INT(n_mapped, 3 * 8);
    struct model *m = load(k, &s, 2, 5);
    for (size_t i = 0; i < 3 * 5; i++) CHECK(m->expert_store->own->slots[i]->is_mapped);
    CHECK(m->weight_bytes - m->mapped_bytes < 64 << 10); /* norms */
    model_free(m);
    kernel_ctx_free(k);
}

/* ---- taking over is a map ---- */

static size_t take(struct model *m, int32_t first, int32_t n)
{
    int32_t logical[KERNEL_EXPERTS_MAX];
    struct model_experts *x;
    size_t n_mapped = 0;
    for (int32_t i = 0; i < n; i++) logical[i] = first + i;
    CHECK_OK(
        model_experts_take(m, &(struct experts_wanted){ logical, 1, n, NULL, NULL }, &x, NULL));
    for (size_t i = 0; i < x->n_sparse * (size_t)n; i++) n_mapped += x->slots[i]->is_mapped;
    model_experts_drop(m, x);
    return n_mapped;
}

/* Parts of the file that this process has mapped, besides its table. */
static size_t n_maps(void)
{
    char line[4096];
    size_t n = 0;
    FILE *f = fopen("/proc/self/maps", "re");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f)) n += strstr(line, ".experts\n") && !strstr(line, " rw-s ");
    fclose(f);
    return n;
}

TEST(experts_that_another_rank_packed_are_mapped)
{
    struct kernel_ctx *k = open_kernels();
    const struct path p = golden("ernie_moe", "model");
    const struct source s = { p.text, test_tmpdir(), QUANTIZE_WINT8 };
    struct model *a = load(k, &s, 0, 3), *b = load(k, &s, 3, 3);
    CHECK_EQ_INT(n_entries(file_in(s.folder).text), 3 * 6);
    CHECK_EQ_INT(take(a, 0, 6), 3 * 6);
    CHECK_EQ_INT(n_entries(file_in(s.folder).text), 3 * 6);
    CHECK_EQ_INT(take(a, 4, 4), 3 * 4); /* 6 and 7 are packed, added and mapped, too */
    CHECK_EQ_INT(n_entries(file_in(s.folder).text), 3 * 8);
    struct contents c = read_cache(file_in(s.folder).text);
    const uint64_t end = c.head->end;
    buf_release(&c.bytes);
    CHECK_EQ_INT(take(b, 0, 8), 3 * 8);
    c = read_cache(file_in(s.folder).text);
    CHECK_EQ_INT(c.head->end, end);
    buf_release(&c.bytes);
    CHECK(n_maps() > 0);
    model_free(a);
    model_free(b);
    CHECK(n_maps() == 0);
    kernel_ctx_free(k);
}

/* ---- what is refused ---- */

static void flip(const char *path, off_t at)
{
    uint8_t byte;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 0x20;
    CHECK(pwrite(fd, &byte, 1, at) == 1);
    close(fd);
}

TEST(what_is_damaged_is_packed_again)
{
    enum { HEAD = sizeof(struct expert_cache_header), ENTRY = sizeof(struct expert_cache_entry) };
    static const struct {
        const char *what;
        off_t at, length; /* length 0: flip a bit at `at`; below: truncate to it */
    } DAMAGES[] = {
        { "a bit of an expert", 4096 * 3 + 100, 0 },
        { "a bit of the table", HEAD + 5 * ENTRY + offsetof(struct expert_cache_entry, at), 0 },
        { "a shape", HEAD + offsetof(struct expert_cache_entry, down.n_in), 0 },
        { "a check", HEAD + 3 * ENTRY + offsetof(struct expert_cache_entry, check), 0 },
        { "the kind", 1, 0 },
        { "the version", offsetof(struct expert_cache_header, version), 0 },
        { "the files' state", offsetof(struct expert_cache_header, key.files), 0 },
        { "the end, which is less", offsetof(struct expert_cache_header, end) + 1, 0 },
        { "nothing is left", 0, -1 },
        { "cut in the table", 0, 200 },
        { "cut in the experts", 0, 4096 * 20 },
    };
    const struct path p = golden("ernie_moe", "model");
    const char *folder = test_tmpdir();
    const uint64_t want = plain_answer(p.text, QUANTIZE_NONE);
    size_t n_mapped;
    CHECK(answer(p.text, QUANTIZE_NONE, folder, &n_mapped) == want);
    for (size_t i = 0; i < COUNT_OF(DAMAGES); i++) {
        const struct path file = file_in(folder);
        if (DAMAGES[i].length)
            CHECK(truncate(file.text, DAMAGES[i].length < 0 ? 0 : DAMAGES[i].length) == 0);
        else flip(file.text, DAMAGES[i].at);
        for (int again = 0; again < 2; again++)
            if (answer(p.text, QUANTIZE_NONE, folder, &n_mapped) != want || n_mapped != 3 * 8)
                test_fail(__FILE__, __LINE__, "%s: %zu experts are mapped", DAMAGES[i].what,
                          n_mapped);
        struct contents c = read_cache(file_in(folder).text);
        CHECK_EQ_INT(c.n_entries, 3 * 8);
        buf_release(&c.bytes);
    }
}

TEST(a_folder_that_is_none_and_a_full_disk_are_no_fault_of_the_model)
{
    const struct path p = golden("ernie_moe", "model");
    const uint64_t want = plain_answer(p.text, QUANTIZE_NONE);
    size_t n_mapped;
    CHECK(answer(p.text, QUANTIZE_NONE, "/dev/null/copies", &n_mapped) == want && n_mapped == 0);
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 200000, 200000 }) == 0);
    const char *folder = test_tmpdir();
    CHECK(answer(p.text, QUANTIZE_NONE, folder, &n_mapped) == want && n_mapped > 0 &&
          n_mapped < 3 * 8);
    CHECK(answer(p.text, QUANTIZE_NONE, folder, &n_mapped) == want);
}

/* ---- several at once ---- */

TEST(processes_at_once_pack_each_expert_once)
{
    enum { N = 4, ROUNDS = 3 };
    const struct path p = golden("deepseek_v3", "model");
    const uint64_t want = plain_answer(p.text, QUANTIZE_WINT4);
    for (int round = 0; round < ROUNDS; round++) {
        char name[32];
        pid_t children[N];
        snprintf(name, sizeof name, "round%d", round);
        const struct path folder = sub_folder(name);
        for (int i = 0; i < N; i++) {
            size_t n_mapped;
            children[i] = fork();
            CHECK(children[i] >= 0);
            if (children[i] > 0) continue;
            _exit(answer(p.text, QUANTIZE_WINT4, folder.text, &n_mapped) == want &&
                          n_mapped == 2 * 16
                      ? 0
                      : 1);
        }
        for (int i = 0; i < N; i++) {
            int status;
            CHECK(waitpid(children[i], &status, 0) == children[i]);
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        CHECK_EQ_INT(n_entries(file_in(folder.text).text), 2 * 16);
    }
}

enum { PAGE = 4096 };

static const struct expert_weights PLAN = {
    .gate_up = { .layout = 1, .paired = true, .n_out = 32, .n_in = 32, .bytes = PAGE },
    .down = { .layout = 1, .n_out = 32, .n_in = 16, .bytes = PAGE },
};

static struct expert_cache *open_cache(const char *folder)
{
    struct expert_cache *c = expert_cache_open(&(struct expert_cache_options){
        .folder = folder, .name = "some", .key = { 1, 2 }, .n = 4 });
    CHECK(c != NULL);
    return c;
}

static struct expert_weights pack(int byte)
{
    struct expert_weights w = PLAN;
    w.gate_up.data = memset(pages_map(PAGE), byte, PAGE);
    w.down.data = memset(pages_map(PAGE), byte + 1, PAGE);
    return w;
}

/* A process that claims entry 2, says so, and packs it after a byte from `go`. */
static pid_t start_writer(const char *folder, int said, int go)
{
    const pid_t child = fork();
    char byte = 0;
    struct expert_weights w;
    CHECK(child >= 0);
    if (child > 0) return child;
    struct expert_cache *c = open_cache(folder);
    CHECK(!expert_cache_claim(c, 2, &PLAN, &w, NULL, NULL));
    CHECK(write(said, &byte, 1) == 1 && read(go, &byte, 1) == 1);
    w = pack(7);
    CHECK(expert_cache_put(c, &w));
    _exit(0);
}

static bool stop_after_a_while(void *arg)
{
    int *n = arg;
    return ++*n < 20;
}

TEST(others_wait_for_who_packs_an_expert)
{
    const char *folder = test_tmpdir();
    int said[2], go[2], status, n = 0;
    char byte = 0;
    struct expert_weights w, other;
    CHECK(pipe(said) == 0 && pipe(go) == 0);
    const pid_t child = start_writer(folder, said[1], go[0]);
    CHECK(read(said[0], &byte, 1) == 1);
    struct expert_cache *c = open_cache(folder);
    CHECK(!expert_cache_claim(c, 2, &PLAN, &w, stop_after_a_while, &n) && n == 20);
    other = pack(1);
    CHECK(!expert_cache_put(c, &other));                     /* nothing was claimed */
    CHECK(!expert_cache_claim(c, 1, &PLAN, &w, NULL, NULL)); /* another entry */
    CHECK(expert_cache_put(c, &other) && ((const char *)other.down.data)[9] == 2);
    CHECK(write(go[1], &byte, 1) == 1);
    CHECK(expert_cache_claim(c, 2, &PLAN, &w, NULL, NULL));
    CHECK(((const char *)w.gate_up.data)[PAGE - 1] == 7 && ((const char *)w.down.data)[0] == 8);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    expert_cache_close(c);
    CHECK(((const char *)w.gate_up.data)[0] == 7);
}

TEST(a_process_that_is_killed_keeps_nobody_waiting)
{
    const char *folder = test_tmpdir();
    int said[2], go[2], status;
    char byte = 0;
    struct expert_weights w;
    CHECK(pipe(said) == 0 && pipe(go) == 0);
    const pid_t child = start_writer(folder, said[1], go[0]);
    CHECK(read(said[0], &byte, 1) == 1);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    struct expert_cache *c = open_cache(folder);
    CHECK(!expert_cache_map(c, 2, &PLAN, &w));
    CHECK(!expert_cache_claim(c, 2, &PLAN, &w, NULL, NULL));
    w = pack(3);
    CHECK(expert_cache_put(c, &w) && expert_cache_map(c, 2, &PLAN, &w));
    CHECK(((const char *)w.down.data)[5] == 4);
    expert_cache_close(c);
}

/* Waits until all of n processes are here. */
static void meet(atomic_int *here, int n)
{
    atomic_fetch_add(here, 1);
    while (atomic_load(here) < n) usleep(100);
}

/* The file is of a checkpoint that has changed since: they agree on one that replaces it, so what
 * each adds is there for all. */
TEST(processes_at_once_replace_a_file_once)
{
    enum { N = 4, ROUNDS = 20 };
    atomic_int *here = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(here != MAP_FAILED);
    for (int round = 0; round < ROUNDS; round++) {
        char name[32];
        pid_t children[N];
        struct expert_weights w;
        snprintf(name, sizeof name, "stale%d", round);
        const struct path folder = sub_folder(name);
        expert_cache_close(expert_cache_open(&(struct expert_cache_options){
            .folder = folder.text, .name = "some", .key = { 1, 1 }, .n = 4 }));
        atomic_store(here, 0);
        for (int i = 0; i < N; i++) {
            children[i] = fork();
            CHECK(children[i] >= 0);
            if (children[i] > 0) continue;
            meet(here, N);
            struct expert_cache *c = open_cache(folder.text);
            CHECK(!expert_cache_claim(c, (uint32_t)i, &PLAN, &w, NULL, NULL));
            w = pack(10 * i);
            CHECK(expert_cache_put(c, &w));
            _exit(0);
        }
        for (int i = 0; i < N; i++) {
            int status;
            CHECK(waitpid(children[i], &status, 0) == children[i]);
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        struct expert_cache *c = open_cache(folder.text);
        for (uint32_t i = 0; i < N; i++) CHECK(expert_cache_map(c, i, &PLAN, &w));
        expert_cache_close(c);
        (void)file_in(folder.text); /* and nothing beside it */
    }
    munmap(here, 4096);
}

TEST_MAIN(CASE(processes_at_once_replace_a_file_once),
          CASE_T(shares_fill_one_file_from_which_a_whole_model_is_mapped, 240),
          CASE(a_whole_model_fills_the_file_for_shares),
          CASE(experts_that_another_rank_packed_are_mapped),
          CASE_T(what_is_damaged_is_packed_again, 120),
          CASE(a_folder_that_is_none_and_a_full_disk_are_no_fault_of_the_model),
          CASE_T(processes_at_once_pack_each_expert_once, 240),
          CASE(others_wait_for_who_packs_an_expert),
          CASE(a_process_that_is_killed_keeps_nobody_waiting))
