/* test_batch_runner.c - batch files: order, malformed lines, a server that is full, files that
 * cannot be used. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deploy/generate/batch_runner.h"
#include "deploy/generate/batch_tally.h"
#include "tests/unit/serve/serve_rig.h"

struct run {
    bool done;
    enum status st;
    uint64_t n_ok, n_failed;
    char text[2048];
    struct buf out;
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

static struct batch_runner_options options; /* of run_batch, beside its arguments */

static struct run run_batch(struct rig *r, struct str input, uint32_t concurrency)
{
    struct run u = { 0 };
    struct err err = { 0 };
    struct batch_runner *batch;
    char in[512], out[512], partial[600];
    snprintf(in, sizeof in, "%s/in.jsonl", test_tmpdir());
    snprintf(out, sizeof out, "%s/out.jsonl", test_tmpdir());
    snprintf(partial, sizeof partial, "%s.partial", out);
    write_file(in, input);
    struct batch_runner_options o = {
        .loop = r->loop,
        .serve = r->serve,
        .input = in,
        .output = out,
        .concurrency = concurrency,
        .raw = options.raw,
        .max_tokens = options.max_tokens,
        .temperature = options.temperature,
        .ignore_model = options.ignore_model,
        .done = on_done,
        .arg = &u,
    };
    CHECK_OK(batch_runner_start(&o, &batch, &err));
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
        buf_printf(&in,
                   "{\"custom_id\":\"c%d\",\"method\":\"POST\",\"url\":\"/v1/"
                   "completions\",\"body\":{\"prompt\":[5],\"max_tokens\":%d}}\n",
                   i, 1 + (i * 7) % 20);
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

TEST(prompts_one_per_line)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (int raw = 0; raw < 2; raw++) {
        options = (struct batch_runner_options){ .raw = raw, .max_tokens = 7, .temperature = 0.5 };
        struct run u = run_batch(&r, STR("What is \"x\"?\n\n  {\"name\":\"a\"}  \r\nlast"), 1);
        CHECK_OK(u.st);
        CHECK_EQ_INT(u.n_ok, 3);
        for (int i = 0; i < 3; i++) {
            static const char *const ids[] = { "1", "3", "4" };
            cJSON *e = line_at(&u, i);
            CHECK_EQ_STR(string_at(e, "custom_id"), ids[i]);
            CHECK_EQ_STR(string_at(e, "response.body.object"),
                         raw ? "text_completion" : "chat.completion");
            cJSON_Delete(e);
        }
        CHECK_EQ_INT(r.fake.last.sampling.max_tokens, 7);
        CHECK_NEAR(r.fake.last.sampling.temperature, 0.5, 0);
        buf_release(&u.out);
    }
    options = (struct batch_runner_options){ 0 };
    rig_close(&r);
}

#define MARK "\xef\xbb\xbf" /* with which editors of Windows begin a file */

TEST(a_byte_order_mark_is_skipped)
{
    static const char in[] = MARK "{\"custom_id\":\"a\",\"url\":\"/v1/completions\",\"body\":{"
                                  "\"prompt\":\"x\"}}\n" MARK "{}";
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct run u = run_batch(&r, STR(in), 1);
    cJSON *e = line_at(&u, 0);
    CHECK_OK(u.st);
    CHECK_EQ_STR(string_at(e, "custom_id"), "a");
    CHECK_EQ_INT(u.n_ok, 1);
    CHECK_EQ_INT(u.n_failed, 1); /* only a file's first line may have one */
    cJSON_Delete(e);
    buf_release(&u.out);
    rig_close(&r);
}

