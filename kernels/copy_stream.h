/* copy_stream.h - a stream of copies, conversions and checksums that a device runs in order, next
 * to the work of its kernel context.
 *
 * KV transfer uses it to move blocks out of and into device memory while the next layer computes.
 * Steps do not wait for it (they use device_upload). Work on one stream runs in the order of the
 * calls; streams of a device run concurrently. On the CPU every call has done its work when it
 * returns. Life cycle: device_copy_stream .. copy_stream_close, which waits. Any call may fail with
 * ERR_NODEV when the device has failed: pending operations then never complete, and host functions
 * are not called. Thread: any, one at a time per stream; host functions run on a thread of the
 * driver. No call blocks but copy_stream_synchronize and copy_stream_close. */
#ifndef BATON_KERNELS_COPY_STREAM_H
#define BATON_KERNELS_COPY_STREAM_H

#include "kernels/device.h"
#include "kernels/dtype.h"

/* A strided copy: n times `bytes`, `from_stride` and `to_stride` bytes apart (unused when n is 1).
 * Either side is memory of the stream's device, imported memory, or DEVICE_MEM_HOST. */
struct copy_stream_strided {
    void *to;
    const void *from;
    size_t to_stride, from_stride, bytes;
    uint32_t n;
};

/* One copy of a gather. */
struct copy_stream_pair {
    void *to;
    const void *from;
    size_t bytes;
};

/* The bytes of one checksum, in this order: n_runs segments of run_bytes, `stride` bytes apart,
 * then those of `tail` (n_runs 0: none). The first part has at least 1 byte, both together less
 * than 2^32. They are copied to segments at `to`, as far apart, unless that is NULL. Fast if
 * addresses, run_bytes and stride of the first part are multiples of 16; the tail is for the small
 * rest. */
struct copy_stream_checksum_tail {
    const void *at;
    void *to;
    uint64_t stride;
    uint32_t run_bytes, n_runs;
};
struct copy_stream_checksum_range {
    const void *at;
    void *to; /* in device or imported memory; NULL: nothing is copied, nor of the tail */
    uint64_t stride;
    uint32_t run_bytes, n_runs;
    struct copy_stream_checksum_tail tail;
};

/* n_groups groups of n rows of KV (kv_rows.h). The rows of a group are contiguous, and so are their
 * scales; groups start `stride` rows apart. No alignment is needed. Types without scales ignore the
 * scale pointers. */
struct copy_stream_kv_rows {
    void *to, *to_scales;
    const void *from, *from_scales;
    uint32_t n, n_groups, to_stride, from_stride;
};

/* Converts rows of `width` values (1 to KERNEL_LATENT_MAX) from one type to another; the same type
 * is copied bit for bit. */
struct copy_stream_conversion {
    enum dtype from, to;
    uint32_t width, n;
    const struct copy_stream_kv_rows *rows; /* [n], not overlapping; read before the call returns */
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
/* Later operations of this stream start once the device's work has reached `event`
 * (device_record_event; 0: at once). */
enum status copy_stream_wait_event(struct copy_stream *s, uint64_t event) MUST_CHECK;
enum status copy_stream_copy(struct copy_stream *s, const struct copy_stream_strided *c) MUST_CHECK;
/* n copies in device or imported memory, which do not overlap and run in no particular order.
 * `pairs` is read before the call returns. Fast for many small copies at multiples of 16. */
enum status copy_stream_gather(struct copy_stream *s, const struct copy_stream_pair *pairs,
                               uint32_t n) MUST_CHECK;
/* Converts as kv_row_load and kv_row_store do, bit for bit; a row whose scale is NaN becomes that
 * NaN, quiet. From memory of the stream's device to its memory or DEVICE_MEM_HOST. Fast if rows
 * start at multiples of 4 elements. */
enum status copy_stream_convert(struct copy_stream *s,
                                const struct copy_stream_conversion *c) MUST_CHECK;
/* out[i] = XXH3 (64 bit, no seed: hash_64) of pieces[i] in the device's memory, which are copied in
 * the same pass if they say where to. Copies do not overlap. `pieces` and `out` are DEVICE_MEM_HOST
 * memory and stay untouched by the caller until the operation has completed. */
enum status copy_stream_checksum(struct copy_stream *s,
                                 const struct copy_stream_checksum_range *pieces, uint32_t n,
                                 uint64_t *out) MUST_CHECK;
/* Calls fn(arg) once, when all earlier operations of the stream have completed; later ones do not
 * wait for it. Functions of one stream are called in order. fn must neither block nor call the
 * device. With ERR_NODEV it is never called. */
enum status copy_stream_launch_host_fn(struct copy_stream *s, void (*fn)(void *arg),
                                       void *arg) MUST_CHECK;
/* Waits for all earlier operations of the stream and their host functions. */
enum status copy_stream_synchronize(struct copy_stream *s) MUST_CHECK;

#endif
