/* test_tokenizer_files.c - vocabularies other than tokenizer.json: SentencePiece models,
 * tekken.json, tiktoken files, GGUF arrays of the model "llama", and the files next to them.
 * tests/text/tokenizer_oracle.py compares real ones with the libraries. */
#include "shared/text/tokenizer/tokenizer.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/base64.h"
#include "tests/fixtures/spm_write.h"
#include "tests/harness/test.h"
#include "tests/unit/text/token_ids.h"

#define MARK "\xE2\x96\x81"
enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER = 4, UNUSED = 5 };

/* Ids: 0 <unk>, 1 <s>, 2 </s>, then these; byte pieces follow when asked for. */
enum { SPACE = 3, A, B, C, AB, SPACE_AB, ABC, DIGIT, TWO, MADE, N_PIECES };

static void add_pieces(struct buf *m)
{
    spm_write_piece(m, "<unk>", 0, UNKNOWN);
    spm_write_piece(m, "<s>", 0, CONTROL);
    spm_write_piece(m, "</s>", 0, CONTROL);
    spm_write_piece(m, MARK, -10, NORMAL);
    spm_write_piece(m, "a", -11, NORMAL);
    spm_write_piece(m, "b", -12, NORMAL);
    spm_write_piece(m, "c", -13, NORMAL);
    spm_write_piece(m, "ab", -1, NORMAL);
    spm_write_piece(m, MARK "ab", -2, NORMAL);
    spm_write_piece(m, "abc", -3, UNUSED);
    spm_write_piece(m, "7", 0, USER);
    spm_write_piece(m, "77", 0, USER);
    spm_write_piece(m, "cz", -4, NORMAL); /* z is not a piece */
}

