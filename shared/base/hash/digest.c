/* digest.c - see digest.h. */
#include "shared/base/hash/digest.h"

#include <openssl/evp.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"

struct digest {
    EVP_MD_CTX *ctx;
};

struct digest *digest_create(enum digest_kind kind)
{
    struct digest *d = MEM_NEW(struct digest);
    d->ctx = EVP_MD_CTX_new();
    ASSERT(d->ctx);
    int ok = EVP_DigestInit_ex(d->ctx, kind == DIGEST_SHA1 ? EVP_sha1() : EVP_sha256(), NULL);
    ASSERT(ok == 1);
    return d;
}

void digest_free(struct digest *d)
{
    if (!d) return;
    EVP_MD_CTX_free(d->ctx);
    mem_free(d);
}

void digest_add(struct digest *d, const void *p, size_t n)
{
    int ok = EVP_DigestUpdate(d->ctx, p, n);
    ASSERT(ok == 1);
}

void digest_end(struct digest *d, uint8_t out[DIGEST_BYTES_MAX])
{
    uint8_t bytes[EVP_MAX_MD_SIZE];
    unsigned int n = 0;
    int ok = EVP_DigestFinal_ex(d->ctx, bytes, &n);
    ASSERT(ok == 1);
    ASSERT(n <= DIGEST_BYTES_MAX);
    memset(out, 0, DIGEST_BYTES_MAX);
    memcpy(out, bytes, n);
}
