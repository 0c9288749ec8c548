/* ucx.c - checks what UCX finds on this host for the UCX transports that the ucx transport may use:
 * UCX's version, and which of them runs on which device. Thread: main. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

#include "deploy/doctor/doctor.h"
#include "kvtransfer/ucx/setup.h"

enum { NAMES_MAX = 64, NAME_MAX_UCX = 64 };

/* Adds `name` unless the list has it or is full. */
static void add_name(char names[NAMES_MAX][NAME_MAX_UCX], size_t *n, struct str name)
{
    for (size_t i = 0; i < *n; i++)
        if (str_eq_c(name, names[i])) return;
    if (*n < NAMES_MAX && name.n) snprintf(names[(*n)++], NAME_MAX_UCX, "%.*s", STR_ARG(name));
}

/* Parses a line of ucp_context_print_info, "# resource 3 : md 1 dev 1 flags -- rc_verbs/mlx5_0:1":
 * the words after "--". */
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

/* The report of a UCX context for the transports `tls`, freed by the caller. NULL, with *st set,
 * when UCX has no device for them. */
static char *context_info(const char *tls, ucs_status_t *st)
{
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AM,
    };
    ucp_config_t *config = NULL;
    ucp_context_h context = NULL;
    char *text = NULL;
    size_t n = 0;
    if ((*st = ucp_config_read(NULL, NULL, &config)) != UCS_OK) return NULL;
    *st = ucp_config_modify(config, "TLS", tls);
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

static void check_transports(struct doctor *d, const char *tls, enum doctor_asked asked)
{
    unsigned major, minor, release;
    ucs_status_t st = UCS_OK;
    struct buf found = { 0 };
    ucp_get_version(&major, &minor, &release);
    /* UCX would log to stdout, into the report; the status says enough. */
    (void)ucs_global_opts_set_value("LOG_LEVEL", "fatal");
    char *info = context_info(tls, &st);
    if (info) add_resources(str_of(info), &found);
    if (found.len)
        doctor_add(d, "UCX", DOCTOR_OK, "version %u.%u.%u, of the transports %s: %s", major, minor,
                   release, tls, found.data);
    else
        doctor_fix(
            doctor_add(d, "UCX", doctor_missing(asked),
                       "version %u.%u.%u has no device for the transports %s: %s", major, minor,
                       release, tls, ucs_status_string(st)),
            "ucx_info -d lists what this host has; without an RDMA device use the protocol tcp");
    buf_release(&found);
    free(info);
}

void doctor_check_ucx(struct doctor *d)
{
    enum doctor_asked asked = doctor_asked_for(d->c, "ucx");
    const char *given = d->tuning.ucx_tls ? d->tuning.ucx_tls : getenv("UCX_TLS");
    struct err err = { 0 };
    struct buf tls = { 0 };
    if (asked == DOCTOR_NOT_ALLOWED)
        doctor_add(d, "UCX", DOCTOR_OK,
                   "not asked for: --cache-transfer-protocol does not name ucx");
    else if (ucx_check_tls(given, &tls, &err) != OK)
        doctor_fix(doctor_add(d, "UCX", DOCTOR_FAIL, "%s", err.text), "unset %s, or name others",
                   d->tuning.ucx_tls ? "BATON_UCX_TLS" : "UCX_TLS");
    else check_transports(d, tls.data, asked);
    buf_release(&tls);
}
