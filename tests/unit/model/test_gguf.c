/* test_gguf.c - a file with all kinds of entries reads back; every malformed file is refused with
 * its error. */
#include "shared/model/load/gguf.h"

#include <string.h>

#include "shared/base/mem.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/harness/test.h"

static struct buf sample(void)
{
    static const float ones[64] = { 1, 1, 1 };
    static const char *const texts[] = { "a", "", "ccc" };
    static const int32_t ids[] = { 1, -2, 3 };
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    gguf_write_u32(&w, "num", 7);
    gguf_write_f32(&w, "real", 0.5f);
    gguf_write_bool(&w, "flag", true);
    gguf_write_text(&w, "text", "hello");
    gguf_write_texts(&w, "texts", texts, 3);
    gguf_write_i32s(&w, "ids", ids, 3);
    gguf_write_tensor(&w, "m", 0, 2, (uint64_t[]){ 4, 3 }, ones, 48);
    gguf_write_tensor(&w, "q", 8, 1, (uint64_t[]){ 32 }, ones, 34);
    gguf_write_finish(&w, &b);
    return b;
}

static void refuses(const struct buf *b, enum status want, const char *words)
{
    struct gguf *g;
    struct err err = { 0 };
    CHECK_STATUS(gguf_parse(buf_str(b), &g, &err), want);
    if (!strstr(err.text, words))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text, words);
}

