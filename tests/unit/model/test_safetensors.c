/* test_safetensors.c - the rules of the format one by one, and folders with an index. */
#include "shared/model/load/safetensors.h"

#include <stdio.h>
#include <string.h>

#include "tests/harness/test.h"

static void put(struct buf *b, const char *header, size_t n_data)
{
    buf_clear(b);
    buf_add_u64le(b, strlen(header));
    buf_add_c(b, header);
    for (size_t i = 0; i < n_data; i++) buf_add_char(b, (char)i);
}

static void refuses(const char *header, size_t n_data, const char *words)
{
    struct buf b = { 0 };
    struct safetensors *s;
    struct err err = { 0 };
    put(&b, header, n_data);
    CHECK_STATUS(safetensors_parse(buf_str(&b), &s, &err), ERR_FORMAT);
    if (!strstr(err.text, words))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text, words);
    buf_release(&b);
}

#define A16 "\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}"

TEST(tensors_read_back)
{
    struct buf b = { 0 };
    struct safetensors *s;
    struct err err;
    put(&b,
        "{\"__metadata__\":{\"format\":\"pt\"}," A16
        ",\"s\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[16,18]},"
        "\"z\":{\"dtype\":\"I64\",\"shape\":[0,5],\"data_offsets\":[16,16]}}   ",
        18);
    CHECK_OK(safetensors_parse(buf_str(&b), &s, &err));
    CHECK_EQ_INT(s->n_tensors, 3);
    const struct safetensors_tensor *a = map_get(&s->by_name, STR("a")),
                                    *scalar = map_get(&s->by_name, STR("s"));
    CHECK(a && a->n_dims == 2 && a->shape[0] == 2 && a->bytes == 16 && a->dtype == DTYPE_F32 &&
          a->data[5] == 5);
    CHECK(scalar && scalar->n_dims == 0 && scalar->bytes == 2 && scalar->data[0] == 16);
    safetensors_close(s);
    buf_release(&b);
}

TEST(types_have_their_arithmetic)
{
    struct buf b = { 0 };
    struct safetensors *s;
    struct err err;
    put(&b,
        "{\"e\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[0,2]},\"u\":{\"dtype\":"
        "\"U16\",\"shape\":[1],\"data_offsets\":[2,4]},"
        "\"i\":{\"dtype\":\"I16\",\"shape\":[1],\"data_offsets\":[4,6]}}",
        6);
    CHECK_OK(safetensors_parse(buf_str(&b), &s, &err));
    const struct safetensors_tensor *e = map_get(&s->by_name, STR("e")),
                                    *u = map_get(&s->by_name, STR("u")),
                                    *i = map_get(&s->by_name, STR("i"));
    CHECK(e && e->dtype == DTYPE_F8_E4M3);
    CHECK(u && u->dtype == DTYPE_BF16); /* Paddle's bf16 */
    CHECK(i && i->dtype == -1);
    safetensors_close(s);
    buf_release(&b);
}

TEST(rules)
{
    refuses("[]", 0, "JSON object");
    refuses(" {}", 0, "JSON object");
    refuses("{", 0, "JSON");
    refuses("{\"a\":1}", 0, "not an object");
    refuses("{\"__metadata__\":{\"n\":1}}", 0, "string");
    refuses("{" A16 "," A16 "}", 16, "");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,15]}}", 15,
            "length of its data");
    refuses("{\"a\":{\"dtype\":\"F33\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 16, "dtype");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[2,-2],\"data_offsets\":[0,16]}}", 16, "size");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[2,1.5],\"data_offsets\":[0,12]}}", 12, "size");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[4503599627370496,4503599627370496],\"data_"
            "offsets\":[0,0]}}",
            0, "larger than any memory");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
            "dimensions");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4,
            "end of the file");
    refuses("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "positions");
    refuses("{" A16 "}", 12, "end of the file");
    refuses("{" A16 "}", 20, "end 4 bytes before");
    refuses("{" A16 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[20,24]}}", 24,
            "hole");
    refuses("{" A16 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}}", 16,
            "overlaps");
}

TEST(short_files)
{
    struct safetensors *s;
    struct err err;
    CHECK_STATUS(safetensors_parse((struct str){ "", 0 }, &s, &err), ERR_FORMAT);
    CHECK_STATUS(safetensors_parse((struct str){ "\x02\0\0\0\0\0\0\0{", 9 }, &s, &err), ERR_FORMAT);
    CHECK_STATUS(
        safetensors_parse((struct str){ "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10 }, &s, &err),
        ERR_FORMAT);
}

static void write_file(const char *folder, const char *name, struct str text)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(text.p, 1, text.n, f) == text.n && fclose(f) == 0);
}

TEST(shards_are_joined_by_the_index)
{
    const char *dir = test_tmpdir();
    struct safetensors_set set;
    struct err err;
    struct buf b = { 0 };
    put(&b, "{" A16 "}", 16);
    write_file(dir, "m-1.safetensors", buf_str(&b));
    put(&b, "{\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3);
    write_file(dir, "m-2.safetensors", buf_str(&b));
    write_file(dir, "model.safetensors.index.json",
               STR("{\"weight_map\":{\"b\":\"m-2.safetensors\",\"a\":\"m-1.safetensors\"}}"));
    CHECK_OK(safetensors_set_open(dir, &set, &err));
    CHECK_EQ_INT(set.n_files, 2);
    CHECK_EQ_INT(set.n_tensors, 2);
    CHECK_EQ_STR(set.tensors[0]->name, "b");
    safetensors_set_close(&set);
    write_file(dir, "model.safetensors.index.json",
               STR("{\"weight_map\":{\"c\":\"m-2.safetensors\"}}"));
    CHECK_STATUS(safetensors_set_open(dir, &set, &err), ERR_FORMAT);
    CHECK(strstr(err.text, "tensor c is not in m-2.safetensors") != NULL);
    write_file(dir, "model.safetensors.index.json",
               STR("{\"weight_map\":{\"b\":\"../m-2.safetensors\"}}"));
    CHECK_STATUS(safetensors_set_open(dir, &set, &err), ERR_FORMAT);
    write_file(dir, "model.safetensors.index.json",
               STR("{\"weight_map\":{\"b\":\"m-3.safetensors\"}}"));
    CHECK_STATUS(safetensors_set_open(dir, &set, &err), ERR_NOT_FOUND);
    buf_release(&b);
}

TEST_MAIN(CASE(tensors_read_back), CASE(types_have_their_arithmetic), CASE(rules),
          CASE(short_files), CASE(shards_are_joined_by_the_index))
