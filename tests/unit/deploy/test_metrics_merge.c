/* test_metrics_merge.c - the metrics of several processes as one page: families stand together, each
 * with one head, and every series says whose it is. */
#include "deploy/router/metrics_merge.h"

#include <string.h>

#include "shared/base/metrics.h"
#include "tests/harness/test.h"

static void check(const struct metrics_page *pages, size_t n, const char *want)
{
    struct buf out = { 0 };
    metrics_merge(pages, n, &out);
    CHECK_EQ_STR(out.len ? out.data : "", want);
    buf_release(&out);
}

TEST(families_stand_together)
{
    const struct metrics_page pages[] = {
        { "0", STR("# HELP a Of a.\n# TYPE a counter\na 1\na{x=\"y z\"} 2\n# HELP b Of b.\n"
                   "# TYPE b gauge\nb{} 3\n") },
        { "1", STR("# HELP b Of b.\n# TYPE b gauge\nb 4\n# HELP a Of a.\n# TYPE a counter\na 5\n"
                   "# HELP c Of c.\n# TYPE c gauge\nc 6\n") },
    };
    check(pages, 2,
          "# HELP a Of a.\n# TYPE a counter\na{worker=\"0\"} 1\na{worker=\"0\",x=\"y z\"} 2\n"
          "a{worker=\"1\"} 5\n"
          "# HELP b Of b.\n# TYPE b gauge\nb{worker=\"0\"} 3\nb{worker=\"1\"} 4\n"
          "# HELP c Of c.\n# TYPE c gauge\nc{worker=\"1\"} 6\n");
}

TEST(a_process_without_an_answer_is_left_out)
{
    const struct metrics_page pages[] = { { "0", STR("") }, { "1", STR("# TYPE a gauge\na 1\n") } };
    check(pages, 2, "# TYPE a gauge\na{worker=\"1\"} 1\n");
    check(pages, 1, "");
}

TEST(what_is_no_metric_is_dropped)
{
    const struct metrics_page pages[] = {
        { "0", STR("lost 1\n# a comment\n# HELP \n# TYPE a\na\n\n# EOF\na{x=\"1\"} 2") },
    };
    check(pages, 1, "# TYPE a\na{worker=\"0\"}\na{worker=\"0\",x=\"1\"} 2\n");
}

/* Buckets of a histogram have labels and names of their own, and stay in its family. */
TEST(what_the_registry_writes)
{
    static const double bounds[] = { 1, 2 };
    struct metrics *m = metrics_create();
    struct buf text = { 0 }, out = { 0 };
    histogram_observe(metrics_histogram(m, "h", "", "Of h.", bounds, 2), 1.5);
    counter_add(metrics_counter(m, "n_total", "k=\"v\"", "Of n."), 3);
    metrics_write(m, &text);
    const struct metrics_page pages[] = { { "0", buf_str(&text) }, { "view", buf_str(&text) } };
    metrics_merge(pages, 2, &out);
    CHECK(strstr(out.data, "h_bucket{worker=\"0\",le=\"2\"} 1\n"));
    CHECK(strstr(out.data, "h_count{worker=\"view\"} 1\n"));
    CHECK(strstr(out.data, "n_total{worker=\"view\",k=\"v\"} 3\n"));
    const char *head = strstr(out.data, "# TYPE h histogram\n");
    CHECK(head && !strstr(head + 1, "# TYPE h histogram\n"));
    buf_release(&text);
    buf_release(&out);
    metrics_free(m);
}

TEST_MAIN(CASE(families_stand_together), CASE(a_process_without_an_answer_is_left_out),
          CASE(what_is_no_metric_is_dropped), CASE(what_the_registry_writes))
