/* simt_copy.cc - copies and fills, and when the host's side of them is read or written.
 *
 * Pageable source: read at the call. Pinned memory: read and written when the copy runs. Pageable
 * target: the call waits for the copy. cudaMemcpy from pageable memory to the device returns when
 * the source is read; only the legacy stream and blocking ones are ordered behind the copy itself
 * (CUDA Runtime API, "API synchronization behavior"). Thread: any. */
#include <string.h>

#include "tests/simt/simt_launches.h"
#include "tests/simt/simt_memory.h"
#include "tests/simt/simt_stream.h"

struct rows {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
};

static size_t extent(size_t pitch, const rows &r)
{
    return r.height ? (r.height - 1) * pitch + r.width : 0;
}

static void copy_rows(const rows &r)
{
    for (size_t i = 0; i < r.height; i++)
        memmove(r.to + i * r.to_pitch, r.from + i * r.from_pitch, r.width);
}

struct places {
    simt_place to, from;
};

static cudaError_t check_places(const rows &r, enum cudaMemcpyKind kind, places *p)
{
    if (!r.to || !r.from) return cudaErrorInvalidValue;
    if (r.to_pitch < r.width || r.from_pitch < r.width) return cudaErrorInvalidPitchValue;
    *p = { simt_memory_place(r.to, extent(r.to_pitch, r)),
           simt_memory_place(r.from, extent(r.from_pitch, r)) };
    if (p->to == SIMT_BEYOND || p->from == SIMT_BEYOND) return cudaErrorInvalidValue;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (kind != cudaMemcpyDefault &&
        (to_device != (p->to == SIMT_DEVICE) || from_device != (p->from == SIMT_DEVICE)))
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

/* Replaces the source by a copy of it, which the operation keeps. */
static std::shared_ptr<std::vector<char>> read_source(rows *r)
{
    auto kept = std::make_shared<std::vector<char>>(r->width * r->height);
    rows in = { kept->data(), r->from, r->width, r->from_pitch, r->width, r->height };
    copy_rows(in);
    r->from = kept->data();
    r->from_pitch = r->width;
    return kept;
}

/* must_wait: the call returns when the copy is done. */
static cudaError_t submit_copy(rows r, places p, cudaStream_t stream, bool must_wait)
{
    if (!r.width || !r.height) return cudaSuccess;
    if (p.to == SIMT_PAGEABLE || p.from == SIMT_PAGEABLE) {
        cudaError_t e = simt_break_capture(stream, cudaErrorStreamCaptureUnsupported);
        if (e != cudaSuccess) return e;
    }
    std::shared_ptr<std::vector<char>> kept;
    if (p.from == SIMT_PAGEABLE && p.to != SIMT_PAGEABLE) kept = read_source(&r);
    simt_op op;
    op.run = [r, kept] { copy_rows(r); };
    std::shared_ptr<simt_stream_point> point;
    cudaError_t e = simt_submit(stream, std::move(op), &point);
    return e == cudaSuccess && point && (must_wait || p.to == SIMT_PAGEABLE) ? simt_wait(point) : e;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    SIMT_ENTER();
    rows r = { (char *)to, (const char *)from, to_pitch, from_pitch, width, height };
    places p;
    if (!width || !height) return cudaSuccess;
    cudaError_t e = check_places(r, kind, &p);
    return simt_leave(e == cudaSuccess ? submit_copy(r, p, stream, false) : e);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    SIMT_ENTER();
    if (!bytes) return cudaSuccess;
    rows r = { (char *)to, (const char *)from, bytes, bytes, bytes, 1 };
    places p;
    cudaError_t e = check_places(r, kind, &p);
    return simt_leave(e == cudaSuccess ? submit_copy(r, p, stream, false) : e);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    SIMT_ENTER();
    cudaError_t e = simt_unsafe_in_capture();
    if (e != cudaSuccess) return simt_leave(e);
    if (!bytes) return cudaSuccess;
    rows r = { (char *)to, (const char *)from, bytes, bytes, bytes, 1 };
    places p;
    e = check_places(r, kind, &p);
    if (e != cudaSuccess) return simt_leave(e);
    bool returns_early = p.to == SIMT_DEVICE && (p.from == SIMT_DEVICE || p.from == SIMT_PAGEABLE);
    if (p.to == SIMT_DEVICE && p.from == SIMT_PAGEABLE) e = cudaStreamSynchronize(nullptr);
    return simt_leave(e == cudaSuccess ? submit_copy(r, p, nullptr, !returns_early) : e);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream)
{
    SIMT_ENTER();
    if (!bytes) return cudaSuccess;
    simt_place place = simt_memory_place(p, bytes);
    if (place != SIMT_DEVICE && place != SIMT_PINNED) return simt_leave(cudaErrorInvalidValue);
    simt_op op;
    op.run = [p, value, bytes] {
        if (!simt_notes_launches()) simt_memory_set(p, value, bytes);
    };
    return simt_leave(simt_submit(stream, std::move(op)));
}

/* Does not wait for the device, like CUDA's. */
cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
    SIMT_ENTER();
    cudaError_t e = simt_unsafe_in_capture();
    return e == cudaSuccess ? cudaMemsetAsync(p, value, bytes, nullptr) : simt_leave(e);
}
