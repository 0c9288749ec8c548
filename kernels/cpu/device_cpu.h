/* device_cpu.h - the CPU as an implementation of kernels/device.h. Thread: see device.h. */
#ifndef BATON_KERNELS_CPU_DEVICE_CPU_H
#define BATON_KERNELS_CPU_DEVICE_CPU_H

#include "kernels/device.h"

extern const struct device_ops device_cpu_ops;

/* copy_stream_cpu.c */
enum status copy_stream_cpu_open(struct device *d, struct copy_stream **out,
                                 struct err *err) MUST_CHECK;

#endif
