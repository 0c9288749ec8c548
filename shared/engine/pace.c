/* pace.c - see pace.h. Points with equal rows are a line over the context; between two lines the
 * rows decide. Thread: any. */
#include "shared/engine/pace.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/json/json.h"
#include "shared/base/mem.h"

static const double ROWS_MAX = 1e6, CONTEXT_MAX = 1e9;

/* ---- reading ---- */

/* Is every member of `o` one of the names? A misspelt one would be a step that costs nothing. */
static enum status check_members(const cJSON *o, const char *where, const char *const *names,
                                 size_t n_names, struct err *err)
{
    const cJSON *m;
    cJSON_ArrayForEach (m, o) {
        size_t i = 0;
        while (i < n_names && strcmp(m->string, names[i]) != 0) i++;
        if (i < n_names) continue;
        struct buf all = { 0 };
        for (size_t k = 0; k < n_names; k++) buf_printf(&all, "%s%s", k ? ", " : "", names[k]);
        enum status st = err_field(err, ERR_INVALID, m->string,
                                   "%s has no member '%.64s'; its members are %s", where, m->string,
                                   all.data);
        buf_release(&all);
        return st;
    }
    return OK;
}

/* Reads number k of a point. */
static enum status read_coordinate(const cJSON *point, int k, double min, double max, int i_point,
                                   const char *kind, double *out, struct err *err)
{
    static const char *const NAMES[] = { "rows", "context", "us" };
    const cJSON *v = cJSON_GetArrayItem(point, k);
    if (cJSON_IsNumber(v) && v->valuedouble >= min && v->valuedouble <= max) {
        *out = v->valuedouble;
        return OK;
    }
    if (!cJSON_IsNumber(v))
        return err_field(err, ERR_INVALID, "points", "%s.points[%d]: its %s must be a number", kind,
                         i_point, NAMES[k]);
    return err_field(err, ERR_INVALID, "points",
                     "%s.points[%d]: its %s is %.9g, but must be from %.9g to %.9g", kind, i_point,
                     NAMES[k], v->valuedouble, min, max);
}

static bool comes_after(const struct pace_point *p, const struct pace_point *before)
{
    return p->rows > before->rows || (p->rows == before->rows && p->context > before->context);
}

static enum status read_point(const cJSON *v, const char *kind, struct pace_rows *r,
                              struct err *err)
{
    const int i = (int)r->n_points;
    struct pace_point p;
    if (i == PACE_POINTS_MAX)
        return err_field(err, ERR_INVALID, "points", "%s.points has more than %d points", kind,
                         PACE_POINTS_MAX);
    if (!cJSON_IsArray(v) || cJSON_GetArraySize(v) != 3)
        return err_field(err, ERR_INVALID, "points",
                         "%s.points[%d] must be three numbers: [rows, context, us]", kind, i);
    TRY(read_coordinate(v, 0, 1, ROWS_MAX, i, kind, &p.rows, err));
    TRY(read_coordinate(v, 1, 1, CONTEXT_MAX, i, kind, &p.context, err));
    TRY(read_coordinate(v, 2, 0, PACE_US_MAX, i, kind, &p.us, err));
    if (i > 0 && !comes_after(&p, &r->points[i - 1]))
        return err_field(err, ERR_INVALID, "points",
                         "%s.points[%d]: (rows, context) is (%.9g, %.9g), but must be more than "
                         "that of the point before, (%.9g, %.9g)",
                         kind, i, p.rows, p.context, r->points[i - 1].rows,
                         r->points[i - 1].context);
    r->points[r->n_points++] = p;
    return OK;
}

static enum status read_points(const cJSON *o, const char *kind, struct pace_rows *r,
                               struct err *err)
{
    const cJSON *points = json_member(o, "points"), *p;
    if (!points) return OK;
    if (!cJSON_IsArray(points))
        return err_field(err, ERR_INVALID, "points",
                         "%s.points must be a list of points, each [rows, context, us]", kind);
    cJSON_ArrayForEach (p, points) TRY(read_point(p, kind, r, err));
    return OK;
}

static enum status read_rows(const cJSON *doc, const char *kind, struct pace_rows *r,
                             struct err *err)
{
    static const char *const NAMES[] = { "row_us", "context_us", "points" };
    const cJSON *o = json_member(doc, kind);
    if (!o)
        return err_field(err, ERR_INVALID, kind,
                         "%s is missing: an object with row_us, context_us or points", kind);
    if (!cJSON_IsObject(o))
        return err_field(err, ERR_INVALID, kind,
                         "%s must be an object with row_us, context_us or points", kind);
    TRY(check_members(o, kind, NAMES, COUNT_OF(NAMES), err));
    enum status st = json_get_f64(o, "row_us", 0, PACE_US_MAX, &r->row_us, err);
    if (st == OK) st = json_get_f64(o, "context_us", 0, PACE_US_MAX, &r->context_us, err);
    if (st != OK) return err_prefix(err, "%s.", kind);
    return read_points(o, kind, r, err);
}

static enum status read_about(const cJSON *doc, struct pace_curve *c, struct err *err)
{
    const char *about = "";
    TRY(json_get_str(doc, "about", &about, err));
    if (strlen(about) >= PACE_ABOUT_MAX)
        return err_field(err, ERR_INVALID, "about", "about has %zu bytes, but at most %d fit",
                         strlen(about), PACE_ABOUT_MAX - 1);
    memcpy(c->about, about, strlen(about) + 1);
    return OK;
}

