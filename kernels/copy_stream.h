/* copy_stream.h - a queue of copies and checksums that a device runs in order, beside the work that
 * its context computes.
 *
 * For: moving KV out of and into a device's memory while the next layer computes. Not for: anything
 * a step waits for (device_upload). What is given to a lane runs in the order it was given;
 * copy_stream_wait_event makes what follows wait for the device's own work up to an event, in the
 * device's order and not on the host. Lanes of a device run beside each other. On the processor
 * every call does its work before it returns. Life cycle: device_copy_stream, copy_stream_close,
 * which waits. Every call may fail with ERR_NODEV when the device has failed: then nothing of that
 * lane is known to end, and calls of copy_stream_launch_host_fn do not come. Thread: one at a time
 * per lane, any; copy_stream_launch_host_fn's function on a thread of the driver. No call but
 * copy_stream_synchronize and copy_stream_close blocks. */
#ifndef BATON_KERNELS_COPY_STREAM_H
#define BATON_KERNELS_COPY_STREAM_H

#include "kernels/device.h"
#include "kernels/dtype.h"

/* `n` runs of `bytes` each, `from_stride` and `to_stride` bytes apart (not looked at when n is 1).
 * Either side is memory of the lane's device, imported memory, or DEVICE_MEM_HOST. */
struct copy_stream_strided {
    void *to;
    const void *from;
    size_t to_stride, from_stride, bytes;
    uint32_t n;
};

/* One of many copies. */
struct copy_stream_pair {
    void *to;
    const void *from;
    size_t bytes;
};

/* What one checksum is over: n_runs runs of run_bytes, `stride` bytes apart, one behind the other,
 * and behind them as many more as `tail` says (none where its n_runs is 0). At least 1 and less
 * than 2^32 bytes in all, and the first ones at least 1. Fast where address, run_bytes and stride
 * of the first ones are multiples of 16; the tail is for what is small beside them. */
struct copy_stream_checksum_tail {
    const void *at;
    uint64_t stride;
    uint32_t run_bytes, n_runs;
};
struct copy_stream_checksum_range {
    const void *at;
    uint64_t stride;
    uint32_t run_bytes, n_runs;
    struct copy_stream_checksum_tail tail;
};

/* n_groups groups of n rows of KV (kv_rows.h). Rows of a group lie one behind the other, and so do
 * their scales; groups begin `stride` rows apart. Nothing needs alignment. Scales are not looked at
 * where the type has none. */
struct copy_stream_kv_rows {
    void *to, *to_scales;
    const void *from, *from_scales;
    uint32_t n, n_groups, to_stride, from_stride;
};

/* Rows of `width` values (1 to KERNEL_LATENT_MAX) of one type as rows of another, or of the same:
 * then bit for bit. */
struct copy_stream_conversion {
    enum dtype from, to;
    uint32_t width, n;
    const struct copy_stream_kv_rows *rows; /* n of them, which do not overlap each other; read
                                             * before copy_stream_convert returns */
};

struct copy_stream_ops {
    void (*close)(struct copy_stream *s);
    enum status (*wait_event)(struct copy_stream *s, uint64_t event);
    enum status (*copy)(struct copy_stream *s, const struct copy_stream_strided *c);
    enum status (*gather)(struct copy_stream *s, const struct copy_stream_pair *pairs, uint32_t n);
    enum status (*convert)(struct copy_stream *s, const struct copy_stream_conversion *c);
    enum status (*checksum)(struct copy_stream *s, const struct copy_stream_checksum_range *pieces,
                            uint32_t n, uint64_t *out);
    enum status (*launch_host_fn)(struct copy_stream *s, void (*fn)(void *arg), void *arg);
    enum status (*synchronize)(struct copy_stream *s);
};

struct copy_stream {
    const struct copy_stream_ops *ops; /* first member of every implementation's struct */
};

void copy_stream_close(struct copy_stream *s);
/* What is given to the lane from now on begins after the device's work up to `event`
 * (device_record_event; 0: at once). */
enum status copy_stream_wait_event(struct copy_stream *s, uint64_t event) MUST_CHECK;
enum status copy_stream_copy(struct copy_stream *s, const struct copy_stream_strided *c) MUST_CHECK;
/* n copies between places in the memory of devices, imported memory included, that do not overlap;
 * in no order among themselves. `pairs` is read before this returns. Fast for many pieces that are
 * small, where addresses are multiples of 16. */
enum status copy_stream_gather(struct copy_stream *s, const struct copy_stream_pair *pairs,
                               uint32_t n) MUST_CHECK;
/* What kv_row_load and kv_row_store give, bit for bit (a row whose scale is a NaN: that NaN,
 * quiet). From memory of the lane's device to memory of it or DEVICE_MEM_HOST. Fast where rows
 * begin at multiples of 4 of their elements. */
enum status copy_stream_convert(struct copy_stream *s,
                                const struct copy_stream_conversion *c) MUST_CHECK;
/* out[i] = XXH3 (64 bit, no seed: hash_64) of pieces[i], which lie in the device's memory. `pieces`
 * and `out` are DEVICE_MEM_HOST memory of the lane's device, and the lane's until it has come past
 * them. */
enum status copy_stream_checksum(struct copy_stream *s,
                                 const struct copy_stream_checksum_range *pieces, uint32_t n,
                                 uint64_t *out) MUST_CHECK;
/* fn(arg) is called once, when everything given to the lane before has landed; it must not call the
 * device or block. ERR_NODEV: it is not. */
enum status copy_stream_launch_host_fn(struct copy_stream *s, void (*fn)(void *arg),
                                       void *arg) MUST_CHECK;
/* Everything given to the lane before has landed, and its functions have returned. */
enum status copy_stream_synchronize(struct copy_stream *s) MUST_CHECK;

#endif
