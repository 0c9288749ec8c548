/* gpu.c - checks the GPU of --device cuda: it exists, this build has kernels for it, its memory is
 * free. Thread: main. */
#include <string.h>

#include "deploy/doctor/doctor.h"
#include "kernels/device.h"

static const double GIB = 1 << 30;

bool doctor_on_gpu(const struct doctor *d)
{
    return strcmp(config_string(d->c, "device"), "cuda") == 0;
}

static void check_memory(struct doctor *d, uint64_t total, uint64_t available)
{
    const double share = config_float(d->c, "gpu-memory-utilization"),
                 wanted = (double)total * share;
    d->gpu_room = (uint64_t)((double)available * share); /* as in node_model.c, without weights */
    d->gpu_free = available;
    if ((double)available >= 0.95 * wanted) {
        doctor_add(d, "GPU memory", DOCTOR_OK,
                   "%.1f of %.1f GiB free; --gpu-memory-utilization %g leaves %.1f GiB for weights "
                   "and KV cache",
                   (double)available / GIB, (double)total / GIB, share, (double)d->gpu_room / GIB);
        return;
    }
    doctor_fix(
        doctor_add(d, "GPU memory", DOCTOR_WARN,
                   "%.1f of %.1f GiB free: others have the rest, and --gpu-memory-utilization %g "
                   "leaves %.1f GiB for weights and KV cache",
                   (double)available / GIB, (double)total / GIB, share, (double)d->gpu_room / GIB),
        "nvidia-smi names the processes; end them, or choose another GPU by CUDA_VISIBLE_DEVICES");
}

static void check_device(struct doctor *d)
{
    struct device *gpu = NULL;
    struct err err = { 0 };
    char text[DOCTOR_TEXT_MAX / 2];
    const int n = device_count("cuda");
    if (device_open("cuda", &gpu, &err) != OK) {
        doctor_fix(doctor_add(d, "GPU", DOCTOR_FAIL, "%s", err.text), "%s",
                   err.code == ERR_NODEV ? "or use --device cpu"
                                         : "use --device cpu, or a build with kernels for it");
        return;
    }
    device_describe(gpu, text, sizeof text);
    doctor_add(d, "GPU", DOCTOR_OK, "%s%s", text,
               n > 1 ? "; the first of several that CUDA_VISIBLE_DEVICES leaves" : "");
    check_memory(d, device_total(gpu), device_available(gpu));
    device_close(gpu);
}

void doctor_check_gpu(struct doctor *d)
{
    if (doctor_on_gpu(d)) check_device(d);
    else if (device_count("cuda") > 0)
        doctor_add(d, "GPU", DOCTOR_OK, "%d seen, not used: --device is cpu", device_count("cuda"));
}
