/* test_offline.c - batch files: order, malformed lines, a server that is full, files that cannot be used. */
#include <sys/stat.h>

#include "shared/offline/offline.h"
#include "tests/unit/serve/serve_rig.h"

struct run {
    bool        done;
    enum status st;
    uint64_t    n_ok, n_failed;
    char        text[512];
    struct buf  out;
};

static void on_done(void *arg, enum status st, uint64_t n_ok, uint64_t n_failed, const char *text)
{
    struct run *u = arg;
    CHECK(!u->done);
    u->done = true;
    u->st = st;
    u->n_ok = n_ok;
    u->n_failed = n_failed;
    snprintf(u->text, sizeof u->text, "%s", text);
}

static void write_file(const char *path, struct str text)
{
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(text.p, 1, text.n, f) == text.n);
    fclose(f);
}

static struct run run_batch(struct rig *r, struct str input, uint32_t concurrency)
{
    struct run u = { 0 };
    struct err err = { 0 };
    char in[512], out[512], partial[600];
    snprintf(in, sizeof in, "%s/in.jsonl", test_tmpdir());
    snprintf(out, sizeof out, "%s/out.jsonl", test_tmpdir());
    snprintf(partial, sizeof partial, "%s.partial", out);
    write_file(in, input);
    struct offline_options o = { .loop = r->loop, .serve = r->serve, .input = in, .output = out, .concurrency = concurrency, .done = on_done, .arg = &u };
    CHECK_OK(offline_start(&o, &err));
    for (int i = 0; i < 50000 && !u.done; i++) rig_turn(r);
    CHECK(u.done);
    FILE *f = fopen(out, "rb");
    CHECK(f != NULL);
    u.out.len += fread(buf_reserve(&u.out, 4 << 20), 1, 4 << 20, f);
    u.out.data[u.out.len] = 0;
    fclose(f);
    struct stat sb;
    CHECK(stat(partial, &sb) != 0);
    return u;
}

static cJSON *line_at(const struct run *u, int i)
{
    struct answer a = { .body = u->out };
    return event_at(&a, i);
}

TEST(answers_come_in_the_order_of_the_input)
{
    struct rig r;
    struct buf in = { 0 };
    rig_open(&r);
    rig_start(&r);
    enum { N = 150 };
    for (int i = 0; i < N; i++)
        buf_printf(&in, "{\"custom_id\":\"c%d\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":[5],\"max_tokens\":%d}}\n", i,
                   1 + (i * 7) % 20);
    struct run u = run_batch(&r, buf_str(&in), 5);
    CHECK_OK(u.st);
    CHECK_EQ_INT(u.n_ok, N);
    CHECK_EQ_INT(u.n_failed, 0);
    for (int i = 0; i < N; i++) {
        char id[16];
        cJSON *e = line_at(&u, i);
        snprintf(id, sizeof id, "c%d", i);
        CHECK_EQ_STR(string_at(e, "custom_id"), id);
        CHECK_EQ_INT(number_at(e, "response.status_code"), 200);
        CHECK(cJSON_IsNull(json_at(e, "error")));
        CHECK_EQ_STR(string_at(e, "response.body.object"), "text_completion");
        cJSON_Delete(e);
    }
    buf_release(&in);
    buf_release(&u.out);
    rig_close(&r);
}

TEST(bad_lines_do_not_stop_the_rest)
{
    static const char in[] =
        "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}}\r\n"
        "not json\n"
        "\n"
        "{\"custom_id\":\"b\",\"url\":\"/v1/embeddings\",\"body\":{}}\n"
        "{\"custom_id\":\"c\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"x\",\"stream\":true}}\n"
        "{\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"x\"}}\n"
        "{\"custom_id\":\"d\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"x\",\"top_p\":9}}\n"
        "{\"custom_id\":\"e\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"x\"}}";
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct run u = run_batch(&r, STR(in), 0);
    CHECK_OK(u.st);
    CHECK_EQ_INT(u.n_ok, 2);
    CHECK_EQ_INT(u.n_failed, 5);
    cJSON *e[7];
    for (int i = 0; i < 7; i++) CHECK((e[i] = line_at(&u, i)) != NULL);
    CHECK_EQ_STR(string_at(e[0], "response.body.choices.0.message.content"), "Hello there, world");
    CHECK(cJSON_IsNull(json_at(e[1], "custom_id")) && cJSON_IsNull(json_at(e[1], "response")));
    CHECK(strstr(string_at(e[1], "error.message"), "line 2: "));
    CHECK_EQ_STR(string_at(e[2], "custom_id"), "b");
    CHECK(strstr(string_at(e[2], "error.message"), "line 4: url"));
    CHECK(strstr(string_at(e[3], "error.message"), "stream"));
    CHECK(strstr(string_at(e[4], "error.message"), "custom_id is missing"));
    CHECK_EQ_INT(number_at(e[5], "response.status_code"), 400);
    CHECK_EQ_STR(string_at(e[5], "response.body.error.param"), "top_p");
    CHECK_EQ_STR(string_at(e[6], "custom_id"), "e");
    for (int i = 0; i < 7; i++) cJSON_Delete(e[i]);
    buf_release(&u.out);
    rig_close(&r);
}

TEST(full_server_is_asked_again)
{
    struct rig r;
    struct buf in = { 0 };
    rig_open(&r);
    rig_start(&r);
    r.fake.max_live = 2;
    for (int i = 0; i < 12; i++) buf_printf(&in, "{\"custom_id\":\"%d\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":[5]}}\n", i);
    struct run u = run_batch(&r, buf_str(&in), 8);
    CHECK_EQ_INT(u.n_ok, 12);
    buf_release(&in);
    buf_release(&u.out);
    rig_close(&r);
}

TEST(empty_input)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct run u = run_batch(&r, STR("\n \n"), 0);
    CHECK_OK(u.st);
    CHECK_EQ_INT(u.n_ok + u.n_failed, 0);
    CHECK_EQ_INT(u.out.len, 0);
    buf_release(&u.out);
    rig_close(&r);
}

TEST(files_that_cannot_be_used)
{
    struct rig r;
    struct err err = { 0 };
    struct run u = { 0 };
    rig_open(&r);
    rig_start(&r);
    struct offline_options o = { .loop = r.loop, .serve = r.serve, .input = "/nonexistent/in", .output = "-", .done = on_done, .arg = &u };
    CHECK_STATUS(offline_start(&o, &err), ERR_NOT_FOUND);
    CHECK(strstr(err.text, "/nonexistent/in"));
    o.input = "/dev/null";
    o.output = "/nonexistent/out";
    CHECK_STATUS(offline_start(&o, &err), ERR_NOT_FOUND);
    o.input = "/"; /* opens, but cannot be read */
    char out[512];
    snprintf(out, sizeof out, "%s/o", test_tmpdir());
    o.output = out;
    CHECK_OK(offline_start(&o, &err));
    for (int i = 0; i < 20000 && !u.done; i++) rig_turn(&r);
    CHECK_STATUS(u.st, ERR_IO);
    CHECK(strstr(u.text, "the input"));
    rig_close(&r);
}

TEST_MAIN(CASE(answers_come_in_the_order_of_the_input), CASE(bad_lines_do_not_stop_the_rest), CASE(full_server_is_asked_again), CASE(empty_input),
          CASE(files_that_cannot_be_used))
