/* checks.c - runs the checks in the order of the report. The only file that knows which libraries
 * this binary was built with. Thread: main. */
#include "deploy/doctor/doctor.h"

#ifndef BATON_HAVE_RDMA
static void no_rdma(struct doctor *d) { doctor_add_not_built(d, "RDMA", "rdma"); }
#define doctor_check_rdma no_rdma
#endif
#ifndef BATON_HAVE_UCX
static void no_ucx(struct doctor *d) { doctor_add_not_built(d, "UCX", "ucx"); }
#define doctor_check_ucx no_ucx
#endif

void doctor_check_host(struct doctor *d)
{
    static void (*const checks[])(struct doctor *) = {
        doctor_check_cpu,     doctor_check_gpu,        doctor_check_model,  doctor_check_memory,
        doctor_check_tiers,   doctor_check_huge_pages, doctor_check_system, doctor_check_tuning,
        doctor_check_modules, doctor_check_rdma,       doctor_check_ucx,    doctor_check_transports,
        doctor_check_ports,   doctor_check_cluster,    doctor_check_redis,  doctor_check_group,
        doctor_check_options,
    };
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) checks[i](d);
}