static enum status read_curve(const cJSON *doc, struct pace_curve *c, struct err *err)
{
    static const char *const NAMES[] = { "about", "fixed_us", "prompt", "decode" };
    if (!cJSON_IsObject(doc))
        return err_set(err, ERR_INVALID,
                       "a curve must be an object with about, fixed_us, prompt "
                       "and decode");
    TRY(check_members(doc, "a curve", NAMES, COUNT_OF(NAMES), err));
    TRY(read_about(doc, c, err));
    TRY(json_get_f64(doc, "fixed_us", 0, PACE_US_MAX, &c->fixed_us, err));
    TRY(read_rows(doc, "prompt", &c->prompt, err));
    return read_rows(doc, "decode", &c->decode, err);
}

enum status pace_parse(struct str text, struct pace_curve *out, struct err *err)
{
    struct pace_curve c;
    cJSON *doc = NULL;
    memset(&c, 0, sizeof c); /* padding, too: equal curves have equal bytes */
    TRY(json_parse(text, true, &doc, err));
    enum status st = read_curve(doc, &c, err);
    cJSON_Delete(doc);
    if (st == OK) *out = c;
    return st;
}

enum status pace_read(const char *path, struct pace_curve *out, struct err *err)
{
    FILE *f = fopen(path, "rbe");
    if (!f) return err_set(err, ERR_IO, "%s cannot be read: %s", path, strerror(errno));
    char *text = MEM_ARRAY(char, PACE_FILE_MAX + 1);
    const size_t n = fread(text, 1, PACE_FILE_MAX + 1, f);
    enum status st = OK;
    if (ferror(f)) st = err_set(err, ERR_IO, "%s cannot be read: %s", path, strerror(errno));
    else if (n > PACE_FILE_MAX)
        st = err_set(err, ERR_TOO_LONG, "%s has more than %d bytes, and is no curve", path,
                     PACE_FILE_MAX);
    fclose(f);
    if (st == OK) {
        st = pace_parse((struct str){ text, n }, out, err);
        if (st != OK) err_prefix(err, "%s: ", path);
    }
    mem_free(text);
    return st;
}

/* ---- the time of a step ---- */

struct pace_load pace_load_of(const struct attn_seq *seqs, uint32_t n_seqs)
{
    struct pace_load l = { 0 };
    for (uint32_t i = 0; i < n_seqs; i++) {
        const uint64_t n = (uint64_t)seqs[i].n_q, before = (uint64_t)seqs[i].pos_begin;
        /* a row attends to itself, too: before + 1, .., before + n */
        const uint64_t context = n * before + n * (n + 1) / 2;
        if (seqs[i].is_decode) {
            l.decode_rows += n;
            l.decode_context += context;
        } else {
            l.prompt_rows += n;
            l.prompt_context += context;
        }
    }
    return l;
}

static double linear_us(const struct pace_rows *r, double rows, double context)
{
    return rows * r->row_us + rows * context * 1e-3 * r->context_us;
}

/* What a point differs from the linear part of the curve. */
static double excess(const struct pace_curve *c, const struct pace_rows *r, uint32_t i_point)
{
    const struct pace_point *p = &r->points[i_point];
    return p->us - c->fixed_us - linear_us(r, p->rows, p->context);
}

static double between(double x, double x0, double y0, double x1, double y1)
{
    return x1 > x0 ? y0 + (y1 - y0) * (x - x0) / (x1 - x0) : y0;
}

/* On the line of points [first, end), which have equal rows. */
static double excess_at_context(const struct pace_curve *c, const struct pace_rows *r,
                                uint32_t first, uint32_t end, double context)
{
    const struct pace_point *p = r->points;
    if (context <= p[first].context) return excess(c, r, first);
    for (uint32_t i = first + 1; i < end; i++)
        if (context <= p[i].context)
            return between(context, p[i - 1].context, excess(c, r, i - 1), p[i].context,
                           excess(c, r, i));
    return excess(c, r, end - 1);
}

/* The first point behind `first` that has other rows. */
static uint32_t end_of_line(const struct pace_rows *r, uint32_t first)
{
    uint32_t end = first + 1;
    while (end < r->n_points && r->points[end].rows == r->points[first].rows) end++;
    return end;
}

static double excess_at(const struct pace_curve *c, const struct pace_rows *r, double rows,
                        double context)
{
    if (r->n_points == 0) return 0;
    uint32_t first = 0, end = end_of_line(r, 0);
    double rows_before = r->points[0].rows, before = excess_at_context(c, r, first, end, context);
    while (rows > rows_before && end < r->n_points) {
        first = end;
        end = end_of_line(r, first);
        const double rows_here = r->points[first].rows,
                     here = excess_at_context(c, r, first, end, context);
        if (rows <= rows_here) return between(rows, rows_before, before, rows_here, here);
        rows_before = rows_here;
        before = here;
    }
    return before;
}

static double rows_us(const struct pace_curve *c, const struct pace_rows *r, uint64_t n_rows,
                      uint64_t positions)
{
    if (n_rows == 0) return 0;
    const double rows = (double)n_rows, context = (double)positions / rows;
    return linear_us(r, rows, context) + excess_at(c, r, rows, context);
}

double pace_step_us(const struct pace_curve *c, const struct pace_load *l)
{
    const double us = c->fixed_us + rows_us(c, &c->prompt, l->prompt_rows, l->prompt_context) +
                      rows_us(c, &c->decode, l->decode_rows, l->decode_context);
    return us < 0 ? 0 : us < PACE_US_MAX ? us : PACE_US_MAX;
}
