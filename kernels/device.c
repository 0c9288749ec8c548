/* device.c - the kinds of device, and the calls that go through their tables. Thread: loop at start. */
#include "kernels/device.h"

#include <string.h>

#include "kernels/cpu/device_cpu.h"
#include "shared/base/mem.h"

static const struct device_ops *const DEVICES[] = { &device_cpu_ops };

enum status device_open(const char *name, struct device **out, struct err *err)
{
    for (size_t i = 0; i < COUNT_OF(DEVICES); i++)
        if (strcmp(DEVICES[i]->name, name) == 0) return DEVICES[i]->open(out, err);
    return err_set(err, ERR_UNSUPPORTED, "this build has no device \"%s\"; it has: cpu", name);
}

void device_close(struct device *d)
{
    if (d) d->ops->close(d);
}

enum status device_mem_alloc(struct device *d, size_t bytes, unsigned flags, struct dev_mem *out, struct err *err)
{
    return d->ops->alloc(d, bytes, flags, out, err);
}

void device_mem_free(struct device *d, struct dev_mem *m)
{
    if (!m || !m->ptr) return;
    d->ops->release(d, m);
    *m = (struct dev_mem){ .fd = -1 };
}
