/* test_frame.c - frame headers and token records: round trips, and everything that must be
 * refused. */
#include "shared/cluster/frame.h"

#include <math.h>
#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

static const struct frame_header SAMPLE = {
    .type = FRAME_GRANT,
    .length = 77,
    .attempt = 3,
    .request = 0x1122334455667788,
    .incarnation = 0x99aabbccddeeff00,
};

TEST(frame_header_round_trip)
{
    uint8_t bytes[FRAME_HEADER_BYTES];
    struct frame_header back;
    frame_header_encode(&SAMPLE, bytes);
    CHECK_OK(frame_header_decode(bytes, &back, NULL));
    CHECK_EQ_INT(back.type, SAMPLE.type);
    CHECK_EQ_INT(back.length, SAMPLE.length);
    CHECK_EQ_INT(back.attempt, SAMPLE.attempt);
    CHECK(back.request == SAMPLE.request && back.incarnation == SAMPLE.incarnation);
}

TEST(frame_header_is_little_endian_at_fixed_places)
{
    static const uint8_t want[FRAME_HEADER_BYTES] = {
        'B',  'T',  'N',  '1',  2,    0,    FRAME_GRANT, 0,    77,   0,    0,
        0,    3,    0,    0,    0,    0x88, 0x77,        0x66, 0x55, 0x44, 0x33,
        0x22, 0x11, 0x00, 0xff, 0xee, 0xdd, 0xcc,        0xbb, 0xaa, 0x99
    };
    uint8_t bytes[FRAME_HEADER_BYTES];
    frame_header_encode(&SAMPLE, bytes);
    CHECK(memcmp(bytes, want, sizeof want) == 0);
}

static enum status decode_with(int at, uint8_t value, struct err *err)
{
    uint8_t bytes[FRAME_HEADER_BYTES];
    struct frame_header back = { 0 };
    frame_header_encode(&SAMPLE, bytes);
    bytes[at] = value;
    enum status st = frame_header_decode(bytes, &back, err);
    if (st != OK) CHECK_EQ_INT(back.length, 0); /* outputs only on success */
    return st;
}

TEST(frame_header_refuses_what_it_does_not_know)
{
    struct err err = { 0 };
    CHECK_STATUS(decode_with(0, 'X', &err), ERR_FORMAT);
    CHECK_STATUS(decode_with(4, 1, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "version 1") != NULL && strstr(err.text, "speaks 2") != NULL);
    CHECK_STATUS(decode_with(6, 0, &err), ERR_FORMAT);
    CHECK_STATUS(decode_with(6, 7, &err), ERR_FORMAT); /* a gap in the types */
    CHECK_STATUS(decode_with(6, FRAME_TYPE_END, &err), ERR_FORMAT);
    CHECK_STATUS(decode_with(7, 0xff, &err), ERR_FORMAT);
    CHECK_STATUS(decode_with(11, 0x7f, &err), ERR_TOO_LONG);
    CHECK_STATUS(decode_with(11, 0x01, &err), ERR_TOO_LONG); /* 16 MiB + 77 */
    CHECK(err.text[0] != 0);
}

TEST(frame_every_type_has_a_name)
{
    for (unsigned t = 0; t < FRAME_TYPE_END; t++) {
        bool known = (t >= FRAME_LINK_HELLO && t <= FRAME_PING) || t >= FRAME_ASK_CREDIT;
        CHECK((strcmp(frame_type_name(t), "unknown") != 0) == known);
    }
    CHECK_EQ_STR(frame_type_name(65535), "unknown");
}

static struct token_logprobs token_of(int32_t id, uint32_t n_top)
{
    struct token_logprobs t = {
        .id = id, .logprob = -1.25f, .rank = 2, .ends = FINISH_NONE, .n_top = n_top
    };
    for (uint32_t i = 0; i < n_top; i++) {
        t.top[i].id = id + (int32_t)i;
        t.top[i].logprob = -0.5f * (float)i;
    }
    return t;
}

