/* device.h - a device's memory, events and copy streams: one ops table per kind (cpu, cuda).
 *
 * A device allocates memory, zeroed, and gives other processes and NICs access to it: on the CPU by
 * a memfd, on a GPU by an IPC handle (device_mem_export) or a dma-buf. The KV pool is one such
 * allocation. The owner of a `struct dev_mem` frees it before device_close. Copies that run next to
 * the device's own work use copy streams (copy_stream.h); an event says how far that work must be
 * before they start.
 * Thread: loop, at start; an allocation may then be used on any thread. device_record_event: the
 * thread that submits the device's work. Exports, imports and copy streams: any. */
#ifndef BATON_KERNELS_DEVICE_H
#define BATON_KERNELS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/err.h"

enum device_mem_flags {
    DEVICE_MEM_PRIVATE = 0,
    DEVICE_MEM_SHARED = 1, /* exportable: on the CPU a memfd, which leaves no name behind */
    DEVICE_MEM_HOST = 2    /* host memory, pinned for a GPU's copy streams; kind is DEV_MEM_HOST */
};

enum {
    DEVICE_HANDLE_BYTES = 64, /* of an exported allocation */
    DEVICE_EVENTS_MAX = 256   /* events kept distinct, more than a step has layers; waiting for an
                               * older one waits for a later one, never too short */
};

enum dev_mem_kind {
    DEV_MEM_HOST, /* the CPU reads and writes it */
    DEV_MEM_CUDA  /* ptr is a CUDA device address of this process */
};

struct dev_mem {
    void *ptr;    /* address in this process; for a GPU a device address */
    size_t bytes; /* rounded up to the device's page */
    int fd;       /* memfd of SHARED memory, -1 otherwise; owned by this struct */
    enum dev_mem_kind kind;
};

struct device;
struct copy_stream;

/* Access for others: another process of this host, or NICs. See device_mem_export,
 * device_mem_import, device_mem_unimport, device_mem_dmabuf, device_flush_rdma_writes. */
struct device_sharing_ops {
    enum status (*export_mem)(struct device *d, const struct dev_mem *m,
                              uint8_t handle[DEVICE_HANDLE_BYTES], struct err *err);
    enum status (*import_mem)(struct device *d, const uint8_t handle[DEVICE_HANDLE_BYTES],
                              void **out, struct err *err);
    void (*unimport_mem)(struct device *d, void *p);
    enum status (*dmabuf)(struct device *d, const struct dev_mem *m, int *fd, struct err *err);
    enum status (*flush_rdma_writes)(struct device *d);
};

struct device_ops {
    const char *name;
    enum status (*open)(struct device **out, struct err *err);
    void (*close)(struct device *d);
    /* ERR_NOMEM says how much was asked for and which option lowers it. */
    enum status (*alloc)(struct device *d, size_t bytes, unsigned flags, struct dev_mem *out,
                         struct err *err);
    void (*release)(struct device *d, struct dev_mem *m);
    /* Copies from and to the host, synchronously. A download first waits for all work that was
     * submitted to the device. */
    void (*upload)(struct device *d, void *to, const void *from, size_t bytes);
    void (*download)(struct device *d, void *to, const void *from, size_t bytes);
    /* OK, or the first error of submitted work, after which the device does nothing any more. */
    enum status (*fault)(struct device *d, struct err *err);
    /* Bytes that could be allocated now; bytes that the device has. */
    size_t (*available)(struct device *d);
    size_t (*total)(struct device *d);
    size_t (*allocated)(struct device *d);
    /* Devices of this kind that the process sees. */
    int (*count)(void);
    void (*describe)(struct device *d, char *out, size_t cap);
    /* See device_record_event and device_copy_stream. */
    uint64_t (*record_event)(struct device *d);
    enum status (*copy_stream)(struct device *d, struct copy_stream **out, struct err *err);
    const struct device_sharing_ops *sharing;
};

struct device {
    const struct device_ops *ops; /* first member of every implementation's struct */
    bool is_host;                 /* the host may read and write its memory directly */
};

/* Opens "cpu", or "cuda" where the build has it. ERR_NODEV: no GPU. ERR_UNSUPPORTED: a GPU that
 * this build has no kernels for. */
enum status device_open(const char *name, struct device **out, struct err *err) MUST_CHECK;
void device_close(struct device *d);
enum status device_mem_alloc(struct device *d, size_t bytes, unsigned flags, struct dev_mem *out,
                             struct err *err) MUST_CHECK;
void device_mem_free(struct device *d, struct dev_mem *m);
void device_upload(struct device *d, void *to, const void *from, size_t bytes);
void device_download(struct device *d, void *to, const void *from, size_t bytes);
/* Waits for all work that was submitted to the device. */
void device_wait(struct device *d);
enum status device_fault(struct device *d, struct err *err);
size_t device_available(struct device *d);
size_t device_total(struct device *d);
/* Bytes that this device object has allocated; 0 on the CPU, where nobody counts. Loop, at
 * start. */
size_t device_allocated(struct device *d);
/* Describes the device: "NVIDIA H200 (compute capability 9.0, 132 multiprocessors, driver for CUDA
 * 13.0)". */
void device_describe(struct device *d, char *out, size_t cap);

/* Makes a handle with which another process of this host can open the allocation m, as long as this
 * process lives and has not freed m. ERR_UNSUPPORTED on the CPU, whose shared memory has a
 * descriptor. ERR_NODEV: the GPU's driver will not share it. */
enum status device_mem_export(struct device *d, const struct dev_mem *m,
                              uint8_t handle[DEVICE_HANDLE_BYTES], struct err *err) MUST_CHECK;
/* Maps another process's allocation here, for copy streams only. ERR_UNSUPPORTED on the CPU.
 * ERR_PEER_LOST: its owner is gone, or the handle is invalid. */
enum status device_mem_import(struct device *d, const uint8_t handle[DEVICE_HANDLE_BYTES],
                              void **out, struct err *err) MUST_CHECK;
/* Unmaps p; no copy stream has pending operations on it. */
void device_mem_unimport(struct device *d, void *p);
/* Makes a dma-buf descriptor by which NICs reach the allocation m; the caller closes it.
 * ERR_UNSUPPORTED says why there is none: CPU memory needs none, or the driver or GPU cannot. */
enum status device_mem_dmabuf(struct device *d, const struct dev_mem *m, int *fd,
                              struct err *err) MUST_CHECK;
/* Makes what NICs have written so far visible to work submitted to the device from now on
 * (GPUDirect RDMA). Any thread. ERR_NODEV: the device failed. */
enum status device_flush_rdma_writes(struct device *d) MUST_CHECK;
/* Returns an event after all work submitted so far, for copy_stream_wait_event; 0: that work is
 * done, as always on the CPU. */
uint64_t device_record_event(struct device *d);
/* Opens a copy stream; its owner closes it (copy_stream_close) before the device. */
enum status device_copy_stream(struct device *d, struct copy_stream **out,
                               struct err *err) MUST_CHECK;

/* Devices of a kind that this process sees; 0 for a kind that the build does not have. */
int device_count(const char *name);

#endif