static struct tokenizer *open_files(const struct tokenizer_files *f)
{
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    if (tokenizer_from_files(f, &t, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return t;
}

static struct tokenizer *small_model(bool bytes, bool prefix, bool extra, const char *config)
{
    struct buf m = { 0 };
    add_pieces(&m);
    if (bytes) spm_write_byte_pieces(&m);
    spm_write_rest(&m, 2, bytes, prefix, extra, STR(""));
    struct tokenizer_files f = { .model = buf_str(&m), .config = str_of(config) };
    struct tokenizer *t = open_files(&f);
    buf_release(&m);
    return t;
}

static void check_comes_back(const struct tokenizer *t, const char *text, const char *want)
{
    int32_t *ids = NULL;
    size_t n = 0;
    struct err err = { 0 };
    struct buf out = { 0 };
    CHECK_OK(tokenizer_encode(t, str_of(text), false, SIZE_MAX, &ids, &n, &err));
    tokenizer_decode(t, ids, n, false, &out);
    CHECK_EQ_STR(out.data ? out.data : "", want);
    buf_release(&out);
    mem_free(ids);
}

TEST(sentencepiece_merges_by_score)
{
    struct tokenizer *t = small_model(true, false, false,
                                      "{\"tokenizer_class\":\"Ernie4_5_Tokenizer\"}");
    CHECK_IDS(t, "ab", true, "7");
    CHECK_IDS(t, " ab b", false, "8,3,5");
    CHECK_IDS(t, "abc", false, "7,6");             /* splits the unused piece */
    CHECK_IDS(t, "czab", false, "12,7");           /* merges a character that is not a piece */
    CHECK_IDS(t, "777", false, "11,10");           /* the longest user-defined piece first */
    CHECK_IDS(t, "a7b", false, "4,10,5");          /* nothing merges across it */
    CHECK_IDS(t, "z\u00e9", false, "135,208,182"); /* bytes: 13 + value */
    CHECK_IDS(t, "<s>ab</s>", false, "1,7,2");
    CHECK_IDS(t, "", true, "");
    check_comes_back(t, "  abc 7\tz\u4e16 ", "  abc 7\tz\u4e16 ");
    CHECK(tokenizer_is_special(t, 0) && tokenizer_is_special(t, 1) &&
          !tokenizer_is_special(t, DIGIT));
    CHECK_EQ_INT(tokenizer_bos(t), 1);
    CHECK_EQ_INT(tokenizer_eos(t), 2);
    CHECK_EQ_INT(tokenizer_n_vocab(t), N_PIECES + 256);
    tokenizer_free(t);
}

TEST(sentencepiece_unknown_characters_are_one)
{
    struct tokenizer *t = small_model(false, false, false, "{\"add_bos_token\":false}");
    CHECK_IDS(t, "a\u4e16\u754cb\u4e16", false, "4,0,5,0");
    CHECK_IDS(t, "\u4e16 \u4e16", false, "0,3,0");
    tokenizer_free(t);
}

TEST(sentencepiece_puts_a_space_in_front)
{
    struct tokenizer *t = small_model(true, true, false, "");
    CHECK_IDS(t, "ab", true, "1,8");
    CHECK_IDS(t, "", false, "");
    CHECK_IDS(t, "ab</s>ab", false, "8,2,8");
    check_comes_back(t, "ab ab", "ab ab");
    check_comes_back(t, " ab", " ab");
    tokenizer_free(t);
    t = small_model(true, true, false, "{\"legacy\":false,\"add_eos_token\":true}");
    CHECK_IDS(t, "ab</s>ab", true, "1,8,2,7,2");
    tokenizer_free(t);
}

TEST(sentencepiece_takes_away_extra_spaces)
{
    struct tokenizer *t = small_model(true, true, true, "");
    CHECK_IDS(t, "  a   b  ", false, "3,4,3,5");
    CHECK_IDS(t, "   ", false, "");
    check_comes_back(t, "  a   b  ", "a b");
    tokenizer_free(t);
}

/* Makes a table of replacements that turns "x" into "ab": a tree of one edge. Unit 0 is the root,
 * whose child for a byte is at offset ^ byte; the leaf is at that node's own offset. */
static void make_table(struct buf *out)
{
    enum { UNITS = 256 };
    uint32_t units[UNITS] = { 0 };
    units[0] = 1 << 10; /* offset 1: the child of 'x' is at 1 ^ 'x' */
    size_t child = 1 ^ 'x';
    units[child] = 'x' | 1 << 8 | 2 << 10; /* label, has a leaf, offset 2 */
    units[child ^ 2] = 1u << 31 | 1;       /* the text begins at 1 */
    buf_add_u32le(out, sizeof units);
    for (size_t i = 0; i < UNITS; i++) buf_add_u32le(out, units[i]);
    buf_add(out, "\0ab", 4);
}

TEST(sentencepiece_table_replaces)
{
    struct buf m = { 0 }, table = { 0 };
    make_table(&table);
    add_pieces(&m);
    spm_write_byte_pieces(&m);
    spm_write_rest(&m, 2, true, false, false, buf_str(&table));
    struct tokenizer_files f = { .model = buf_str(&m) };
    struct tokenizer *t = open_files(&f);
    CHECK_IDS(t, "xc7xy", false, "7,6,10,7,134");
    tokenizer_free(t);
    struct tokenizer *none = NULL;
    struct err err = { 0 };
    buf_clear(&m);
    add_pieces(&m);
    spm_write_rest(&m, 2, false, false, false, str_sub(buf_str(&table), 0, 700));
    f.model = buf_str(&m);
    CHECK_STATUS(tokenizer_from_files(&f, &none, &err), ERR_FORMAT);
    CHECK(strstr(err.text, "precompiled_charsmap") != NULL);
    buf_release(&m);
    buf_release(&table);
}

static void check_refused(struct str model, enum status st, const char *says)
{
    struct tokenizer_files f = { .model = model, .model_name = "tokenizer.model" };
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    CHECK_STATUS(tokenizer_from_files(&f, &t, &err), st);
    if (!strstr(err.text, says) || !strstr(err.text, "tokenizer.model"))
        test_fail(__FILE__, __LINE__, "\"%s\" was said", err.text);
}

TEST(sentencepiece_refuses_by_name)
{
    struct buf m = { 0 };
    add_pieces(&m);
    spm_write_rest(&m, 1, false, true, true, STR(""));
    check_refused(buf_str(&m), ERR_UNSUPPORTED, "unigram");
    for (size_t n = 1; n < 40; n++) { /* cut anywhere: damaged, or without a type */
        struct tokenizer_files f = { .model = str_sub(buf_str(&m), 0, n) };
        struct tokenizer *t = NULL;
        struct err err = { 0 };
        CHECK(tokenizer_from_files(&f, &t, &err) != OK);
    }
    buf_clear(&m);
    add_pieces(&m);
    spm_write_rest(&m, 2, true, true, true, STR(""));
    check_refused(buf_str(&m), ERR_FORMAT, "byte 0x00");
    buf_clear(&m);
    spm_write_piece(&m, "a", 0, NORMAL);
    spm_write_piece(&m, "a", 0, NORMAL);
    spm_write_rest(&m, 2, false, true, true, STR(""));
    check_refused(buf_str(&m), ERR_FORMAT, "piece 1");
    buf_clear(&m);
    spm_write_piece(&m, "a", 0, 9);
    spm_write_rest(&m, 2, false, true, true, STR(""));
    check_refused(buf_str(&m), ERR_FORMAT, "kind");
    buf_clear(&m);
    add_pieces(&m);
    spm_write_rest(&m, 2, false, true, true, STR(""));
    spm_write_bytes(&m, 5, STR("\x12\x01x"));
    check_refused(buf_str(&m), ERR_UNSUPPORTED, "denormalizer");
    buf_release(&m);
    struct tokenizer_files none = { .config = STR("{}") };
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    CHECK_STATUS(tokenizer_from_files(&none, &t, &err), ERR_NOT_FOUND);
}

TEST(files_next_to_a_model_add_tokens)
{
    struct buf m = { 0 };
    add_pieces(&m);
    spm_write_rest(&m, 2, false, false, false, STR(""));
    struct tokenizer_files f = {
        .model = buf_str(&m),
        .added = STR("{\"<mask:1>\":20,\"<img>\":21}"),
        .specials = STR("{\"cls_token\":\"<cls>\",\"sep_token\":{\"content\":\"ab\"},\"additional_"
                        "special_tokens\":[\"<x>\",{\"content\":\"<y>\"}]}"),
        .config = STR("{\"added_tokens_decoder\":{\"21\":{\"content\":\"<img>\",\"special\":true,"
                      "\"rstrip\":true}},"
                      "\"bos_token\":\"<cls>\",\"add_bos_token\":true}"),
    };
    struct tokenizer *t = open_files(&f);
    CHECK_EQ_INT(tokenizer_find(t, STR("<cls>")), 22); /* the first free id */
    CHECK_EQ_INT(tokenizer_find(t, STR("<y>")), 24);
    CHECK_IDS(t, "c<img>  <mask:1>abc<x>", true, "22,6,21,20,7,6,23");
    CHECK(tokenizer_is_special(t, 21) && !tokenizer_is_special(t, 20) &&
          tokenizer_is_special(t, AB));
    tokenizer_free(t);
    f.added = STR("{\"a\":-1}");
    struct err err = { 0 };
    CHECK_STATUS(tokenizer_from_files(&f, &t, &err), ERR_FORMAT);
    f.added = STR("[");
    CHECK_STATUS(tokenizer_from_files(&f, &t, &err), ERR_FORMAT);
    CHECK(strstr(err.text, "added_tokens.json") != NULL);
    buf_release(&m);
}

/* ---- bytes and ranks ---- */

static void add_base64(struct buf *out, const unsigned char *p, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t v = (uint32_t)p[i] << 16 | (uint32_t)(i + 1 < n ? p[i + 1] : 0) << 8 |
                     (i + 2 < n ? p[i + 2] : 0u);
        for (size_t k = 0; k < 4; k++)
            buf_add_char(out, k <= n - i ? digits[v >> (18 - 6 * k) & 63] : '=');
    }
}

TEST(base64_both_ways)
{
    for (size_t n = 0; n < 40; n++) {
        unsigned char bytes[40];
        struct buf text = { 0 }, back = { 0 };
        for (size_t i = 0; i < n; i++) bytes[i] = (unsigned char)(i * 37 + n);
        add_base64(&text, bytes, n);
        CHECK(base64_decode(buf_str(&text), &back));
        CHECK(back.len == n && (n == 0 || memcmp(back.data, bytes, n) == 0));
        buf_release(&text);
        buf_release(&back);
    }
    static const char *const bad[] = { "A", "AB=C", "====A", "A===", "ab c", "AB\n=" };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct buf out = { 0 };
        CHECK(!base64_decode(str_of(bad[i]), &out));
        buf_release(&out);
    }
}

