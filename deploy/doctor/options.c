/* options.c - checks that the options make sense together: a node would accept them, and this host
 * has a transport for KV that they allow.
 *
 * Earlier checks look at the host with the options that each needs. This one reports what only
 * node_options refuses, so that a report without failures means that a node would start.
 * Thread: main. */
#include <string.h>

#include "deploy/doctor/doctor.h"
#include "deploy/node/node_model.h"

void doctor_check_options(struct doctor *d)
{
    struct err err = { 0 };
    struct node_options o;
    if (doctor_count(d, DOCTOR_FAIL)) return; /* reported already, often with the same cause */
    if (node_options_check_read(d->c, &o, &err) != OK)
        doctor_fix(doctor_add(d, "options", DOCTOR_FAIL, "%s", err.text),
                   "correct it: a node would not start with it");
    else if (config_is_set(d->c, "model") && node_model_check(&o, &err) != OK)
        doctor_fix(doctor_add(d, "weights", DOCTOR_FAIL, "%s", err.text),
                   "a node would not start with these weights and options");
    node_options_print_notes(&o);
    node_options_release(&o);
}

static bool has_trouble(const struct doctor *d, const char *what)
{
    for (size_t i = 0; i < d->n; i++)
        if (strcmp(d->lines[i].what, what) == 0 && d->lines[i].result != DOCTOR_OK) return true;
    return false;
}

/* Either of rdma and ucx may be missing, but not both. */
void doctor_check_transports(struct doctor *d)
{
    bool any = doctor_asked_for(d->c, "ipc") != DOCTOR_NOT_ALLOWED ||
               doctor_asked_for(d->c, "tcp") != DOCTOR_NOT_ALLOWED;
    bool rdma = doctor_asked_for(d->c, "rdma") != DOCTOR_NOT_ALLOWED,
         ucx = doctor_asked_for(d->c, "ucx") != DOCTOR_NOT_ALLOWED;
    if (any || !rdma || !ucx || !has_trouble(d, "RDMA") || !has_trouble(d, "UCX")) return;
    doctor_fix(
        doctor_add(d, "KV", DOCTOR_FAIL,
                   "--cache-transfer-protocol names rdma and ucx only, and this host has neither"),
        "add ipc (same host) or tcp, or fix one of the two");
}