/* Not a line of it becomes a prompt, and the output does not get its name. */
TEST(a_file_of_another_format_ends_the_run)
{
    static const struct str inputs[] = { STR("\n[\n{\"custom_id\":\"a\"}\n]\n"),
                                         STR("\n\xff\xfe{\0\n\0"),
                                         STR("Who?\n{\"custom_id\":\"a\",\"body\":{}}\nWhy?\n"),
                                         STR("Who?\n{\"messages\":[]}") };
    struct rig r;
    char in[512], out[512];
    struct stat s;
    rig_open(&r);
    rig_start(&r);
    snprintf(in, sizeof in, "%s/in.jsonl", test_tmpdir());
    snprintf(out, sizeof out, "%s/refused.jsonl", test_tmpdir());
    for (size_t i = 0; i < COUNT_OF(inputs); i++) {
        struct run u = { 0 };
        struct err err = { 0 };
        struct batch_runner *batch;
        struct batch_runner_options o = {
            .loop = r.loop, .serve = r.serve, .input = in, .output = out, .done = on_done, .arg = &u
        };
        write_file(in, inputs[i]);
        CHECK_OK(batch_runner_start(&o, &batch, &err));
        for (int turn = 0; turn < 20000 && !u.done; turn++) rig_turn(&r);
        CHECK_STATUS(u.st, ERR_FORMAT);
        CHECK_EQ_INT(u.n_ok + u.n_failed, 0);
        CHECK(strstr(u.text, i < 2 ? "/in.jsonl, line 2: the file is "
                                   : "/in.jsonl, line 2: a JSON object, but line 1 made this a "));
        CHECK(stat(out, &s) != 0);
    }
    rig_close(&r);
}

/* Far from the beginning it fails alone: no answer before it is lost. */
TEST(a_batch_line_among_prompts_is_no_prompt)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    options = (struct batch_runner_options){ .max_tokens = 2 };
    struct run u = run_batch(&r, STR("Who?\nWhy?\n{\"body\":{}}\nWhen?"), 1);
    cJSON *e = line_at(&u, 2);
    CHECK_OK(u.st);
    CHECK_EQ_INT(u.n_ok, 3);
    CHECK(strstr(string_at(e, "error.message"), "line 3: a JSON object, but line 1 made this a "));
    cJSON_Delete(e);
    buf_release(&u.out);
    options = (struct batch_runner_options){ 0 };
    rig_close(&r);
}

TEST(a_missing_url_is_called_missing)
{
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    struct run u = run_batch(&r, STR("{\"custom_id\":\"a\",\"body\":{\"prompt\":\"x\"}}"), 1);
    cJSON *e = line_at(&u, 0);
    CHECK(strstr(string_at(e, "error.message"),
                 "line 1: url is missing; it must be /v1/chat/completions or /v1/completions"));
    cJSON_Delete(e);
    buf_release(&u.out);
    rig_close(&r);
}

TEST(lines_that_name_another_model)
{
    static const char in[] = "{\"custom_id\":\"a\",\"url\":\"/v1/completions\",\"body\":{\"model\":"
                             "\"gpt-9\",\"prompt\":\"x\"}}\n";
    struct rig r;
    rig_open(&r);
    rig_start(&r);
    for (int ignore = 0; ignore < 2; ignore++) {
        options.ignore_model = ignore;
        struct run u = run_batch(&r, STR(in), 1);
        CHECK_EQ_INT(u.n_ok, ignore);
        CHECK_EQ_INT(u.n_failed, !ignore);
        cJSON *e = line_at(&u, 0);
        if (!ignore) {
            CHECK(strstr(string_at(e, "error.message"), "; --ignore-model answers such lines too"));
            CHECK(strstr(u.text, "; --ignore-model answers such lines too (first in line 1)"));
        }
        cJSON_Delete(e);
        buf_release(&u.out);
    }
    options = (struct batch_runner_options){ 0 };
    rig_close(&r);
}

TEST(bad_lines_do_not_stop_the_rest)
{
    static const char in[] =
        "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/"
        "completions\",\"body\":{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}}\r\n"
        "not json\n"
        "\n"
        "{\"custom_id\":\"b\",\"url\":\"/v1/embeddings\",\"body\":{}}\n"
        "{\"custom_id\":\"c\",\"url\":\"/v1/"
        "completions\",\"body\":{\"prompt\":\"x\",\"stream\":true}}\n"
        "{\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"x\"}}\n"
        "{\"custom_id\":\"d\",\"url\":\"/v1/"
        "completions\",\"body\":{\"prompt\":\"x\",\"top_p\":9}}\n"
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
    CHECK(strstr(string_at(e[1], "error.message"), "/in.jsonl, line 2: malformed JSON at byte "));
    CHECK(strstr(string_at(e[1], "error.message"), "; each line must be one whole JSON object"));
    CHECK_EQ_STR(string_at(e[2], "custom_id"), "b");
    CHECK(strstr(string_at(e[2], "error.message"), "line 4: url"));
    CHECK(strstr(string_at(e[3], "error.message"), "stream"));
    CHECK(strstr(string_at(e[4], "error.message"), "custom_id is missing"));
    CHECK_EQ_INT(number_at(e[5], "response.status_code"), 400);
    CHECK_EQ_STR(string_at(e[5], "response.body.error.param"), "top_p");
    CHECK_EQ_STR(string_at(e[5], "error.code"), "request_failed");
    CHECK_EQ_STR(string_at(e[5], "error.message"), string_at(e[5], "response.body.error.message"));
    CHECK_EQ_STR(string_at(e[6], "custom_id"), "e");
    for (int i = 0; i < 7; i++) cJSON_Delete(e[i]);
    buf_release(&u.out);
    rig_close(&r);
}