/* Tokens that follow the 256 bytes; no merge makes "zyx". */
static const char *const longer[] = { "ab", "abc", "bc", "zyx" };

static void make_tekken(struct buf *out, int n_specials, const char *specials)
{
    buf_printf(out,
               "{\"config\":{\"pattern\":\"[a-z]+|[^a-z]+\",\"default_vocab_size\":%d,\"default_"
               "num_special_tokens\":%d,\"version\":\"v3\"},%s\"vocab\":[",
               n_specials + 260, n_specials, specials);
    for (unsigned i = 0; i < 262; i++) { /* two more than are used */
        unsigned char c = (unsigned char)i;
        buf_printf(out, "%s{\"rank\":%u,\"token_bytes\":\"", i ? "," : "", i);
        if (i < 256) add_base64(out, &c, 1);
        else
            add_base64(out, (const unsigned char *)(i < 260 ? longer[i - 256] : "ignored"),
                       i < 260 ? strlen(longer[i - 256]) : 7);
        buf_add_c(out, i == 0 ? "\",\"token_str\":\"\\u0000\"}" : "\",\"token_str\":null}");
    }
    buf_add_c(out, "]}");
}

TEST(tekken_ranks_follow_the_special_tokens)
{
    struct buf file = { 0 };
    make_tekken(&file, 30, "");
    struct tokenizer_files f = { .model = buf_str(&file) };
    struct tokenizer *t = open_files(&f);
    CHECK_EQ_INT(tokenizer_n_vocab(t), 290);
    CHECK_IDS(t, "abc", true, "1,287");
    CHECK_IDS(t, "xabcx", false, "150,287,150"); /* the lowest rank first: ab, then abc */
    CHECK_IDS(t, "zyx", false, "289"); /* the piece is a token, though no merge makes it */
    CHECK_IDS(t, "zyxa", false, "152,151,150,127");
    CHECK_IDS(t, "[INST]a[/INST]<SPECIAL_29>\u00e9", false, "3,127,4,29,225,199");
    CHECK(tokenizer_is_special(t, 3) && tokenizer_eos(t) == 2);
    check_comes_back(t, "Caf\u00e9 \U0001F642 abc", "Caf\u00e9 \U0001F642 abc");
    tokenizer_free(t);
    buf_clear(&file);
    make_tekken(&file, 4,
                "\"special_tokens\":[{\"rank\":1,\"token_str\":\"<s>\",\"is_control\":true},{"
                "\"rank\":3,\"token_str\":\"[T]\",\"is_control\":false}],");
    f.model = buf_str(&file);
    t = open_files(&f);
    CHECK_IDS(t, "[T]<SPECIAL_0>a", true, "1,3,0,101");
    CHECK(!tokenizer_is_special(t, 3) && tokenizer_eos(t) == -1);
    tokenizer_free(t);
    buf_release(&file);
}

