/* test_gguf_split.c - a model in several GGUF files equals the model in one; the error names a file
 * that is missing, misplaced or there twice. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "shared/model/load/gguf_split.h"
#include "shared/model/load/weights.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/harness/test.h"

static struct err err;

static const char *file_name(const char *name)
{
    static char path[4096], root[2048];
    if (!root[0])
        snprintf(root, sizeof root, "%s", test_tmpdir()); /* every call creates a folder */
    snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

/* A file with one tensor, all of whose bytes are `byte`; count 0: without the keys of a part. */
static void write_part(const char *name, uint32_t no, uint32_t count, uint32_t n_tensors,
                       const char *tensor, uint8_t byte)
{
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    uint8_t data[64];
    memset(data, byte, sizeof data);
    if (count) {
        gguf_write_u32(&w, "split.no", no);
        gguf_write_u32(&w, "split.count", count);
        gguf_write_u32(&w, "split.tensors.count", n_tensors);
    }
    gguf_write_tensor(&w, tensor, 0, 1, (uint64_t[]){ 16 }, data, sizeof data);
    gguf_write_finish(&w, &b);
    FILE *f = fopen(file_name(name), "wb");
    CHECK(f && fwrite(b.data, 1, b.len, f) == b.len && fclose(f) == 0);
    buf_release(&b);
}

static void refuses(const char *name, enum status want, const char *words)
{
    struct gguf *g = NULL;
    err = (struct err){ 0 };
    CHECK_STATUS(gguf_open(file_name(name), &g, &err), want);
    if (!strstr(err.text, words))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text, words);
}

TEST(names)
{
    CHECK_EQ_INT(gguf_split_count(STR("dir/m-00001-of-00012.gguf")), 12);
    CHECK_EQ_INT(gguf_split_count(STR("-00001-of-00002.gguf")), 2);
    CHECK_EQ_INT(gguf_split_count(STR("m-00002-of-00012.gguf")), 0);
    CHECK_EQ_INT(gguf_split_count(STR("m-00001-of-0001x.gguf")), 0);
    CHECK_EQ_INT(gguf_split_count(STR("m.gguf")), 0);
    CHECK_EQ_INT(gguf_split_count(STR("")), 0);
}

TEST(tensors_of_all_files)
{
    struct gguf *g;
    write_part("m-00001-of-00003.gguf", 0, 3, 3, "a", 1);
    write_part("m-00002-of-00003.gguf", 1, 3, 3, "b", 2);
    write_part("m-00003-of-00003.gguf", 2, 3, 3, "c", 3);
    CHECK_OK(gguf_open(file_name("m-00001-of-00003.gguf"), &g, &err));
    CHECK_EQ_INT(g->n_tensors, 3);
    for (uint8_t i = 0; i < 3; i++) {
        CHECK_EQ_INT(g->tensors[i].name.p[0], 'a' + i);
        CHECK(g->tensors[i].data[0] == i + 1 && g->tensors[i].data[63] == i + 1 &&
              g->tensors[i].bytes == 64);
    }
    gguf_close(g);
    write_part("one.gguf", 0, 1, 1, "a", 1);
    CHECK_OK(gguf_open(file_name("one.gguf"), &g, &err));
    CHECK(g->n_tensors == 1 && g->n_others == 0);
    gguf_close(g);
}

TEST(faults)
{
    write_part("n-00001-of-00002.gguf", 0, 2, 2, "a", 1);
    refuses("n-00001-of-00002.gguf", ERR_NOT_FOUND, "n-00002-of-00002.gguf");
    write_part("n-00002-of-00002.gguf", 1, 2, 2, "a", 1);
    refuses("n-00001-of-00002.gguf", ERR_FORMAT, "tensor a is in two files");
    refuses("n-00002-of-00002.gguf", ERR_CONFIG, "is file 2 of 2 of a model: name the first");
    write_part("n-00002-of-00002.gguf", 0, 2, 2, "b", 1);
    refuses("n-00001-of-00002.gguf", ERR_FORMAT,
            "n-00002-of-00002.gguf: it does not say that it is file 2 of 2");
    write_part("n-00002-of-00002.gguf", 0, 0, 0, "b", 1);
    refuses("n-00001-of-00002.gguf", ERR_FORMAT, "file 2 of 2");
    write_part("n-00001-of-00002.gguf", 0, 2, 3, "a", 1);
    write_part("n-00002-of-00002.gguf", 1, 2, 3, "b", 1);
    refuses("n-00001-of-00002.gguf", ERR_FORMAT, "hold 2 tensors, split.tensors.count says 3");
    write_part("renamed.gguf", 0, 2, 2, "a", 1);
    refuses("renamed.gguf", ERR_CONFIG, "-00001-of-00002.gguf");
}

static uint64_t files_state(const char *name)
{
    struct weights *w;
    CHECK_OK(weights_open(file_name(name), &w, &err));
    uint64_t state = weights_files_state(w);
    weights_close(w);
    return state;
}

/* weights_files_state changes when any of the files is written to, whatever its new time. */
TEST(every_file_counts_for_their_state)
{
    write_part("s-00001-of-00003.gguf", 0, 3, 3, "a", 1);
    write_part("s-00002-of-00003.gguf", 1, 3, 3, "b", 2);
    write_part("s-00003-of-00003.gguf", 2, 3, 3, "c", 3);
    uint64_t before = files_state("s-00001-of-00003.gguf");
    CHECK(files_state("s-00001-of-00003.gguf") == before);
    for (int i = 1; i <= 3; i++) {
        const struct timespec later[2] = { { .tv_sec = 10000000000 + i },
                                           { .tv_sec = 10000000000 + i } };
        char name[32];
        snprintf(name, sizeof name, "s-%05d-of-00003.gguf", i);
        CHECK(utimensat(AT_FDCWD, file_name(name), later, 0) == 0);
        uint64_t after = files_state("s-00001-of-00003.gguf");
        CHECK(after != before);
        before = after;
    }
}

TEST_MAIN(CASE(names), CASE(tensors_of_all_files), CASE(faults),
          CASE(every_file_counts_for_their_state))
