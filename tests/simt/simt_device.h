/* simt_device.h - the properties of the emulated GPU. Thread: any. */
#ifndef BATON_TESTS_SIMT_SIMT_DEVICE_H
#define BATON_TESTS_SIMT_SIMT_DEVICE_H

#include <stddef.h>

/* BATON_SIMT_MEMORY bytes, 4 GiB without it. */
size_t simt_memory_total(void);

#endif