TEST(values_read_back)
{
    struct gguf *g;
    struct err err;
    struct buf b = sample();
    CHECK_OK(gguf_parse(buf_str(&b), &g, &err));
    uint64_t u = 0;
    double d = 0;
    bool flag = false;
    struct str text = { 0 }, *texts;
    int32_t *ids;
    size_t n;
    CHECK_OK(gguf_get_u64(g, "num", 0, 10, &u, &err));
    CHECK_EQ_INT(u, 7);
    CHECK_OK(gguf_get_f64(g, "real", 0, 1, &d, &err));
    CHECK(d == 0.5);
    CHECK_OK(gguf_get_bool(g, "flag", &flag, &err));
    CHECK(flag);
    CHECK_OK(gguf_get_str(g, "text", &text, &err));
    CHECK(str_eq_c(text, "hello"));
    CHECK_OK(gguf_get_strs(g, "texts", &texts, &n, &err));
    CHECK(n == 3 && str_eq_c(texts[0], "a") && texts[1].n == 0 && str_eq_c(texts[2], "ccc"));
    CHECK_OK(gguf_get_i32s(g, "ids", &ids, &n, &err));
    CHECK(n == 3 && ids[0] == 1 && ids[1] == -2 && ids[2] == 3);
    mem_free(texts);
    mem_free(ids);
    CHECK_OK(gguf_get_u64(g, "absent", 0, 10, &u, &err));
    CHECK_EQ_INT(u, 7);
    CHECK_STATUS(gguf_get_u64(g, "num", 0, 6, &u, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "num");
    CHECK_STATUS(gguf_get_u64(g, "text", 0, 6, &u, &err), ERR_INVALID);
    CHECK_STATUS(gguf_get_str(g, "num", &text, &err), ERR_INVALID);
    CHECK_STATUS(gguf_get_strs(g, "ids", &texts, &n, &err), ERR_INVALID);
    CHECK_STATUS(gguf_get_i32s(g, "texts", &ids, &n, &err), ERR_INVALID);
    gguf_close(g);
    buf_release(&b);
}

TEST(tensors_read_back)
{
    struct gguf *g;
    struct err err;
    struct buf b = sample();
    CHECK_OK(gguf_parse(buf_str(&b), &g, &err));
    CHECK_EQ_INT(g->n_tensors, 2);
    CHECK(str_eq_c(g->tensors[0].name, "m") && g->tensors[0].ne[0] == 4 &&
          g->tensors[0].ne[1] == 3 && g->tensors[0].ne[2] == 1);
    CHECK_EQ_INT(g->tensors[0].bytes, 48);
    CHECK_EQ_INT(g->tensors[0].dtype, DTYPE_F32);
    CHECK_EQ_INT(g->tensors[1].bytes, 34);
    CHECK_EQ_STR(g->tensors[1].type_name, "Q8_0");
    CHECK_EQ_INT(g->tensors[1].data - g->tensors[0].data, 64);
    gguf_close(g);
    buf_release(&b);
}

TEST(every_type_with_arithmetic_is_known_by_its_number)
{
    static const struct {
        uint32_t id;
        int dtype;
    } TYPES[] = { { 0, DTYPE_F32 },
                  { 1, DTYPE_F16 },
                  { 2, DTYPE_Q4_0 },
                  { 3, DTYPE_Q4_1 },
                  { 6, DTYPE_Q5_0 },
                  { 7, DTYPE_Q5_1 },
                  { 8, DTYPE_Q8_0 },
                  { 10, DTYPE_Q2_K },
                  { 11, DTYPE_Q3_K },
                  { 12, DTYPE_Q4_K },
                  { 13, DTYPE_Q5_K },
                  { 14, DTYPE_Q6_K },
                  { 20, DTYPE_IQ4_NL },
                  { 23, DTYPE_IQ4_XS },
                  { 30, DTYPE_BF16 },
                  { 15, -1 },
                  { 19, -1 } };
    static const uint8_t zeros[1024];
    for (size_t i = 0; i < COUNT_OF(TYPES); i++) {
        struct gguf_write w = { 0 };
        struct buf b = { 0 };
        struct gguf *g;
        struct err err;
        size_t bytes = TYPES[i].dtype >= 0 ? dtype_row_bytes((enum dtype)TYPES[i].dtype, 256)
                       : TYPES[i].id == 15 ? 292
                                           : 50;
        gguf_write_tensor(&w, "t", TYPES[i].id, 1, (uint64_t[]){ 256 }, zeros, bytes);
        gguf_write_finish(&w, &b);
        CHECK_OK(gguf_parse(buf_str(&b), &g, &err));
        CHECK_EQ_INT(g->tensors[0].dtype, TYPES[i].dtype);
        CHECK_EQ_INT(g->tensors[0].bytes, bytes);
        gguf_close(g);
        buf_release(&b);
    }
}

TEST(every_shorter_file_is_refused)
{
    struct buf b = sample();
    for (size_t n = 0; n < b.len; n++) {
        struct buf cut = { 0 };
        struct gguf *g;
        struct err err;
        buf_add(&cut, b.data, n);
        CHECK(gguf_parse(buf_str(&cut), &g, &err) != OK);
        CHECK(err.text[0] != 0);
        buf_release(&cut);
    }
    buf_release(&b);
}

TEST(header_faults)
{
    struct buf b = sample();
    b.data[4] = 1;
    refuses(&b, ERR_UNSUPPORTED, "version 1");
    memcpy(b.data + 4, "\0\0\0\3", 4);
    refuses(&b, ERR_UNSUPPORTED, "big endian");
    memcpy(b.data + 4, "\3\0\0\0", 4);
    memset(b.data + 8, 0xff, 8);
    refuses(&b, ERR_FORMAT, "tensors");
    memset(b.data + 16, 0xff, 8);
    refuses(&b, ERR_FORMAT, "metadata pairs");
    b.data[0] = 'X';
    refuses(&b, ERR_FORMAT, "not a GGUF");
    buf_release(&b);
}

/* A file of one tensor with the given info; data of 4096 bytes follows. */
static struct buf one_tensor(const char *name, uint32_t n_dims, const uint64_t *ne, uint32_t type,
                             uint64_t offset, uint32_t alignment)
{
    struct buf b = { 0 };
    buf_add_c(&b, "GGUF");
    buf_add_u32le(&b, 3);
    buf_add_u64le(&b, 1);
    buf_add_u64le(&b, 1);
    gguf_write_str(&b, "general.alignment");
    buf_add_u32le(&b, 4);
    buf_add_u32le(&b, alignment);
    gguf_write_str(&b, name);
    buf_add_u32le(&b, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) buf_add_u64le(&b, ne[i]);
    buf_add_u32le(&b, type);
    buf_add_u64le(&b, offset);
    while (b.len < 256) buf_add_char(&b, 0);
    for (int i = 0; i < 4096; i++) buf_add_char(&b, 1);
    return b;
}

static void tensor_refused(const char *name, uint32_t n_dims, const uint64_t *ne, uint32_t type,
                           uint64_t offset, const char *words)
{
    struct buf b = one_tensor(name, n_dims, ne, type, offset, 256);
    refuses(&b, ERR_FORMAT, words);
    buf_release(&b);
}

TEST(tensor_faults)
{
    struct gguf *g;
    struct err err;
    struct buf good = one_tensor("t", 1, (uint64_t[]){ 64 }, 0, 256, 256);
    CHECK_OK(gguf_parse(buf_str(&good), &g, &err));
    gguf_close(g);
    buf_release(&good);
    struct buf odd = one_tensor("t", 1, (uint64_t[]){ 64 }, 0, 0, 24);
    refuses(&odd, ERR_FORMAT, "power of two");
    buf_release(&odd);
    tensor_refused("", 1, (uint64_t[]){ 64 }, 0, 0, "empty");
    tensor_refused("t", 0, (uint64_t[]){ 64 }, 0, 0, "dimensions");
    tensor_refused("t", 5, (uint64_t[]){ 1, 1, 1, 1, 1 }, 0, 0, "dimensions");
    tensor_refused("t", 2, (uint64_t[]){ 4, 0 }, 0, 0, "dimension is 0");
    tensor_refused("t", 1, (uint64_t[]){ 64 }, 99, 0, "type 99");
    tensor_refused("t", 1, (uint64_t[]){ 33 }, 8, 0, "blocks");
    tensor_refused("t", 1, (uint64_t[]){ 64 }, 0, 4, "alignment");
    tensor_refused("t", 1, (uint64_t[]){ 4096 }, 0, 0, "end of the file");
    tensor_refused("t", 1, (uint64_t[]){ 64 }, 0, 1ull << 40, "end of the file");
    tensor_refused("t", 3, (uint64_t[]){ 1ull << 40, 1ull << 40, 4 }, 0, 0,
                   "larger than any memory");
}

TEST(overlapping_and_repeated_tensors)
{
    float data[16] = { 0 };
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    /* claims 64 bytes, the next begins after 32 */
    gguf_write_tensor(&w, "one", 0, 1, (uint64_t[]){ 16 }, data, 32);
    gguf_write_tensor(&w, "two", 0, 1, (uint64_t[]){ 16 }, data, 64);
    gguf_write_finish(&w, &b);
    refuses(&b, ERR_FORMAT, "overlaps");
    buf_release(&b);
    struct gguf_write r = { 0 };
    gguf_write_tensor(&r, "one", 0, 1, (uint64_t[]){ 16 }, data, 64);
    gguf_write_tensor(&r, "one", 0, 1, (uint64_t[]){ 16 }, data, 64);
    gguf_write_finish(&r, &b);
    refuses(&b, ERR_FORMAT, "twice");
    buf_release(&b);
}

TEST(metadata_faults)
{
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    gguf_write_u32(&w, "a", 1);
    gguf_write_u32(&w, "a", 1);
    gguf_write_finish(&w, &b);
    refuses(&b, ERR_FORMAT, "twice");
    buf_clear(&b);
    w = (struct gguf_write){ 0 };
    gguf_write_key(&w, "a", 13);
    buf_add_u64le(&w.kvs, 0);
    gguf_write_finish(&w, &b);
    refuses(&b, ERR_FORMAT, "type 13");
    w = (struct gguf_write){ 0 };
    buf_clear(&b);
    gguf_write_key(&w, "a", 7);
    buf_add_u64le(&w.kvs, 2);
    gguf_write_finish(&w, &b);
    refuses(&b, ERR_FORMAT, "bool");
    w = (struct gguf_write){ 0 };
    buf_clear(&b);
    gguf_write_key(&w, "a", 9); /* arrays in arrays, deeper than allowed */
    for (int i = 0; i < 8; i++) {
        buf_add_u32le(&w.kvs, 9);
        buf_add_u64le(&w.kvs, 1);
    }
    gguf_write_finish(&w, &b);
    refuses(&b, ERR_FORMAT, "nested");
    buf_release(&b);
}

TEST_MAIN(CASE(values_read_back), CASE(tensors_read_back),
          CASE(every_type_with_arithmetic_is_known_by_its_number),
          CASE(every_shorter_file_is_refused), CASE(header_faults), CASE(tensor_faults),
          CASE(overlapping_and_repeated_tensors), CASE(metadata_faults))
