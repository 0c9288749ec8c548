/* ucx.c - what UCX finds on this host: its version, and the transports with the devices they would use. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

#include "deploy/doctor/doctor.h"

enum { NAMES_MAX = 64, NAME_MAX_UCX = 64 };

/* Add `name` once; false when the list is full. */
static void add_name(char names[NAMES_MAX][NAME_MAX_UCX], size_t *n, struct str name)
{
    for (size_t i = 0; i < *n; i++)
        if (str_eq_c(name, names[i])) return;
    if (*n < NAMES_MAX && name.n) snprintf(names[(*n)++], NAME_MAX_UCX, "%.*s", STR_ARG(name));
}

/* ucp_context_print_info writes "# resource 3 : md 1 dev 1 flags -- rc_verbs/mlx5_0:1": the words after "--". */
static void add_resources(struct str info, struct buf *out)
{
    char names[NAMES_MAX][NAME_MAX_UCX];
    struct str line;
    size_t n = 0;
    while (str_split(&info, '\n', &line)) {
        size_t at = str_find(line, STR("-- "));
        if (str_find(line, STR("resource ")) == SIZE_MAX || at == SIZE_MAX) continue;
        add_name(names, &n, str_trim(str_sub(line, at + 3, SIZE_MAX)));
    }
    for (size_t i = 0; i < n; i++) buf_printf(out, "%s%s", i ? ", " : "", names[i]);
}

/* The report of a context with `tls` (NULL: every transport), freed by the caller; NULL and *st when UCX refuses. */
static char *context_info(const char *tls, ucs_status_t *st)
{
    ucp_params_t params = { .field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA | UCP_FEATURE_AM };
    ucp_config_t *config = NULL;
    ucp_context_h context = NULL;
    char *text = NULL;
    size_t n = 0;
    if ((*st = ucp_config_read(NULL, NULL, &config)) != UCS_OK) return NULL;
    if (tls) *st = ucp_config_modify(config, "TLS", tls);
    if (*st == UCS_OK) *st = ucp_init(&params, config, &context);
    ucp_config_release(config);
    if (*st != UCS_OK) return NULL;
    FILE *f = open_memstream(&text, &n);
    if (f) {
        ucp_context_print_info(context, f);
        fclose(f);
    }
    ucp_cleanup(context);
    return text;
}

void doctor_check_ucx(struct doctor *d)
{
    enum doctor_asked asked = doctor_asked_for(d->c, "ucx");
    unsigned major, minor, release;
    ucs_status_t st;
    struct buf found = { 0 };
    if (asked < DOCTOR_ASKED) {
        doctor_add(d, "UCX", DOCTOR_OK, "not asked for: --cache-transfer-protocol does not name ucx");
        return;
    }
    ucp_get_version(&major, &minor, &release);
    char *info = context_info(d->tuning.ucx_tls, &st);
    if (!info) {
        doctor_fix(doctor_add(d, "UCX", doctor_missing(asked), "version %u.%u.%u does not start%s%s: %s", major, minor, release,
                              d->tuning.ucx_tls ? " with BATON_UCX_TLS=" : "", d->tuning.ucx_tls ? d->tuning.ucx_tls : "", ucs_status_string(st)),
                   "ucx_info -d lists the transports that this host has");
        return;
    }
    add_resources(str_of(info), &found);
    struct doctor_line *line = doctor_add(d, "UCX", found.len ? DOCTOR_OK : doctor_missing(asked), "version %u.%u.%u: %s", major, minor, release,
                                          found.len ? found.data : "no transport");
    if (!found.len) doctor_fix(line, "ucx_info -d lists the transports that this host has; BATON_UCX_TLS and UCX_TLS restrict them");
    buf_release(&found);
    free(info);
}
