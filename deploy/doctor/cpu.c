/* cpu.c - checks what computes here: instruction sets, the kernel backend that they allow, and the
 * number of CPUs that this process may use. Thread: main. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/doctor/doctor.h"
#include "kernels/backend.h"

static void check_backend(struct doctor *d)
{
    char features[128];
    struct err err = { 0 };
    struct kernel_ctx *ctx = NULL;
    kernel_cpu_features(features, sizeof features);
    if (kernel_ctx_create(
            kernel_options_default(config_string(d->c, "cpu-isa"), ACTIVATIONS_F32, 1), &ctx,
            &err) != OK) {
        doctor_fix(doctor_add(d, "CPU", DOCTOR_FAIL, "%s", err.text), "use --cpu-isa auto");
        return;
    }
    bool plain = str_eq_c(str_of(ctx->backend->name), "ref");
    struct doctor_line *line = doctor_add(d, "CPU", plain ? DOCTOR_WARN : DOCTOR_OK,
                                          "kernels %s; this CPU has %s", ctx->backend->name,
                                          features);
    if (plain)
        doctor_fix(
            line,
            "the ref backend is for comparison; a CPU with AVX2 and FMA is many times faster");
    kernel_ctx_free(ctx);
}

/* CPUs that cgroup v2's cpu.max ("quota period" or "max period") grants; 0: no quota. */
static double cpu_quota(void)
{
    char text[64] = "";
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (!f) return 0;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    char *end;
    double quota = strtod(text, &end), period = strtod(end, NULL);
    return strncmp(text, "max", 3) == 0 || period <= 0 ? 0 : quota / period;
}

static void check_count(struct doctor *d)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    int64_t threads = config_int(d->c, "compute-threads");
    double quota = cpu_quota();
    if (threads == 0) threads = n;
    if (quota > 0 && (double)threads > quota + 0.5)
        doctor_fix(
            doctor_add(
                d, "CPUs", DOCTOR_WARN,
                "%lld compute threads, but a cgroup quota of %.2f CPUs: they would stop each other",
                (long long)threads, quota),
            "use --compute-threads %d", quota < 1 ? 1 : (int)quota);
    else if (threads > n)
        doctor_fix(doctor_add(d, "CPUs", DOCTOR_WARN, "%lld compute threads on %d CPUs",
                              (long long)threads, n),
                   "use --compute-threads %d", n);
    else doctor_add(d, "CPUs", DOCTOR_OK, "%d usable, %lld compute threads", n, (long long)threads);
}

void doctor_check_cpu(struct doctor *d)
{
    check_backend(d);
    check_count(d);
}