/* Every output line has its reason, and the summary counts lines by it. */
TEST(the_summary_says_how_answers_ended_and_why_lines_failed)
{
#define LINE(id, members)                                                                          \
    "{\"custom_id\":\"" id "\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":[5]" members "}}"  \
    "\n"
    /* clang-format off: one line each */
    static const char in[] = LINE("\\\"finish_reason\\\":\\\"length\\\"", "")
        LINE("b", ",\"max_tokens\":2") "no json\n" LINE("c", ",\"top_p\":9") "neither\n" LINE(
            "d", ",\"top_p\":9") LINE("e", ",\"n\":3,\"max_tokens\":1") LINE("f", ",\"top_p\":9")
            LINE("g", ",\"min_p\":9");
    /* clang-format on */
    struct rig r;
    struct buf want = { 0 };
    rig_open(&r);
    rig_start(&r);
    struct run u = run_batch(&r, STR(in), 2);
    CHECK_OK(u.st);
    CHECK_EQ_INT(u.n_ok, 3);
    CHECK_EQ_INT(u.n_failed, 6);
    static const char *const finishes[] = { "stop", "length", NULL, NULL, NULL, NULL, "length" };
    cJSON *e;
    for (int i = 0; i < 9; i++) {
        CHECK((e = line_at(&u, i)) != NULL);
        bool good = i < 7 && finishes[i];
        CHECK_EQ_INT(cJSON_IsNull(json_at(e, "error")), good);
        if (good) CHECK_EQ_STR(string_at(e, "response.body.choices.0.finish_reason"), finishes[i]);
        else CHECK(string_at(e, "error.message")[0] && string_at(e, "error.code")[0]);
        if (i == 3)
            buf_printf(&want,
                       "3 answered, 6 failed\nended 1 x: by itself (stop)\nended 4 x: cut by "
                       "max_tokens or --max-model-len (length)\nfailed 3 x: 400: %s (first in line "
                       "4)\nfailed 2 x: ",
                       string_at(e, "error.message"));
        cJSON_Delete(e);
    }
    if (!str_starts(str_of(u.text), want.data)) test_fail(__FILE__, __LINE__, "%s", u.text);
    CHECK(strstr(u.text, "(first in line 3)\nfailed 1 x: 400: min_p") != NULL);
    CHECK(str_ends(str_of(u.text), "(first in line 9)"));
    buf_release(&want);
    buf_release(&u.out);
    rig_close(&r);
}

TEST(the_summary_is_short_whatever_fails)
{
    struct batch_tally t = { 0 };
    struct buf text = { 0 };
    for (uint64_t i = 0; i < 100; i++) {
        char sentence[32];
        snprintf(sentence, sizeof sentence, "reason %d", (int)(i % 50));
        batch_tally_failure(&t, sentence, 100 - i);
    }
    batch_tally_failure(&t, "reason 7", 200);
    batch_tally_summary(&t, &text);
    CHECK(str_starts(buf_str(&text), "0 answered, 101 failed\n"
                                     "failed 3 x: reason 7 (first in line 43)\n"
                                     "failed 2 x: reason 0 (first in line 50)\n"));
    CHECK(str_ends(buf_str(&text), "\nfailed 90 x: other reasons, each in \"error\" of its line"));
    buf_release(&text);
}

