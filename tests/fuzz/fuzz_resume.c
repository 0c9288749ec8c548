/* fuzz_resume.c - any bytes as the handle of a client that comes back: one that is taken is within its
 * bounds, is written as the same bytes, and those may stand in a header. */
#include <string.h>

#include "shared/base/assert.h"
#include "shared/serve/resume.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct str in = { (const char *)data, size };
    struct resume_handle h;
    struct err err = { 0 };
    struct buf again = { 0 };
    if (resume_handle_read(in, &h, &err) != OK) {
        ASSERT(err.code == ERR_INVALID && err.text[0] && strcmp(err.field, "Last-Event-ID") == 0);
        return 0;
    }
    ASSERT(size <= RESUME_TEXT_MAX && h.n_choices >= 1 && h.n_choices <= RESUME_CHOICES_MAX);
    ASSERT(memchr(h.name, 0, sizeof h.name) && serve_name_is_good(str_of(h.name)));
    ASSERT(h.created >= 0);
    for (uint32_t i = 0; i < h.n_choices; i++) ASSERT(!h.choices[i].finished || !h.choices[i].node);
    for (size_t i = 0; i < size; i++) ASSERT(data[i] > ' ' && data[i] < 0x7f);
    resume_handle_write(&h, &again);
    ASSERT(str_eq(buf_str(&again), in));
    buf_release(&again);
    return 0;
}