TEST(token_record_round_trip_of_several)
{
    struct buf b = { 0 };
    for (uint32_t i = 0; i <= SAMPLER_LOGPROBS_MAX; i++) {
        struct token_logprobs t = token_of(100 + (int32_t)i, i);
        if (i == 3) t.ends = FINISH_STOP;
        token_record_add(&b, 5 + i, 7, i, &t);
    }
    struct str rest = buf_str(&b);
    for (uint32_t i = 0; i <= SAMPLER_LOGPROBS_MAX; i++) {
        struct token_logprobs want = token_of(100 + (int32_t)i, i), got;
        uint64_t request;
        uint32_t attempt, index;
        if (i == 3) want.ends = FINISH_STOP;
        CHECK_OK(token_record_next(&rest, &request, &attempt, &index, &got));
        CHECK_EQ_INT(request, 5 + i);
        CHECK_EQ_INT(attempt, 7);
        CHECK_EQ_INT(index, i);
        CHECK_EQ_INT(got.id, want.id);
        CHECK_EQ_INT(got.rank, want.rank);
        CHECK_EQ_INT(got.ends, want.ends);
        CHECK_NEAR(got.logprob, want.logprob, 0);
        CHECK_EQ_INT(got.n_top, i);
        for (uint32_t j = 0; j < i; j++) {
            CHECK_EQ_INT(got.top[j].id, want.top[j].id);
            CHECK_NEAR(got.top[j].logprob, want.top[j].logprob, 0);
        }
    }
    struct token_logprobs t;
    uint64_t request;
    uint32_t attempt, index;
    CHECK_STATUS(token_record_next(&rest, &request, &attempt, &index, &t), ERR_NOT_FOUND);
    buf_release(&b);
}

static enum status next_of(const void *p, size_t n)
{
    struct str rest = { p, n };
    struct token_logprobs t;
    uint64_t request;
    uint32_t attempt, index;
    return token_record_next(&rest, &request, &attempt, &index, &t);
}

TEST(token_record_refuses_every_cut)
{
    struct buf b = { 0 };
    struct token_logprobs t = token_of(9, 3);
    token_record_add(&b, 1, 1, 0, &t);
    CHECK_OK(next_of(b.data, b.len));
    for (size_t n = 1; n < b.len; n++) {
        char *exact = mem_dup(b.data, n); /* so that AddressSanitizer notices one byte too many */
        CHECK_STATUS(next_of(exact, n), ERR_FORMAT);
        mem_free(exact);
    }
    buf_release(&b);
}

static enum status next_with(size_t at, uint32_t value)
{
    struct buf b = { 0 };
    struct token_logprobs t = token_of(9, 3);
    token_record_add(&b, 1, 1, 0, &t);
    memcpy(b.data + at, &value, sizeof value);
    enum status st = next_of(b.data, b.len);
    buf_release(&b);
    return st;
}

TEST(token_record_refuses_wrong_numbers)
{
    CHECK_OK(next_with(4, 12));
    CHECK_STATUS(next_with(0, 39), ERR_FORMAT); /* bytes */
    CHECK_STATUS(next_with(0, 0xffffffff), ERR_FORMAT);
    /* n_top does not match bytes */
    CHECK_STATUS(next_with(20, 2), ERR_FORMAT);
    CHECK_STATUS(next_with(20, SAMPLER_LOGPROBS_MAX + 1), ERR_FORMAT);
    /* 40 + 8 * n_top wraps to 0 */
    CHECK_STATUS(next_with(20, 0xfffffffb), ERR_FORMAT);
    CHECK_STATUS(next_with(28, FINISH_PREFILLED), ERR_FORMAT); /* not the end of an answer */
    /* a token id is never negative */
    CHECK_STATUS(next_with(8, 0x80000000), ERR_FORMAT);
    CHECK_STATUS(next_with(TOKEN_RECORD_BYTES + 8, 0xffffffff), ERR_FORMAT);
}

TEST_MAIN(CASE(frame_header_round_trip), CASE(frame_header_is_little_endian_at_fixed_places),
          CASE(frame_header_refuses_what_it_does_not_know), CASE(frame_every_type_has_a_name),
          CASE(token_record_round_trip_of_several), CASE(token_record_refuses_every_cut),
          CASE(token_record_refuses_wrong_numbers))