TEST(full_server_is_asked_again)
{
    struct rig r;
    struct buf in = { 0 };
    rig_open(&r);
    rig_start(&r);
    r.fake.max_live = 2;
    for (int i = 0; i < 12; i++)
        buf_printf(&in,
                   "{\"custom_id\":\"%d\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":[5]}}\n",
                   i);
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
    static const struct {
        const char *input, *output;
        enum status st;
        const char *named;
    } cases[] = {
        { "/nonexistent/in", "-", ERR_NOT_FOUND, "/nonexistent/in" },
        { "/dev/null", "/nonexistent/out", ERR_NOT_FOUND, "/nonexistent/out" },
        { "/", "-", ERR_IO, "/: is a directory" },
        { "/dev/null", "/", ERR_IO, "/: is a directory" },
    };
    struct rig r;
    struct batch_runner *batch;
    struct run u = { 0 };
    rig_open(&r);
    rig_start(&r);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct err err = { 0 };
        struct batch_runner_options o = {
            .loop = r.loop,
            .serve = r.serve,
            .input = cases[i].input,
            .output = cases[i].output,
            .done = on_done,
            .arg = &u,
        };
        CHECK_STATUS(batch_runner_start(&o, &batch, &err), cases[i].st);
        CHECK(strstr(err.text, cases[i].named));
    }
    rig_close(&r);
}

static struct str read_file(const char *path, char *out, size_t size)
{
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL);
    size_t n = fread(out, 1, size, f);
    fclose(f);
    return (struct str){ out, n };
}

/* Runs from in to out, which must be refused with this sentence and leave `kept` as it was. */
static void is_refused(struct rig *r, const char *in, const char *out, const char *kept,
                       const char *sentence)
{
    static const char text[] = "What is kept?\n";
    struct run u = { 0 };
    struct err err = { 0 };
    struct batch_runner *batch;
    char after[64];
    struct batch_runner_options o = {
        .loop = r->loop, .serve = r->serve, .input = in, .output = out, .done = on_done, .arg = &u
    };
    write_file(kept, STR(text));
    enum status st = batch_runner_start(&o, &batch, &err);
    for (int i = 0; st == OK && i < 20000 && !u.done; i++) rig_turn(r);
    CHECK(str_eq_c(read_file(kept, after, sizeof after), text));
    CHECK_STATUS(st, ERR_INVALID);
    CHECK_EQ_STR(err.text, sentence);
}

TEST(the_input_is_no_output)
{
    struct rig r;
    char in[512], link[512], hard[512], name[512], partial[600], want[1400];
    rig_open(&r);
    rig_start(&r);
    snprintf(in, sizeof in, "%s/same.jsonl", test_tmpdir());
    snprintf(link, sizeof link, "%s/same-link", test_tmpdir());
    snprintf(hard, sizeof hard, "%s/same-hard", test_tmpdir());
    snprintf(name, sizeof name, "%s/same", test_tmpdir());
    snprintf(partial, sizeof partial, "%s.partial", name);
    write_file(in, STR("x\n"));
    CHECK(symlink(in, link) == 0 && linkat(AT_FDCWD, in, AT_FDCWD, hard, 0) == 0);
    const char *outputs[] = { in, link, hard };
    int standard = dup(STDIN_FILENO);
    for (size_t i = 0; i < COUNT_OF(outputs); i++) {
        snprintf(want, sizeof want, "--output %s is the input file; name another", outputs[i]);
        is_refused(&r, in, outputs[i], in, want);
        int fd = open(in, O_RDONLY);
        CHECK(fd > 0 && dup2(fd, STDIN_FILENO) == STDIN_FILENO);
        is_refused(&r, "-", outputs[i], in, want);
        close(fd);
    }
    CHECK(dup2(standard, STDIN_FILENO) == STDIN_FILENO);
    close(standard);
    snprintf(want, sizeof want,
             "--output %s is written as %s first, which is the input file; name another", name,
             partial);
    is_refused(&r, partial, name, partial, want);
    rig_close(&r);
}

/* The answers of a run that was interrupted are kept until somebody takes them away. */
TEST(answers_of_an_earlier_run_are_kept)
{
    struct rig r;
    char in[512], out[512], partial[600], want[800];
    rig_open(&r);
    rig_start(&r);
    snprintf(in, sizeof in, "%s/again.jsonl", test_tmpdir());
    snprintf(out, sizeof out, "%s/again-out.jsonl", test_tmpdir());
    snprintf(partial, sizeof partial, "%s.partial", out);
    snprintf(want, sizeof want,
             "%s has the answers of an interrupted run; move it away, or remove it, to begin anew",
             partial);
    write_file(in, STR("Who?\n"));
    is_refused(&r, in, out, partial, want);
    rig_close(&r);
}

