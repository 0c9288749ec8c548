/* protocols.c - how the options treat each transport protocol, the tuning variables, and the
 * protocols that are not built in. Thread: main. */
#include <errno.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"

enum doctor_asked doctor_asked_for(const struct config *c, const char *protocol)
{
    const char *p;
    bool named = false, others = false;
    for (size_t i = 0; (p = config_list(c, "cache-transfer-protocol", i, NULL)); i++) {
        bool it = str_eq_c(str_trim(str_of(p)), protocol);
        named |= it;
        others |= !it;
    }
    if (!named) return DOCTOR_NOT_ALLOWED;
    if (!config_is_set(c, "cache-transfer-protocol")) return DOCTOR_ALLOWED;
    return others ? DOCTOR_ASKED : DOCTOR_ASKED_ALONE;
}

enum doctor_result doctor_missing(enum doctor_asked asked)
{
    return asked == DOCTOR_ASKED_ALONE ? DOCTOR_FAIL
           : asked == DOCTOR_ASKED     ? DOCTOR_WARN
                                       : DOCTOR_OK;
}

/* Control connections cannot listen on an interface that is missing, down or without an address. */
static void check_interface(struct doctor *d, const char *name)
{
    char path[128], state[32] = "";
    snprintf(path, sizeof path, "/sys/class/net/%s/operstate", name);
    if (if_nametoindex(name) == 0) {
        struct doctor_line *line = doctor_add(
            d, "interface", DOCTOR_FAIL,
            "KVCACHE_SOCKET_IFNAME: this host has no network interface %s", name);
        doctor_fix(line, "ip -brief link names them; deploy/get_rdma_nics.sh cpu chooses one");
        return;
    }
    if (!doctor_read_line(path, state, sizeof state)) snprintf(state, sizeof state, "unknown");
    bool down = strcmp(state, "down") == 0;
    struct doctor_line *line = doctor_add(d, "interface", down ? DOCTOR_FAIL : DOCTOR_OK,
                                          "KVCACHE_SOCKET_IFNAME: %s is %s", name, state);
    if (down) doctor_fix(line, "ip link set %s up, or name another", name);
}

static void check_rdma_cm(struct doctor *d)
{
    static const char path[] = "/dev/infiniband/rdma_cm";
    if (access(path, R_OK | W_OK) == 0)
        doctor_add(d, "environment", DOCTOR_OK, "BATON_RDMA_CM=1: %s is there; every node needs it",
                   path);
    else if (errno == ENOENT)
        doctor_fix(
            doctor_add(d, "environment", DOCTOR_FAIL, "BATON_RDMA_CM=1: %s is not there", path),
            "modprobe rdma_ucm, or unset BATON_RDMA_CM");
    else
        doctor_fix(doctor_add(d, "environment", DOCTOR_FAIL,
                              "BATON_RDMA_CM=1: %s cannot be opened: %s", path, strerror(errno)),
                   "let this user read and write it");
}

void doctor_check_tuning(struct doctor *d)
{
    struct buf idle = { 0 };
    bool known;
    for (const struct kvt_tuning_name *n = kvt_tuning_names; n->name; n++) {
        const char *value = getenv(n->name);
        struct err err = { 0 };
        if (!value || !*value) continue;
        if (kvt_tuning_set(&d->tuning, n->name, value, &known, &err) != OK) {
            doctor_fix(doctor_add(d, "environment", DOCTOR_FAIL, "%s", err.text),
                       "correct it, or unset %s", n->name);
        } else if (n->no_effect) {
            buf_printf(&idle, "%s%s", idle.len ? ", " : "", n->name);
        }
    }
    if (idle.len)
        doctor_add(d, "environment", DOCTOR_OK, "set, without effect here: %s", idle.data);
    if (d->tuning.rdma.rdma_cm && doctor_asked_for(d->c, "rdma") != DOCTOR_NOT_ALLOWED)
        check_rdma_cm(d);
    if (d->tuning.socket_ifname) check_interface(d, d->tuning.socket_ifname);
    buf_release(&idle);
}

void doctor_add_not_built(struct doctor *d, const char *what, const char *protocol)
{
    enum doctor_asked asked = doctor_asked_for(d->c, protocol);
    struct doctor_line *line = doctor_add(d, what, doctor_missing(asked),
                                          "not built into this binary%s",
                                          asked == DOCTOR_NOT_ALLOWED ? "; not asked for" : "");
    if (asked >= DOCTOR_ASKED)
        doctor_fix(line,
                   "build baton where the library is installed (deploy/install_deps.sh), or take "
                   "%s out of --cache-transfer-protocol",
                   protocol);
}