TEST(tekken_refuses_what_is_wrong)
{
    static const char *const rows[][2] = {
        { "{}", "config" },
        { "{\"config\":{\"pattern\":\"a\",\"default_vocab_size\":5,\"default_num_special_tokens\":"
          "5}}",
          "config" },
        { "{\"config\":{\"pattern\":\"a\",\"default_vocab_size\":5,\"default_num_special_tokens\":"
          "1},\"vocab\":[]}",
          "fewer" },
        { "{\"config\":{\"pattern\":\"a\",\"default_vocab_size\":5,\"default_num_special_tokens\":"
          "1},\"vocab\":[{\"rank\":1}]}",
          "rank 0" },
        { "{\"config\":{\"pattern\":\"a\",\"default_vocab_size\":5,\"default_num_special_tokens\":"
          "4},\"vocab\":[{\"rank\":0,\"token_bytes\":\"?\"}]}",
          "base64" },
        { "{\"config\":{\"pattern\":\"a\",\"default_vocab_size\":5,\"default_num_special_tokens\":"
          "4},\"vocab\":[{\"rank\":0,\"token_bytes\":\"AA==\"}]}",
          "0x01" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        check_refused(str_of(rows[i][0]), ERR_FORMAT, rows[i][1]);
    struct buf file = { 0 };
    make_tekken(&file, 4, "\"special_tokens\":[{\"rank\":4,\"token_str\":\"<s>\"}],");
    check_refused(buf_str(&file), ERR_FORMAT, "special_tokens");
    buf_release(&file);
}

TEST(tiktoken_family_is_known_by_its_size)
{
    check_refused(STR("IQ== 0\nIg== 1\n"), ERR_UNSUPPORTED, "2 ranks");
    check_refused(STR("IQ== 0\nIg== 2\n"), ERR_FORMAT, "line 2");
    check_refused(STR("IQ== 0\nIg 1\n"), ERR_FORMAT, "line 2");
    check_refused(STR("IQ== 0\n\nIg==\n"), ERR_FORMAT, "line 3");
}

/* ---- GGUF ---- */

TEST(gguf_llama_is_sentencepiece)
{
    static const struct str tokens[] = { STR("<unk>"), STR("<s>"),     STR("</s>"),
                                         STR(MARK),    STR("a"),       STR("b"),
                                         STR("ab"),    STR(MARK "ab"), STR("7") };
    static const int32_t kinds[] = { 2, 3, 3, 1, 1, 1, 1, 1, 4 };
    static const float scores[] = { 0, 0, 0, -9, -8, -7, -1, -2, 0 };
    struct tokenizer_vocab v = {
        .model = "llama",
        .tokens = tokens,
        .kinds = kinds,
        .n_tokens = COUNT_OF(tokens),
        .bos = 1,
        .eos = 2,
        .add_bos = true,
        .scores = scores,
        .add_space_prefix = true,
    };
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    CHECK_OK(tokenizer_from_vocab(&v, &t, &err));
    CHECK_IDS(t, "ab 7\u4e16<s>b", true, "1,7,3,8,0,1,3,5");
    check_comes_back(t, "ab a", "ab a");
    tokenizer_free(t);
    v.add_space_prefix = false;
    CHECK_OK(tokenizer_from_vocab(&v, &t, &err));
    CHECK_IDS(t, "ab", false, "6");
    tokenizer_free(t);
    v.kinds = NULL;
    CHECK_STATUS(tokenizer_from_vocab(&v, &t, &err), ERR_FORMAT);
}

/* One run of 1 MB without a cut: quadratic work would exceed the time limit of the case. */
TEST(sentencepiece_long_texts_take_linear_time)
{
    static const char *const units[] = { "ab", "a", " ", "abc", "7", "\u4e16", "cz", "c" };
    struct tokenizer *t = small_model(true, true, false, "");
    for (size_t i = 0; i < COUNT_OF(units); i++) {
        struct buf text = { 0 };
        while (text.len < 1u << 20) buf_add_c(&text, units[i]);
        check_comes_back(t, text.data, text.data);
        buf_release(&text);
    }
    tokenizer_free(t);
}

TEST_MAIN(CASE(sentencepiece_merges_by_score), CASE(sentencepiece_unknown_characters_are_one),
          CASE(sentencepiece_puts_a_space_in_front), CASE(sentencepiece_takes_away_extra_spaces),
          CASE(sentencepiece_table_replaces), CASE(sentencepiece_refuses_by_name),
          CASE(files_next_to_a_model_add_tokens), CASE(base64_both_ways),
          CASE(tekken_ranks_follow_the_special_tokens), CASE(tekken_refuses_what_is_wrong),
          CASE(tiktoken_family_is_known_by_its_size), CASE(gguf_llama_is_sentencepiece),
          CASE_T(sentencepiece_long_texts_take_linear_time, 120))