/* The loop goes on meanwhile, so that the run can be stopped. */
TEST(a_pipe_without_a_writer_can_be_stopped)
{
    struct rig r;
    struct err err = { 0 };
    struct batch_runner *batch;
    struct run u = { 0 };
    char fifo[512];
    rig_open(&r);
    rig_start(&r);
    snprintf(fifo, sizeof fifo, "%s/quiet", test_tmpdir());
    CHECK(mkfifo(fifo, 0600) == 0);
    struct batch_runner_options o = { .loop = r.loop,
                                      .serve = r.serve,
                                      .input = fifo,
                                      .output = "/dev/null",
                                      .done = on_done,
                                      .arg = &u };
    alarm(20); /* ends the test when the start waits for a writer */
    CHECK_OK(batch_runner_start(&o, &batch, &err));
    for (int i = 0; i < 200; i++) rig_turn(&r);
    CHECK(!u.done); /* no writer yet is not the end of the input */
    int writer = open(fifo, O_WRONLY | O_NONBLOCK);
    CHECK(writer >= 0 && write(writer, "bad\n", 4) == 4);
    close(writer);
    for (int i = 0; i < 20000 && !u.done; i++) rig_turn(&r);
    CHECK_OK(u.st);
    CHECK_EQ_INT(u.n_ok + u.n_failed, 1);
    u = (struct run){ 0 };
    CHECK_OK(batch_runner_start(&o, &batch, &err));
    for (int i = 0; i < 20; i++) rig_turn(&r);
    batch_runner_stop(batch);
    for (int i = 0; i < 20000 && !u.done; i++) rig_turn(&r);
    CHECK_STATUS(u.st, ERR_CANCELED);
    alarm(0);
    rig_close(&r);
}

TEST(an_output_pipe_without_a_reader_can_be_stopped)
{
    struct rig r;
    struct err err = { 0 };
    struct batch_runner *batch;
    struct run u = { 0 };
    char in[512], fifo[512], text[8] = "";
    rig_open(&r);
    rig_start(&r);
    snprintf(in, sizeof in, "%s/for-pipe", test_tmpdir());
    snprintf(fifo, sizeof fifo, "%s/unread", test_tmpdir());
    write_file(in, STR("{\"custom_id\":\"a\"}\n"));
    CHECK(mkfifo(fifo, 0600) == 0);
    struct batch_runner_options o = {
        .loop = r.loop, .serve = r.serve, .input = in, .output = fifo, .done = on_done, .arg = &u
    };
    alarm(20); /* ends the test when the start waits for a reader */
    CHECK_OK(batch_runner_start(&o, &batch, &err));
    for (int i = 0; i < 20; i++) rig_turn(&r);
    CHECK(!u.done);
    batch_runner_stop(batch);
    for (int i = 0; i < 20000 && !u.done; i++) rig_turn(&r);
    CHECK_STATUS(u.st, ERR_CANCELED);
    u = (struct run){ 0 };
    CHECK_OK(batch_runner_start(&o, &batch, &err));
    for (int i = 0; i < 20; i++) rig_turn(&r);
    int reader = open(fifo, O_RDONLY | O_NONBLOCK);
    for (int i = 0; i < 20000 && !u.done; i++) rig_turn(&r);
    CHECK_OK(u.st);
    CHECK(read(reader, text, 5) == 5 && text[0] == '{');
    close(reader);
    alarm(0);
    rig_close(&r);
}

