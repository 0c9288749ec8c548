/* retry_text.c - see retry_text.h. */
#include "scheduler/admission/retry_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/hash/hash.h"

enum { DUE_DIGITS_MAX = 12, NUMBER_DIGITS_MAX = 8, MAC_DIGITS = 16 };

static uint64_t mac_of(const struct retry_secret *s, uint64_t tenant, uint64_t due_ms,
                       uint32_t number)
{
    const uint64_t what[] = { tenant, due_ms, number };
    uint8_t sum[32];
    uint64_t mac;
    hmac_sha256(s->bytes, sizeof s->bytes, what, sizeof what, sum);
    memcpy(&mac, sum, sizeof mac);
    return mac;
}

void retry_text_write(const struct retry_secret *s, uint64_t tenant, uint64_t due_ms,
                      uint32_t number, char out[GEN_RETRY_MAX])
{
    snprintf(out, GEN_RETRY_MAX, "%" PRIx64 ".%" PRIx32 ".%016" PRIx64,
             due_ms & ((UINT64_C(1) << 4 * DUE_DIGITS_MAX) - 1), number,
             mac_of(s, tenant, due_ms, number));
}

static bool read_hex(struct str s, size_t digits_max, uint64_t *out)
{
    return s.n <= digits_max && str_to_hex(s, out) == OK;
}

bool retry_text_read(const struct retry_secret *s, uint64_t tenant, struct str text,
                     uint64_t *due_ms)
{
    struct str due, number, mac;
    uint64_t d, n, m;
    if (!str_split(&text, '.', &due) || !str_split(&text, '.', &number) ||
        !str_split(&text, '.', &mac) || text.p)
        return false;
    if (mac.n != MAC_DIGITS || !read_hex(due, DUE_DIGITS_MAX, &d) ||
        !read_hex(number, NUMBER_DIGITS_MAX, &n) || !read_hex(mac, MAC_DIGITS, &m))
        return false;
    uint64_t right = mac_of(s, tenant, d, (uint32_t)n);
    if (!equal_constant_time(&right, &m, sizeof m)) return false;
    *due_ms = d;
    return true;
}
