/* test_bench_kv.c - piece sizes, percentiles and the table of `baton bench kv`; what the trusted
 * tools print. */
#include <stdio.h>
#include <string.h>

#include "deploy/bench/bench_kv.h"
#include "deploy/probe/endpoint.h"
#include "deploy/probe/hardware_limits.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static struct bench_sizes sizes_of(const char *item)
{
    struct bench_sizes s = { 0 };
    struct err err = { 0 };
    if (bench_sizes_add(&s, str_of(item), &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", item, err.text);
    return s;
}

TEST(a_size_has_a_unit)
{
    static const struct {
        const char *text;
        uint32_t bytes;
    } good[] = {
        { "4096", 4096 },    { "4k", 4096 }, { " 4 KiB ", 4096 }, { "1.5m", 1572864 },
        { "64m", 64 << 20 }, { "1k", 1024 }, { "2MB", 2 << 20 },
    };
    static const char *const bad[] = { "",    "k",   "4g",  "4kk",    "1.3k", "65m",
                                       "512", "-4k", "4k4", "0x1000", "1e4",  "4..k" };
    uint32_t v;
    struct err err = { 0 };
    for (size_t i = 0; i < COUNT_OF(good); i++) {
        if (bench_size_parse(str_of(good[i].text), &v, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s: %s", good[i].text, err.text);
        CHECK_EQ_INT(v, good[i].bytes);
    }
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        err.text[0] = 0;
        if (bench_size_parse(str_of(bad[i]), &v, &err) != ERR_CONFIG)
            test_fail(__FILE__, __LINE__, "'%s' was taken", bad[i]);
        CHECK(strstr(err.text, "is not a size") != NULL);
    }
}

TEST(a_range_goes_by_factors_and_ends_with_its_end)
{
    struct bench_sizes s = sizes_of("4k..4m");
    CHECK_EQ_INT(s.n, 6);
    for (size_t i = 0; i < s.n; i++) CHECK_EQ_INT(s.v[i], 4096u << (2 * i));
    s = sizes_of("4k\xe2\x80\xa6"
                 "4m"); /* as it is typeset */
    CHECK_EQ_INT(s.n, 6);
    s = sizes_of("4k..4m*2");
    CHECK_EQ_INT(s.n, 11);
    s = sizes_of("4k..24k");
    CHECK_EQ_INT(s.n, 3);
    CHECK_EQ_INT(s.v[2], 24576);
    s = sizes_of("64k..64k");
    CHECK_EQ_INT(s.n, 1);
}

TEST(a_bad_range_says_what_is_wrong)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        { "4m..4k", "goes down" },       { "4k..", "is not a size" },
        { "..4k", "is not a size" },     { "4k..4m*1", "is not a step" },
        { "4k..4m*x", "is not a step" }, { "16411k", "no KV layout" },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct bench_sizes s = { 0 };
        struct err err = { 0 };
        CHECK(bench_sizes_add(&s, str_of(bad[i].text), &err) != OK);
        if (!strstr(err.text, bad[i].says))
            test_fail(__FILE__, __LINE__, "%s: %s", bad[i].text, err.text);
    }
}

TEST(sizes_named_twice_count_once_and_are_bounded)
{
    struct bench_sizes s = sizes_of("4k..16k");
    struct err err = { 0 };
    CHECK_OK(bench_sizes_add(&s, str_of("4k"), &err));
    CHECK_EQ_INT(s.n, 2);
    enum status st = OK;
    for (uint32_t i = 1; st == OK && i <= BENCH_SIZES_MAX + 1; i++) {
        char text[32];
        snprintf(text, sizeof text, "%uk", i * 2);
        st = bench_sizes_add(&s, str_of(text), &err);
    }
    CHECK_STATUS(st, ERR_CONFIG);
    CHECK_EQ_INT(s.n, BENCH_SIZES_MAX);
}

TEST(a_layout_has_pieces_of_exactly_the_size)
{
    for (uint32_t k = 1; k <= 4096; k++) {
        struct kv_layout l;
        struct err err = { 0 };
        enum status st = probe_layout(k * 1024, 3, 7, &l, &err);
        if (st == OK) {
            CHECK_EQ_INT(kv_layout_piece_bytes(&l), k * 1024);
            CHECK_OK(kv_layout_check(&l, &err));
            CHECK_EQ_INT(kv_layout_pool_bytes(&l), (size_t)k * 1024 * 21);
        } else {
            CHECK(strstr(err.text, "no KV layout") != NULL);
            CHECK((k & (k - 1)) != 0); /* every power of two has one */
        }
    }
}

TEST(percentiles_are_nearest_ranks)
{
    double v[1000];
    for (int i = 0; i < 1000; i++) v[i] = 1000 - i;
    CHECK_NEAR(bench_percentile(v, 1000, 0.5), 500, 0);
    CHECK_NEAR(bench_percentile(v, 1000, 0.99), 990, 0);
    CHECK_NEAR(bench_percentile(v, 1000, 0.999), 999, 0);
    CHECK_NEAR(bench_percentile(v, 1000, 1), 1000, 0);
    double one = 7;
    CHECK_NEAR(bench_percentile(&one, 1, 0.999), 7, 0);
    CHECK_NEAR(bench_percentile(&one, 1, 0), 7, 0);
}

static struct bench_cell *sample_cell(void)
{
    struct bench_cell *c = MEM_NEW(struct bench_cell);
    *c = (struct bench_cell){
        .transport = "tcp",
        .piece_bytes = 4096,
        .n_blocks = 8,
        .n_layers = 2,
        .round_bytes = 65536,
        .limit_name = "iperf3",
        .n_rounds = 2,
        .rate = { 1e9, 2e9 },
        .limit = { 4e9, 3e9 },
        .best_rate = 2e9,
        .best_limit = 4e9,
        .p50_us = 10,
        .p90_us = 20,
        .p99_us = 30,
        .p999_us = 40,
        .n_samples = 100,
        .cpu_s_per_gb = 0.5,
    };
    return c;
}

TEST(a_row_shows_rate_limit_and_ratio)
{
    struct bench_cell *c = sample_cell();
    struct buf out = { 0 };
    bench_kv_row(c, &out);
    CHECK(strstr(out.data, "tcp") && strstr(out.data, "4k") && strstr(out.data, "2.00") &&
          strstr(out.data, "16.0") && strstr(out.data, "4.00 iperf3") &&
          strstr(out.data, "50.0%") && strstr(out.data, "0.50"));
    buf_clear(&out);
    c->best_limit = 0;
    snprintf(c->limit_error, sizeof c->limit_error, "iperf3 is not installed");
    bench_kv_row(c, &out);
    CHECK(strstr(out.data, "not measured") && strstr(out.data, "limit: iperf3 is not installed"));
    buf_clear(&out);
    snprintf(c->error, sizeof c->error, "no such device");
    bench_kv_row(c, &out);
    CHECK(strstr(out.data, "not measured: no such device") != NULL);
    buf_release(&out);
    mem_free(c);
}

TEST(the_json_is_json_and_says_the_same)
{
    struct bench_kv b = { .rounds = 2, .checksum = true };
    struct bench_cell *c = sample_cell();
    struct buf out = { 0 };
    struct err err = { 0 };
    cJSON *doc = NULL;
    bench_kv_json(&b, c, 1, &out);
    if (json_parse(buf_str(&out), true, &doc, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s in %s", err.text, out.data);
    const cJSON *cell = cJSON_GetArrayItem(json_member(doc, "cells"), 0);
    double ratio = 0, p999 = 0;
    CHECK(cell != NULL);
    CHECK_OK(json_get_f64(cell, "ratio", 0, 10, &ratio, &err));
    CHECK_OK(json_get_f64(json_member(cell, "latency_us"), "p99.9", 0, 100, &p999, &err));
    CHECK_NEAR(ratio, 0.5, 1e-12);
    CHECK_NEAR(p999, 40, 1e-12);
    CHECK_EQ_INT(cJSON_GetArraySize(json_member(cell, "rounds")), 2);
    cJSON_Delete(doc);
    buf_release(&out);
    mem_free(c);
}

/* Shortened output of the tools: the right numbers must be read. */
static struct probe_reply *parse(enum probe_tool tool, uint32_t piece, const char *output,
                                 enum status want)
{
    struct probe_reply *r = MEM_NEW(struct probe_reply);
    struct err err = { 0 };
    CHECK_STATUS(probe_tool_parse(tool, piece, output, r, &err), want);
    if (want != OK) CHECK(err.text[0] != 0);
    return r;
}

TEST(results_of_perftest_are_read)
{
    struct probe_reply *r = parse(
        PROBE_IB_WRITE_BW, 65536,
        " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
        " 65536      1000             6.50               6.25               0.011921\n---\n",
        OK);
    CHECK_EQ_INT(r->n_bytes, 781250000);
    mem_free(r);
    r = parse(PROBE_IB_WRITE_LAT, 4096,
              " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]   "
              " t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n"
              " 4096    1000          6.01           50.00         7.50              7.70          "
              "  1.20            11.25                   40.50  \n",
              OK);
    CHECK_EQ_INT(r->n_ns, 3);
    CHECK_EQ_INT(r->ns[0], 7500);
    CHECK_EQ_INT(r->ns[1], 11250);
    CHECK_EQ_INT(r->ns[2], 40500);
    mem_free(r);
    mem_free(parse(PROBE_IB_WRITE_BW, 65536,
                   "Unable to init the socket connection\n 4096 1 2 3 4\n", ERR_FORMAT));
    mem_free(parse(PROBE_IB_WRITE_LAT, 65536, "", ERR_FORMAT));
}

TEST(results_of_ucx_perftest_are_read)
{
    static const char output[] = "[thread 0]               144   3982.443  3483.775  3483.775      "
                                 " 17.94      17.94         287         287\n"
                                 "Final:                  1000      8.504   133.433   133.433      "
                                 "468.40     500.00        7494        7494\n";
    struct probe_reply *r = parse(PROBE_UCX_PUT_BW, 65536, output, OK);
    CHECK_EQ_INT(r->n_bytes, 500 << 20);
    mem_free(r);
    r = parse(PROBE_UCX_PUT_LAT, 65536, output, OK);
    CHECK_EQ_INT(r->ns[0], 8504);
    mem_free(r);
    mem_free(parse(PROBE_UCX_PUT_BW, 65536, "Final: 1000\n", ERR_FORMAT));
}

TEST(results_of_iperf3_are_read)
{
    struct probe_reply *r = parse(PROBE_IPERF3, 1024,
                                  "{\"end\":{\"sum_sent\":{\"bits_per_second\":1},\"sum_received\":"
                                  "{\"bits_per_second\":8e9}}}",
                                  OK);
    CHECK_EQ_INT(r->n_bytes, 1000000000);
    mem_free(r);
    mem_free(parse(PROBE_IPERF3, 1024, "{\"end\":{},\"error\":\"unable to connect\"}", ERR_IO));
    mem_free(parse(PROBE_IPERF3, 1024, "{\"end\":{}}", ERR_FORMAT));
    mem_free(parse(PROBE_IPERF3, 1024, "iperf3: no", ERR_FORMAT));
}

TEST_MAIN(CASE(a_size_has_a_unit), CASE(a_range_goes_by_factors_and_ends_with_its_end),
          CASE(a_bad_range_says_what_is_wrong), CASE(sizes_named_twice_count_once_and_are_bounded),
          CASE(a_layout_has_pieces_of_exactly_the_size), CASE(percentiles_are_nearest_ranks),
          CASE(a_row_shows_rate_limit_and_ratio), CASE(the_json_is_json_and_says_the_same),
          CASE(results_of_perftest_are_read), CASE(results_of_ucx_perftest_are_read),
          CASE(results_of_iperf3_are_read))
