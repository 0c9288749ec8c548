/* device.h - memory of a device: one ops table per kind (rows: cpu, cuda).
 *
 * A device allocates memory, and lets another process write into an allocation: the processor by a
 * shared memory file descriptor, a card by a handle (device_mem_export). The KV pool is one such
 * allocation. Memory a device returns is zeroed. The owner of a `struct dev_mem` frees it with
 * device_mem_free before device_close. Copies that run beside a device's own work go through lanes
 * (copy_stream.h); marks say how far that work has to be before they begin. Thread: loop at start;
 * an allocation may then be used on any thread. device_record_event: the thread that gives the
 * device its work. Exports, imports and lanes: any. */
#ifndef BATON_KERNELS_DEVICE_H
#define BATON_KERNELS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/err.h"

enum device_mem_flags {
    DEVICE_MEM_PRIVATE = 0,
    DEVICE_MEM_SHARED = 1, /* exportable: cpu backs it with a memfd, which leaves no name behind */
    DEVICE_MEM_HOST = 2    /* the processor's memory, where a card's lanes read and write without a
                            * detour (pinned); kind is DEV_MEM_HOST */
};

enum {
    DEVICE_HANDLE_BYTES = 64, /* of an exported allocation */
    DEVICE_EVENTS_MAX = 256   /* marks a device remembers apart: more than layers of a step; an
                               * older one counts as a later one */
};

enum dev_mem_kind {
    DEV_MEM_HOST, /* the processor reads and writes it */
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
    /* From and to the host. Both are over when they return; a download first waits for all work
     * that was given to the device before. */
    void (*upload)(struct device *d, void *to, const void *from, size_t bytes);
    void (*download)(struct device *d, void *to, const void *from, size_t bytes);
    /* OK, or the first thing that went wrong with work that was given to the device, which can do
     * nothing more. */
    enum status (*fault)(struct device *d, struct err *err);
    /* Bytes that could be allocated now, and all that it has. */
    size_t (*available)(struct device *d);
    size_t (*total)(struct device *d);
    size_t (*allocated)(struct device *d);
    /* How many of the kind this process sees. */
    int (*count)(void);
    void (*describe)(struct device *d, char *out, size_t cap);
    /* See device_record_event and device_copy_stream. */
    uint64_t (*record_event)(struct device *d);
    enum status (*copy_stream)(struct device *d, struct copy_stream **out, struct err *err);
    const struct device_sharing_ops *sharing;
};

struct device {
    const struct device_ops *ops; /* first member of every implementation's struct */
    bool is_host;                 /* its memory is the processor's: the host may read and write
                                   * it as its own */
};

/* "cpu", or "cuda" where the build has it: ERR_NODEV without a card, ERR_UNSUPPORTED for one that
 * this build has no kernels for. */
enum status device_open(const char *name, struct device **out, struct err *err) MUST_CHECK;
void device_close(struct device *d);
enum status device_mem_alloc(struct device *d, size_t bytes, unsigned flags, struct dev_mem *out,
                             struct err *err) MUST_CHECK;
void device_mem_free(struct device *d, struct dev_mem *m);
void device_upload(struct device *d, void *to, const void *from, size_t bytes);
void device_download(struct device *d, void *to, const void *from, size_t bytes);
/* All work that was given to the device before is over. */
void device_wait(struct device *d);
enum status device_fault(struct device *d, struct err *err);
size_t device_available(struct device *d);
size_t device_total(struct device *d);
/* Bytes of a card's memory that this device has handed out; 0 of the processor, where nobody
 * counts. Loop at start. */
size_t device_allocated(struct device *d);
/* What it is, for people: "NVIDIA H200 (compute capability 9.0, 132 multiprocessors, driver for
 * CUDA 13.0)". */
void device_describe(struct device *d, char *out, size_t cap);

/* Bytes by which another process on this host opens the allocation m. They are good while this
 * process lives and has not freed m. ERR_UNSUPPORTED: of the processor, whose shared memory has a
 * descriptor; ERR_NODEV: the card's driver will not share it. */
enum status device_mem_export(struct device *d, const struct dev_mem *m,
                              uint8_t handle[DEVICE_HANDLE_BYTES], struct err *err) MUST_CHECK;
/* Open another process's allocation here, for lanes alone. ERR_UNSUPPORTED: of the processor;
 * ERR_PEER_LOST: its owner is gone, or it is none. */
enum status device_mem_import(struct device *d, const uint8_t handle[DEVICE_HANDLE_BYTES],
                              void **out, struct err *err) MUST_CHECK;
/* No lane has work left that touches p. */
void device_mem_unimport(struct device *d, void *p);
/* A descriptor by which network cards reach the allocation m (dma-buf); the caller closes it.
 * ERR_UNSUPPORTED says why there is none: the processor's memory needs none, or the driver or the
 * card cannot. */
enum status device_mem_dmabuf(struct device *d, const struct dev_mem *m, int *fd,
                              struct err *err) MUST_CHECK;
/* Make what network cards have written by then visible to work that the device is given from now
 * on. Any thread. ERR_NODEV: the device failed. */
enum status device_flush_rdma_writes(struct device *d) MUST_CHECK;
/* A mark behind all work that was given to the device so far, for copy_stream_wait_event; 0: that
 * work is done (always so of the processor). */
uint64_t device_record_event(struct device *d);
/* A new queue of copies; the owner closes it (copy_stream_close) before the device. */
enum status device_copy_stream(struct device *d, struct copy_stream **out,
                               struct err *err) MUST_CHECK;

/* How many devices of a kind this process sees; 0 of a kind that the build does not have. */
int device_count(const char *name);

#endif
