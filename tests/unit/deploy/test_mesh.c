/* test_mesh.c - the matrix of `baton doctor --peers`: which hosts have a row, what a cell shows,
 * and that its JSON is valid. */
#include <stdio.h>
#include <string.h>

#include "deploy/doctor/mesh.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* Three hosts; the last one does not answer. The printers only look whether `client` is set. */
static struct mesh *sample(void)
{
    struct mesh *m = MEM_NEW(struct mesh);
    m->n_hosts = 3;
    m->n_transports = 2;
    snprintf(m->transports[0], PROBE_NAME_MAX, "tcp");
    snprintf(m->transports[1], PROBE_NAME_MAX, "rdma");
    for (int i = 0; i < 2; i++) m->hosts[i].client = (struct probe_client *)m;
    snprintf(m->hosts[1].where, sizeof m->hosts[1].where, "b:7001");
    snprintf(m->hosts[2].where, sizeof m->hosts[2].where, "c\"x:7001");
    m->hosts[2].error = (struct err){ .code = ERR_PEER_LOST, .text = "c: connection refused" };
    m->cells = MEM_ARRAY(struct mesh_cell, 2 * 3 * 3);
    *mesh_cell(m, 0, 0, 1) =
        (struct mesh_cell){ .state = MESH_MEASURED, .rate = 1.25e9, .p50_us = 33, .link_speed = 3 };
    *mesh_cell(m, 0, 1, 0) = (struct mesh_cell){ .state = MESH_FAILED, .text = "no way" };
    *mesh_cell(m, 1, 0, 1) = *mesh_cell(m, 1, 1, 0) = (struct mesh_cell){ .state = MESH_NOT_BUILT };
    return m;
}

static void sample_free(struct mesh *m)
{
    mem_free(m->cells);
    mem_free(m);
}

TEST(hosts_that_answer_have_a_row_and_transports_that_were_tried_a_matrix)
{
    struct mesh *m = sample();
    struct buf out = { 0 };
    mesh_print_text(m, &out);
    CHECK(strstr(out.data, "c\"x:7001 (does not answer)") != NULL);
    const char *matrix = strstr(out.data, "tcp: GB/s");
    CHECK(matrix != NULL && strstr(out.data, "rdma: GB/s") == NULL);
    CHECK(strstr(matrix, "\n     0           -     1.25/33\n") != NULL);
    CHECK(strstr(matrix, "\n     1        FAIL           -\n") != NULL);
    CHECK(strstr(matrix, "\n     2") == NULL);
    buf_release(&out);
    sample_free(m);
}

TEST(the_json_has_every_ordered_pair)
{
    struct mesh *m = sample();
    struct buf out = { 0 };
    struct err err = { 0 };
    cJSON *doc = NULL;
    buf_add_c(&out, "{\"ok\":true");
    mesh_print_json(m, &out);
    buf_add_char(&out, '}');
    if (json_parse(buf_str(&out), true, &doc, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s in %s", err.text, out.data);
    CHECK_EQ_INT(cJSON_GetArraySize(json_member(doc, "peers")), 3);
    const cJSON *cells = json_member(doc, "mesh"), *first = cJSON_GetArrayItem(cells, 0);
    CHECK_EQ_INT(cJSON_GetArraySize(cells), 2 * 6);
    const char *state = NULL;
    double rate = 0;
    CHECK_OK(json_get_str(first, "state", &state, &err));
    CHECK_OK(json_get_f64(first, "bytes_per_second", 0, 1e12, &rate, &err));
    CHECK_EQ_STR(state, "measured");
    CHECK_NEAR(rate, 1.25e9, 0);
    cJSON_Delete(doc);
    buf_release(&out);
    sample_free(m);
}

TEST_MAIN(CASE(hosts_that_answer_have_a_row_and_transports_that_were_tried_a_matrix),
          CASE(the_json_has_every_ordered_pair))
