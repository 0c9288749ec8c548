/* admission_headers.h - the headers of admission (docs/admission.md).
 *
 *     x-baton-ttft-ms, x-baton-deadline-ms   of a request: by when it wants its first token, and
 *                                            its last, in milliseconds from its arrival
 *     x-baton-hedge-ms                       of a request: without a token so long after it was
 *                                            placed, other nodes try it, too (recovery.md)
 *     x-baton-retry                          of a refusal, and of the same request sent again
 *     x-stainless-retry-count                of OpenAI's client libraries: they send it again
 *     Retry-After, retry-after-ms            of a refusal; the latter is for OpenAI's client
 *                                            libraries, and 60,000 at most
 *     x-should-retry: false                  of an error that comes again: OpenAI's client
 *                                            libraries then do not try again by themselves
 *     x-ratelimit-...                        of every answer to a tenant with limits
 *
 * Thread: loop. */
#ifndef BATON_SERVE_ADMISSION_HEADERS_H
#define BATON_SERVE_ADMISSION_HEADERS_H

#include "shared/net/http/http_server.h"
#include "shared/serve/backend.h"

/* ERR_INVALID: err->field is the header. */
enum status admission_read_headers(const struct http_exchange *x, struct gen_admission *out,
                                   struct err *err) MUST_CHECK;
/* Appends what an error of this status says about trying again; retry as in gen_refusal or NULL. */
void admission_add_retry(int http, uint32_t retry_after_s, const char *retry, struct buf *out);
void admission_add_limits(const struct serve_backend *b, uint32_t tenant, struct buf *out);

#endif
