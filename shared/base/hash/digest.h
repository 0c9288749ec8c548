/* digest.h - SHA-256 and SHA-1 of content that comes in pieces (OpenSSL). SHA-1 is for names that
 * others have made with it, not for security.
 *
 * Life cycle: digest_create, digest_add in order, digest_end once, digest_free.
 * Thread: its owner's; the owner may change between calls. */
#ifndef BATON_BASE_HASH_DIGEST_H
#define BATON_BASE_HASH_DIGEST_H

#include <stddef.h>
#include <stdint.h>

enum digest_kind { DIGEST_SHA256, DIGEST_SHA1 };
enum { DIGEST_BYTES_MAX = 32 /* of SHA-256; SHA-1 has 20 */ };

struct digest;

struct digest *digest_create(enum digest_kind kind);
void digest_free(struct digest *d);
void digest_add(struct digest *d, const void *p, size_t n);
/* Writes the digest; bytes behind a shorter one are 0. */
void digest_end(struct digest *d, uint8_t out[DIGEST_BYTES_MAX]);

#endif