/* An output that is not a regular file is written in place: replacing it would break it. */
TEST(pipes_and_links_are_written_in_place)
{
    struct rig r;
    char target[512], link[512], fifo[512], in[512];
    rig_open(&r);
    rig_start(&r);
    snprintf(in, sizeof in, "%s/in.jsonl", test_tmpdir());
    snprintf(target, sizeof target, "%s/target", test_tmpdir());
    snprintf(link, sizeof link, "%s/link", test_tmpdir());
    snprintf(fifo, sizeof fifo, "%s/fifo", test_tmpdir());
    write_file(in, STR("nothing\n"));
    CHECK(symlink(target, link) == 0 && mkfifo(fifo, 0600) == 0);
    write_file(target, STR("old"));
    int reader = open(fifo, O_RDONLY | O_NONBLOCK);
    const char *outputs[] = { link, fifo, "/dev/null" };
    for (size_t i = 0; i < COUNT_OF(outputs); i++) {
        struct err err = { 0 };
        struct batch_runner *batch;
        struct run u = { 0 };
        struct stat before, after;
        CHECK(lstat(outputs[i], &before) == 0);
        struct batch_runner_options o = {
            .loop = r.loop,
            .serve = r.serve,
            .input = in,
            .output = outputs[i],
            .done = on_done,
            .arg = &u,
        };
        CHECK_OK(batch_runner_start(&o, &batch, &err));
        for (int k = 0; k < 20000 && !u.done; k++) rig_turn(&r);
        CHECK_OK(u.st);
        CHECK(lstat(outputs[i], &after) == 0);
        CHECK_EQ_INT(after.st_ino, before.st_ino);
        CHECK_EQ_INT(after.st_mode, before.st_mode);
    }
    char text[64] = "";
    CHECK(read(reader, text, 20) == 20 && text[0] == '{');
    close(reader);
    struct stat s;
    CHECK(stat(target, &s) == 0 && s.st_size > 20);
    rig_close(&r);
}

/* Stopped while it waits for a writer that never comes: the partial file has the finished answers,
 * in order. */
TEST(stop_keeps_what_was_answered)
{
    struct rig r;
    struct err err = { 0 };
    struct batch_runner *batch;
    struct run u = { 0 };
    struct stat s;
    char fifo[512], out[512], partial[600];
    rig_open(&r);
    rig_start(&r);
    snprintf(fifo, sizeof fifo, "%s/in", test_tmpdir());
    snprintf(out, sizeof out, "%s/out", test_tmpdir());
    snprintf(partial, sizeof partial, "%s.partial", out);
    CHECK(mkfifo(fifo, 0600) == 0);
    int writer = open(fifo, O_RDWR);
    CHECK(write(writer, "bad\n{\"half", 10) == 10);
    struct batch_runner_options o = {
        .loop = r.loop, .serve = r.serve, .input = fifo, .output = out, .done = on_done, .arg = &u
    };
    CHECK_OK(batch_runner_start(&o, &batch, &err));
    for (int i = 0; i < 20000 && (stat(partial, &s) != 0 || s.st_size == 0); i++) rig_turn(&r);
    CHECK(s.st_size > 0 && !u.done); /* an answer does not wait for the next line */
    batch_runner_stop(batch);
    for (int i = 0; i < 20000 && !u.done; i++) rig_turn(&r);
    CHECK_STATUS(u.st, ERR_CANCELED);
    CHECK_EQ_INT(u.n_failed, 1); /* an incomplete line is not a line */
    CHECK(strstr(u.text, partial) && strstr(u.text, "; move it away, or remove it, before you"));
    CHECK(stat(partial, &s) == 0 && s.st_size > 0);
    CHECK(stat(out, &s) != 0);
    close(writer);
    rig_close(&r);
}

TEST_MAIN(CASE(answers_come_in_the_order_of_the_input), CASE(bad_lines_do_not_stop_the_rest),
          CASE(the_summary_says_how_answers_ended_and_why_lines_failed),
          CASE(the_summary_is_short_whatever_fails), CASE(prompts_one_per_line),
          CASE(a_byte_order_mark_is_skipped), CASE(a_file_of_another_format_ends_the_run),
          CASE(lines_that_name_another_model), CASE(full_server_is_asked_again), CASE(empty_input),
          CASE(files_that_cannot_be_used), CASE(pipes_and_links_are_written_in_place),
          CASE(stop_keeps_what_was_answered), CASE(the_input_is_no_output),
          CASE(a_missing_url_is_called_missing), CASE(a_batch_line_among_prompts_is_no_prompt),
          CASE(an_output_pipe_without_a_reader_can_be_stopped),
          CASE(answers_of_an_earlier_run_are_kept), CASE(a_pipe_without_a_writer_can_be_stopped))
