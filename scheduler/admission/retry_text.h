/* retry_text.h - the text that a refusal gives its client (x-baton-retry): a place in line at a
 * time.
 *
 *     DUE "." NUMBER "." MAC     hexadecimal, DUE: milliseconds of this process's clock
 *
 * The MAC makes it valid for its tenant at this entry node, until it ends, and nowhere else. What a
 * client may gain by sending one twice is bounded by the promises of its own tenant (promises.h).
 * Thread: any. */
#ifndef BATON_SCHEDULER_ADMISSION_RETRY_TEXT_H
#define BATON_SCHEDULER_ADMISSION_RETRY_TEXT_H

#include "shared/base/str.h"
#include "shared/serve/backend.h"

struct retry_secret {
    uint8_t bytes[16];
};

void retry_text_write(const struct retry_secret *s, uint64_t tenant, uint64_t due_ms,
                      uint32_t number, char out[GEN_RETRY_MAX]);
/* False: it was not written here for this tenant. */
bool retry_text_read(const struct retry_secret *s, uint64_t tenant, struct str text,
                     uint64_t *due_ms);

#endif
