/* modules.c - checks the kernel modules that rdma needs by the paths that they create, since a
 * module may be built into the kernel. Thread: main. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"

struct kernel_module {
    const char *name, *shows, *for_what; /* `shows`: a path of the built-in module, or NULL */
};

static bool is_loaded(const struct kernel_module *m)
{
    char path[128];
    snprintf(path, sizeof path, "/sys/module/%s", m->name);
    return access(path, F_OK) == 0 || (m->shows && access(m->shows, F_OK) == 0);
}

void doctor_check_modules(struct doctor *d)
{
    const struct kernel_module uverbs = { "ib_uverbs", "/sys/class/infiniband_verbs",
                                          "programs cannot open RDMA devices" };
    const struct kernel_module peermem = {
        "nvidia_peermem", NULL, "without it RDMA devices reach GPU memory only through dma-buf"
    };
    const bool gpus = access("/proc/driver/nvidia/version", F_OK) == 0;
    struct {
        const struct kernel_module *m;
        bool needed, wanted;
    } list[] = { { &uverbs, true, true }, { &peermem, false, gpus } };
    enum doctor_asked asked = doctor_asked_for(d->c, "rdma");
    struct buf there = { 0 };
    if (asked < DOCTOR_ASKED) return; /* used only where it works: see the RDMA line */
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        if (is_loaded(list[i].m)) {
            buf_printf(&there, "%s%s", there.len ? ", " : "", list[i].m->name);
        } else if (list[i].needed) {
            doctor_fix(doctor_add(d, "kernel modules", doctor_missing(asked),
                                  "%s is not loaded: %s", list[i].m->name, list[i].m->for_what),
                       "modprobe %s", list[i].m->name);
        } else if (list[i].wanted && list[i].m == &peermem) {
            doctor_fix(doctor_add(d, "kernel modules", DOCTOR_WARN, "%s is not loaded: %s",
                                  list[i].m->name, list[i].m->for_what),
                       "modprobe %s", list[i].m->name);
        }
    }
    if (there.len) doctor_add(d, "kernel modules", DOCTOR_OK, "loaded: %s", there.data);
    buf_release(&there);
}
