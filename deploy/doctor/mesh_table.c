/* mesh_table.c - prints the matrix of mesh.h, for people and as JSON. Thread: main. */
#include <inttypes.h>
#include <stdio.h>

#include "deploy/doctor/mesh.h"
#include "shared/base/json/json.h"

static const char *const STATES[] = {
    [MESH_NOT_TRIED] = "not_tried", [MESH_MEASURED] = "measured",
    [MESH_FAILED] = "failed",       [MESH_OUT_OF_REACH] = "out_of_reach",
    [MESH_NOT_BUILT] = "not_built", [MESH_UNAVAILABLE] = "unavailable",
};

static void add_text_cell(const struct mesh_cell *c, bool diagonal, struct buf *out)
{
    char text[32] = "-";
    if (!diagonal && c->state == MESH_MEASURED)
        snprintf(text, sizeof text, "%.2f/%.0f", c->rate / 1e9, c->p50_us);
    else if (!diagonal && c->state == MESH_FAILED) snprintf(text, sizeof text, "FAIL");
    else if (!diagonal && c->state == MESH_OUT_OF_REACH) snprintf(text, sizeof text, "n/a");
    else if (!diagonal) snprintf(text, sizeof text, "none");
    buf_printf(out, " %11s", text);
}

static bool was_tried(const struct mesh *m, uint32_t t)
{
    for (uint32_t i = 0; i < m->n_hosts * m->n_hosts; i++) {
        enum mesh_state state = mesh_cell(m, t, i / m->n_hosts, i % m->n_hosts)->state;
        if (state == MESH_MEASURED || state == MESH_FAILED) return true;
    }
    return false;
}

/* Hosts that do not answer get no row and no column. */
static void add_matrix(const struct mesh *m, uint32_t t, struct buf *out)
{
    buf_printf(
        out, "\n%s: GB/s / p50 us of a 4 KiB transfer; the row sends, the column receives\n      ",
        m->transports[t]);
    for (uint32_t to = 0; to < m->n_hosts; to++)
        if (m->hosts[to].client) buf_printf(out, " %11" PRIu32, to);
    for (uint32_t from = 0; from < m->n_hosts; from++) {
        if (!m->hosts[from].client) continue;
        buf_printf(out, "\n  %4" PRIu32, from);
        for (uint32_t to = 0; to < m->n_hosts; to++)
            if (m->hosts[to].client) add_text_cell(mesh_cell(m, t, from, to), from == to, out);
    }
    buf_add_char(out, '\n');
}

void mesh_print_text(const struct mesh *m, struct buf *out)
{
    buf_add_c(out, "\nhosts\n");
    for (uint32_t i = 0; i < m->n_hosts; i++)
        buf_printf(out, "  %-4" PRIu32 " %s%s%s%s\n", i,
                   m->hosts[i].where[0] ? m->hosts[i].where : "this host",
                   m->hosts[i].name[0] ? ", " : "", m->hosts[i].name,
                   m->hosts[i].client ? "" : " (does not answer)");
    for (uint32_t t = 0; t < m->n_transports; t++)
        if (was_tried(m, t)) add_matrix(m, t, out);
}

/* ---- JSON ---- */

static void add_member(struct buf *out, const char *name, const char *text)
{
    buf_printf(out, ",\"%s\":", name);
    if (*text) json_add_string(out, str_of(text));
    else buf_add_c(out, "null");
}

static void add_json_cell(const struct mesh *m, uint32_t t, uint32_t from, uint32_t to,
                          struct buf *out)
{
    const struct mesh_cell *c = mesh_cell(m, t, from, to);
    buf_printf(out,
               "{\"from\":%" PRIu32 ",\"to\":%" PRIu32 ",\"transport\":\"%s\",\"state\":\"%s\"",
               from, to, m->transports[t], STATES[c->state]);
    add_member(out, "text", c->text);
    if (c->state == MESH_MEASURED) {
        buf_add_c(out, ",\"bytes_per_second\":");
        json_add_f64(out, c->rate);
        buf_add_c(out, ",\"p50_us\":");
        json_add_f64(out, c->p50_us);
        buf_printf(out, ",\"link_bytes_per_second\":%" PRIu64, c->link_speed);
    }
    buf_add_char(out, '}');
}

void mesh_print_json(const struct mesh *m, struct buf *out)
{
    buf_add_c(out, ",\"peers\":[");
    for (uint32_t i = 0; i < m->n_hosts; i++) {
        buf_printf(out, "%s{\"index\":%" PRIu32, i ? "," : "", i);
        add_member(out, "where", m->hosts[i].where);
        add_member(out, "host", m->hosts[i].name);
        add_member(out, "error", m->hosts[i].error.text);
        buf_add_char(out, '}');
    }
    buf_add_c(out, "],\"mesh\":[");
    bool first = true;
    for (uint32_t t = 0; t < m->n_transports; t++)
        for (uint32_t from = 0; from < m->n_hosts; from++)
            for (uint32_t to = 0; to < m->n_hosts; to++) {
                if (from == to) continue;
                if (!first) buf_add_char(out, ',');
                first = false;
                add_json_cell(m, t, from, to, out);
            }
    buf_add_char(out, ']');
}
