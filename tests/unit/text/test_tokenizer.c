/* test_tokenizer.c - every component of tokenizer.json on small vocabularies, and golden vectors of
 * real ones.
 *
 * Real vocabularies are not part of the tree. BATON_TEST_VOCAB names the output of
 * tests/fixtures/gguf_vocab.py for SmolLM2; tests/text/tokenizer_oracle.py covers DeepSeek, Qwen,
 * Llama 3 and Mistral. */
#include "shared/text/tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "shared/base/clock.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"
#include "tests/unit/text/token_ids.h"

enum { FILE_MAX = 64 << 20 };

static void read_file(const char *path, struct buf *out)
{
    FILE *f = fopen(path, "rb");
    if (!f) test_fail(__FILE__, __LINE__, "%s cannot be opened", path);
    for (size_t n = 1; n > 0 && out->len < FILE_MAX;) {
        n = fread(buf_reserve(out, 1 << 16), 1, 1 << 16, f);
        out->len += n;
    }
    fclose(f);
}

static struct tokenizer *from_json(const char *json, const char *config)
{
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    if (tokenizer_from_json(str_of(json), str_of(config), &t, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    return t;
}

static struct tokenizer *from_folder(const char *folder)
{
    struct buf json = { 0 }, config = { 0 }, path = { 0 };
    buf_printf(&path, "%s/tokenizer.json", folder);
    read_file(path.data, &json);
    buf_clear(&path);
    buf_printf(&path, "%s/tokenizer_config.json", folder);
    FILE *there = fopen(path.data, "rb");
    if (there) {
        fclose(there);
        read_file(path.data, &config);
    }
    struct tokenizer *t = from_json(json.data, config.data ? config.data : "");
    buf_release(&json);
    buf_release(&config);
    buf_release(&path);
    return t;
}

#define CHECK_TEXT(t, skip, want, ...)                                                             \
    do {                                                                                           \
        const int32_t ids_[] = { __VA_ARGS__ };                                                    \
        struct buf text_ = { 0 };                                                                  \
        tokenizer_decode((t), ids_, sizeof ids_ / sizeof ids_[0], (skip), &text_);                 \
        CHECK_EQ_STR(text_.data ? text_.data : "", want);                                          \
        buf_release(&text_);                                                                       \
    } while (0)

/* A byte-level vocabulary (a b c d, Ġ, ab, Ġab, abc); tests add members to the model and to the top
 * level. */
#define VOCAB                                                                                      \
    "\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"d\":3,\"\u0120\":4,\"ab\":5,\"\u0120ab\":6,\"abc\":7},"
#define MERGES     "\"merges\":[\"a b\",[\"\u0120\",\"ab\"],\"ab c\"]"
#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"
#define SMALL(model, rest)                                                                         \
    "{\"model\":{\"type\":\"BPE\"," model VOCAB MERGES "},\"pre_tokenizer\":" BYTE_LEVEL           \
    ",\"decoder\":{\"type\":\"ByteLevel\"}" rest "}"

TEST(tokenizer_merges_by_rank)
{
    struct tokenizer *t = from_json(SMALL("", ""), "");
    CHECK_IDS(t, "abc ab abd", false, "7,6,6,3");
    CHECK_IDS(t, "", true, "");
    CHECK_IDS(t, "xax", false, "0"); /* without unk_token, bytes without a token are left out */
    CHECK_EQ_INT(tokenizer_n_vocab(t), 8);
    CHECK_EQ_INT(tokenizer_find(t, STR("abc")), 7);
    CHECK_EQ_INT(tokenizer_find(t, STR("x")), -1);
    CHECK_EQ_STR(tokenizer_piece(t, 6).p, "\u0120"
                                          "ab");
    CHECK_EQ_INT(tokenizer_piece(t, 8).n, 0);
    CHECK_EQ_INT(tokenizer_bos(t), -1);
    CHECK_TEXT(t, true, "abc ab", 7, 6, 99, -5);
    tokenizer_free(t);
}

TEST(tokenizer_ignore_merges_takes_whole_pieces)
{
    /* The only merge is "b c", so merging cannot reach "abc". */
    static const char json[] =
        "{\"model\":{\"type\":\"BPE\",%s\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"bc\":3,\"abc\":4},"
        "\"merges\":[\"b c\"]},\"pre_tokenizer\":" BYTE_LEVEL "}";
    for (int ignore = 0; ignore < 2; ignore++) {
        struct buf b = { 0 };
        buf_printf(&b, json, ignore ? "\"ignore_merges\":true," : "");
        struct tokenizer *t = from_json(b.data, "");
        CHECK_IDS(t, "abc", false, ignore ? "4" : "0,3");
        CHECK_IDS(t, "abcb", false, "0,3,1");
        tokenizer_free(t);
        buf_release(&b);
    }
}

#define ADDED_TOKENS(list)        ",\"added_tokens\":[" list "]"
#define ADDED(id, content, flags) "{\"id\":" #id ",\"content\":\"" content "\"" flags "}"

/* The white space that a token takes on its right may be the beginning of the next token. */
TEST(tokenizer_added_tokens_share_white_space)
{
    /* clang-format off */
    struct tokenizer *t = from_json(SMALL("", ADDED_TOKENS(
        ADDED(8, "<x>", ",\"rstrip\":true,\"normalized\":false") ","
        ADDED(9, " d", ",\"lstrip\":true,\"normalized\":false"))), "");
    /* clang-format on */
    CHECK_IDS(t, "<x> d", false, "8,9");
    CHECK_IDS(t, "<x>   d a", false, "8,9,4,0");
    CHECK_IDS(t, "<x>   da", false, "8,9,0");
    CHECK_IDS(t, "a   d<x>  ab", false, "0,9,8,5");
    CHECK_IDS(t, " d d", false, "9,9");
    tokenizer_free(t);
    /* clang-format off */
    t = from_json(SMALL("", ADDED_TOKENS(
        ADDED(8, "  ", ",\"lstrip\":true,\"rstrip\":true,\"normalized\":false"))), "");
    /* clang-format on */
    CHECK_IDS(t, "a    b     c", false, "0,8,1,8,2"); /* one token takes all the spaces */
    tokenizer_free(t);
}

TEST(tokenizer_added_tokens_are_cut_out_first)
{
    /* clang-format off */
    struct tokenizer *t = from_json(SMALL("", ADDED_TOKENS(
        ADDED(8, "<s>", ",\"special\":true") ","
        ADDED(9, "<s>a", ",\"special\":false,\"normalized\":false") ","
        ADDED(10, "L", ",\"lstrip\":true") ","
        ADDED(11, "R", ",\"rstrip\":true") ","
        ADDED(12, "ba", ",\"single_word\":true"))), "");
    /* clang-format on */
    CHECK_IDS(t, "ab<s>c", false, "5,8,2");
    CHECK_IDS(t, "<s>abc", false, "9,1,2"); /* the longest */
    CHECK_IDS(t, "<s<s>", false, "8");
    CHECK_IDS(t, "a \u2003 Lb", false, "0,10,1");
    CHECK_IDS(t, "aR \n b", false, "0,11,1");
    CHECK_IDS(t, "R L", false, "11,10"); /* R has taken the space */
    CHECK_IDS(t, "ba", false, "12");
    CHECK_IDS(t, "cba ba", false, "2,1,0,4,12");
    CHECK_IDS(t,
              "\u00e9"
              "ba_",
              false, "1,0");
    CHECK(tokenizer_is_special(t, 8) && !tokenizer_is_special(t, 9) &&
          !tokenizer_is_special(t, 99));
    CHECK_TEXT(t, true, "ab<s>a", 8, 5, 9);
    CHECK_TEXT(t, false, "<s>ab", 8, 5);
    tokenizer_free(t);
}

TEST(tokenizer_normalized_added_tokens_match_in_normal_form)
{
    /* clang-format off */
    struct tokenizer *t = from_json(SMALL("", ",\"normalizer\":{\"type\":\"NFC\"}" ADDED_TOKENS(
        ADDED(8, "\u00e9", ",\"normalized\":true") ","
        ADDED(9, "\u00fc", ",\"normalized\":false"))), "");
    /* clang-format on */
    CHECK_IDS(t, "ae\u0301\u00e9", false, "0,8,8");
    CHECK_IDS(t,
              "\u00fc"
              "u\u0308"
              "a",
              false, "9,0");
    tokenizer_free(t);
}

/* clang-format off */
#define TEMPLATE                                                                                   \
    ADDED_TOKENS(ADDED(8, "<s>", ",\"special\":true") "," ADDED(9, "</s>", ",\"special\":true"))   \
    ",\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},"         \
    "{\"type\":\"TemplateProcessing\",\"single\":["                                               \
    "{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},"                                           \
    "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],"                                                \
    "\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[8],\"tokens\":[\"<s>\"]}}}]}"
/* clang-format on */
#define ENDS "\"bos_token\":\"<s>\",\"eos_token\":{\"content\":\"</s>\"}"

TEST(tokenizer_puts_begin_and_end_as_the_files_say)
{
    static const struct {
        const char *config, *want;
    } rows[] = {
        { "", "8,5" },
        { "{" ENDS "}", "8,5" },
        { "{" ENDS ",\"add_bos_token\":true}", "8,5" },
        { "{" ENDS ",\"add_bos_token\":false}", "5" },
        { "{" ENDS ",\"add_eos_token\":true}", "8,5,9" },
        { "{" ENDS ",\"add_bos_token\":false,\"add_eos_token\":true}", "5,9" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct tokenizer *t = from_json(SMALL("", TEMPLATE), rows[i].config);
        CHECK_IDS(t, "ab", true, rows[i].want);
        CHECK_IDS(t, "ab", false, "5");
        CHECK_EQ_INT(tokenizer_bos(t), rows[i].config[0] ? 8 : -1);
        CHECK_EQ_INT(tokenizer_eos(t), rows[i].config[0] ? 9 : -1);
        tokenizer_free(t);
    }
}

TEST(tokenizer_config_adds_tokens)
{
    struct tokenizer *t = from_json(
        SMALL("", TEMPLATE), "{\"added_tokens_decoder\":{\"8\":{\"content\":\"other\"},"
                             "\"12\":{\"content\":\"<x>\",\"special\":true}},\"bos_token\":null}");
    CHECK_IDS(t, "ab<x>", true, "8,5,12");
    CHECK_EQ_STR(tokenizer_piece(t, 8).p, "<s>");
    CHECK_EQ_INT(tokenizer_n_vocab(t), 13);
    CHECK_TEXT(t, false, "a", 10, 11, 0); /* ids between are unused */
    tokenizer_free(t);
}

#define MARK "\xE2\x96\x81"
/* Like a converted SentencePiece model: <unk>, two bytes, and pieces with U+2581 for the space. */
#define PIECES                                                                                     \
    "{\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"fuse_unk\":true,\"byte_fallback\":"    \
    "true,"                                                                                        \
    "\"vocab\":{\"<unk>\":0,\"<0xC3>\":1,\"<0xA9>\":2,\"" MARK "\":3,\"a\":4,\"b\":5,\"" MARK      \
    "a\":6,\"ab\":7},"                                                                             \
    "\"merges\":[\"" MARK " a\",\"a b\"]},\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[" \
    "{\"type\":\"Prepend\",\"prepend\":\"" MARK                                                    \
    "\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"" MARK "\"}]},"        \
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{"         \
    "\"String\":\"" MARK "\"},\"content\":\" \"},"                                                 \
    "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" "          \
    "\",\"start\":1,\"stop\":0}]}}"

TEST(tokenizer_converted_sentencepiece_models)
{
    struct tokenizer *t = from_json(PIECES, "");
    CHECK_IDS(t, "a ab", false, "6,6,5");
    CHECK_IDS(t, "\u00e9", false, "3,1,2");
    /* Adjacent characters without a token become one <unk>. */
    CHECK_IDS(t, "b\u4e16\u754cb", false, "3,5,0,5");
    CHECK_TEXT(t, true, "a a", 6, 6);
    CHECK_TEXT(t, true, "\u00e9", 1, 2);
    CHECK_TEXT(t, true,
               "\uFFFD"
               "a",
               1, 4);
    struct buf b = { 0 };
    tokenizer_token_bytes(t, 6, true, &b);
    CHECK_EQ_STR(b.data, " a");
    buf_release(&b);
    tokenizer_free(t);
}

TEST(tokenizer_limit_ends_the_encoding)
{
    struct tokenizer *t = from_json(SMALL("", TEMPLATE), "");
    int32_t *ids = NULL;
    size_t n = 0;
    struct err err = { 0 };
    CHECK_OK(tokenizer_encode(t, STR("abc"), true, 2, &ids, &n, &err));
    CHECK_EQ_INT(n, 2);
    CHECK_STATUS(tokenizer_encode(t, STR("abc"), true, 1, &ids, &n, &err), ERR_TOO_LONG);
    CHECK_STATUS(tokenizer_encode(t, STR("a"), false, 0, &ids, &n, &err), ERR_TOO_LONG);
    CHECK_EQ_INT(n, 2);
    CHECK_OK(tokenizer_encode(t, STR("ab ab"), false, 2, &ids, &n, &err)); /* appended */
    CHECK_EQ_INT(n, 4);
    CHECK_EQ_INT(ids[0], 8);
    CHECK_EQ_INT(ids[3], 6);
    CHECK_STATUS(tokenizer_encode(t, (struct str){ "", (size_t)1 << 40 }, false, 2, &ids, &n, &err),
                 ERR_TOO_LONG);
    mem_free(ids);
    tokenizer_free(t);
}

/* Every byte has a token, and "aaaaaaaa" is the longest: n letters make at least n / 8 tokens,
 * which is known before merging. */
static struct tokenizer *of_all_bytes(void)
{
    struct buf b = { 0 };
    buf_printf(
        &b, "{\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,\"unk_token\":null,\"vocab\":{");
    for (int i = 0; i < 256; i++) buf_printf(&b, "\"<0x%02X>\":%d,", (unsigned)i, i);
    buf_printf(&b, "\"a\":256,\"aa\":257,\"aaaa\":258,\"aaaaaaaa\":259},\"merges\":[\"a a\",\"aa "
                   "aa\",\"aaaa aaaa\"]}}");
    struct tokenizer *t = from_json(b.data, "");
    buf_release(&b);
    return t;
}

TEST(tokenizer_limit_is_met_before_a_long_piece_merges)
{
    enum { N = 4 << 20 };
    struct tokenizer *t = of_all_bytes();
    int32_t *ids = NULL;
    size_t n = 0;
    struct err err = { 0 };
    char *text = MEM_ARRAY(char, N);
    memset(text, 'a', N);
    CHECK_STATUS(tokenizer_encode(t, (struct str){ text, N }, false, N / 8 - 1, &ids, &n, &err),
                 ERR_TOO_LONG);
    CHECK_OK(tokenizer_encode(t, (struct str){ text, N }, false, N / 8, &ids, &n, &err));
    CHECK_EQ_INT(n, N / 8);
    n = 0;
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    char *large = MEM_ARRAY(char, (size_t)8 * N); /* merging this would take 1.6 GB */
    memset(large, 'a', (size_t)8 * N);
    CHECK_STATUS(
        tokenizer_encode(t, (struct str){ large, (size_t)8 * N }, false, 1000, &ids, &n, &err),
        ERR_TOO_LONG);
    getrusage(RUSAGE_SELF, &after);
    /* KB: the text and copies of it, even under sanitizers. */
    CHECK((after.ru_maxrss - before.ru_maxrss) < 1 << 20);
    mem_free(text), mem_free(large), mem_free(ids);
    tokenizer_free(t);
}

TEST(tokenizer_refuses_by_name_what_it_cannot_do)
{
    static const struct {
        const char *json, *says;
        enum status st;
    } rows[] = {
        { "", "malformed", ERR_FORMAT },
        { "[]", "object", ERR_FORMAT },
        { "{}", "model", ERR_FORMAT },
        { "{\"model\":{\"type\":\"Unigram\"}}", "Unigram", ERR_UNSUPPORTED },
        { "{\"model\":{\"type\":\"BPE\",\"vocab\":[],\"merges\":[]}}", "vocab", ERR_FORMAT },
        { "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", "\"a\"",
          ERR_FORMAT },
        { "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1e9},\"merges\":[]}}", "\"a\"",
          ERR_FORMAT },
        { "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1.5},\"merges\":[]}}", "\"a\"",
          ERR_FORMAT },
        { "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1},\"merges\":[\"a b\"]}}", "merge 0",
          ERR_FORMAT },
        { "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1},\"merges\":[\"ab\"]}}", "left right",
          ERR_FORMAT },
        { "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":1},\"merges\":[[\"a\"]]}}", "two strings",
          ERR_FORMAT },
        { SMALL("\"dropout\":0.5,", ""), "dropout", ERR_UNSUPPORTED },
        { SMALL("\"end_of_word_suffix\":\"</w>\",", ""), "end_of_word_suffix", ERR_UNSUPPORTED },
        { SMALL("", ",\"normalizer\":{\"type\":\"BertNormalizer\"}"), "BertNormalizer",
          ERR_UNSUPPORTED },
        { SMALL("", ",\"post_processor\":{\"type\":\"RobertaProcessing\"}"), "RobertaProcessing",
          ERR_UNSUPPORTED },
        { SMALL("", ",\"added_tokens\":[{\"id\":9,\"content\":\"\"}]"), "empty", ERR_FORMAT },
        { SMALL("", ",\"added_tokens\":[{\"content\":\"x\"}]"), "id is missing", ERR_FORMAT },
        { SMALL("", ",\"added_tokens\":[{\"id\":99999999,\"content\":\"x\"}]"), "id", ERR_INVALID },
        { "{\"model\":{\"type\":\"BPE\"," VOCAB MERGES
          "},\"pre_tokenizer\":{\"type\":\"Whitespace\"}}",
          "Whitespace", ERR_UNSUPPORTED },
        { "{\"model\":{\"type\":\"BPE\"," VOCAB MERGES "},\"decoder\":{\"type\":\"WordPiece\"}}",
          "WordPiece", ERR_UNSUPPORTED },
        { "{\"model\":{\"type\":\"BPE\"," VOCAB MERGES
          "},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" BYTE_LEVEL "," BYTE_LEVEL
          "]}}",
          "last", ERR_FORMAT },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct tokenizer *t = NULL;
        struct err err = { 0 };
        CHECK_STATUS(tokenizer_from_json(str_of(rows[i].json), STR(""), &t, &err), rows[i].st);
        if (!strstr(err.text, rows[i].says))
            test_fail(__FILE__, __LINE__, "row %zu says \"%s\"", i, err.text);
        CHECK(t == NULL);
    }
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    CHECK_STATUS(tokenizer_from_json(STR(SMALL("", "")), STR("{\"add_bos_token\":true}"), &t, &err),
                 ERR_FORMAT);
    CHECK_STATUS(tokenizer_from_json(STR(SMALL("", "")), STR("{"), &t, &err), ERR_FORMAT);
    CHECK(strstr(err.text, "tokenizer_config.json") != NULL);
}

TEST(tokenizer_of_a_folder_equals_the_definition)
{
    struct tokenizer *t = from_folder(test_data("goldens/llama/model"));
    CHECK_IDS(t, "def __init__(self, context):\n        return None\n", true,
              "284,73,353,280,277,445,309,15,473,315,263,345,402,202");
    CHECK_IDS(t, "The exception is 12345 in the manager.\n\n", true,
              "55,370,467,303,224,484,22,23,24,324,292,349,388,393");
    CHECK_IDS(t, "  x = self._name # don't\t\t\u00e9!", true,
              "224,224,91,297,366,441,469,305,342,264,10,87,201,201,131,106,4");
    CHECK_IDS(t, "with the \"\"\"docstring\"\"\" and all the rest of it", true,
              "90,365,292,380,71,82,70,466,319,354,378,461,79,292,301,281,362,471");
    CHECK_IDS(t, "<|im_start|>self<|im_end|>\n", true, "2,309,3,202");
    CHECK_EQ_INT(tokenizer_n_vocab(t), 508);
    CHECK_EQ_INT(tokenizer_bos(t), 0);
    CHECK_EQ_INT(tokenizer_eos(t), 1);
    CHECK_TEXT(t, true, "self\n", 2, 309, 3, 202);
    tokenizer_free(t);
}

/* decode(encode(x)) is x for valid text, and x with U+FFFD for anything else. */
static void check_round_trip(const struct tokenizer *t, struct str text, struct str want)
{
    int32_t *ids = NULL;
    size_t n = 0;
    struct buf back = { 0 };
    struct err err = { 0 };
    CHECK_OK(tokenizer_encode(t, text, false, SIZE_MAX, &ids, &n, &err));
    tokenizer_decode(t, ids, n, false, &back);
    CHECK(str_eq(buf_str(&back), want));
    buf_release(&back);
    mem_free(ids);
}

TEST(tokenizer_text_comes_back)
{
    struct tokenizer *t = from_folder(test_data("goldens/llama_bias/model"));
    static const char *const texts[] = {
        "Hello, world!\r\n\r\n a  b\u00a0c",
        "Caf\u00e9 de\u0301ja\u0300 vu \U0001F642\u200d\U0001F469 \u0645\u0631\u062d\u0628\u0627",
        "\uff11\uff12\uff13\u0664\u0665 \u00bd \u00b2",
        "<|im_start|>user\nhi<|im_end|>",
        "\u4f60\u597d\uff0c\u4e16\u754c",
        " ",
        "\n",
        "\t \t",
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++)
        check_round_trip(t, str_of(texts[i]), str_of(texts[i]));
    check_round_trip(t, STR("a\xff\xe4\xb8z\0b"), STR("a\uFFFD\uFFFDz\0b"));
    tokenizer_free(t);
}

static void check_time(const struct tokenizer *t, const char *unit)
{
    struct buf text = { 0 };
    while (text.len < 1u << 20) buf_add_c(&text, unit);
    uint64_t start = clock_ms();
    check_round_trip(t, buf_str(&text), buf_str(&text));
    printf("  1 MB of \"%.12s\" in %llu ms\n", unit, (unsigned long long)(clock_ms() - start));
    buf_release(&text);
}

static const char *const long_units[] = {
    "a",
    "thequickbrownfox",
    " ",
    " a",
    "\n",
    "<",
    "<|im_start",
    "9",
    "\u4e16\u754c",
    "the quick brown fox jumps over the lazy dog. ",
    "\u0301",
    "-",
};

/* Quadratic work would take hours and exceed the time limit of the case. */
TEST(tokenizer_long_texts_take_linear_time)
{
    struct tokenizer *t = from_folder(test_data("goldens/llama/model"));
    for (size_t i = 0; i < COUNT_OF(long_units); i++) check_time(t, long_units[i]);
    tokenizer_free(t);
    t = from_json(SMALL("", ",\"normalizer\":{\"type\":\"NFC\"}"), "");
    struct buf marks = { 0 };
    /* each pair is in the wrong order */
    while (marks.len < 1u << 20) buf_add_c(&marks, "\u0301\u0323");
    struct buf ids = { 0 };
    show_ids(t, buf_str(&marks), false, &ids);
    buf_release(&marks);
    buf_release(&ids);
    tokenizer_free(t);
}

/* ---- arrays ---- */

static struct tokenizer_vocab small_vocab(void)
{
    static const struct str tokens[] = { STR("<e>"), STR("a"),   STR("b"),  STR("\u0120"),
                                         STR("ab"),  STR("<u>"), STR("pad") };
    static const int32_t kinds[] = { 3, 1, 1, 1, 1, 4, 5 };
    static const struct str merges[] = { STR("a b") };
    return (struct tokenizer_vocab){
        .model = "gpt2",
        .pre = "gpt-2",
        .tokens = tokens,
        .kinds = kinds,
        .n_tokens = COUNT_OF(tokens),
        .merges = merges,
        .n_merges = 1,
        .bos = 0,
        .eos = 0,
        .add_bos = true,
    };
}

TEST(tokenizer_from_arrays)
{
    struct tokenizer_vocab v = small_vocab();
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    CHECK_OK(tokenizer_from_vocab(&v, &t, &err));
    CHECK_IDS(t, "ab<u> a<e>", true, "0,4,5,3,1,0");
    CHECK_IDS(t, "ab", false, "4");
    CHECK(tokenizer_is_special(t, 0) && !tokenizer_is_special(t, 5));
    CHECK_TEXT(t, true, "ab<u>", 0, 4, 5);
    tokenizer_free(t);
}

TEST(tokenizer_from_bad_arrays)
{
    struct tokenizer *t = NULL;
    struct err err = { 0 };
    struct tokenizer_vocab v = small_vocab();
    v.model = "bert";
    CHECK_STATUS(tokenizer_from_vocab(&v, &t, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "\"bert\"") != NULL);
    v.model = "llama"; /* without scores */
    CHECK_STATUS(tokenizer_from_vocab(&v, &t, &err), ERR_FORMAT);
    v = small_vocab();
    v.pre = "martian";
    CHECK_STATUS(tokenizer_from_vocab(&v, &t, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "\"martian\"") != NULL);
    v = small_vocab();
    v.bos = 7;
    CHECK_STATUS(tokenizer_from_vocab(&v, &t, &err), ERR_FORMAT);
    v = small_vocab();
    v.bos = -1;
    CHECK_STATUS(tokenizer_from_vocab(&v, &t, &err), ERR_FORMAT);
    v = small_vocab();
    v.n_tokens = 0;
    CHECK_STATUS(tokenizer_from_vocab(&v, &t, &err), ERR_FORMAT);
    static const struct str bad[] = { STR("a z") };
    v = small_vocab();
    v.merges = bad;
    CHECK_STATUS(tokenizer_from_vocab(&v, &t, &err), ERR_FORMAT);
    CHECK(t == NULL);
}

/* ---- real vocabularies ---- */

static struct str *string_array(const cJSON *list, size_t *n)
{
    *n = (size_t)cJSON_GetArraySize(list);
    struct str *out = MEM_ARRAY(struct str, *n);
    const cJSON *each;
    size_t i = 0;
    cJSON_ArrayForEach (each, list) out[i++] = str_of(each->valuestring);
    return out;
}

static struct tokenizer *real_smollm2(void)
{
    const char *path = getenv("BATON_TEST_VOCAB");
    if (!path)
        SKIP("BATON_TEST_VOCAB does not name the vocabulary of SmolLM2 (see "
             "tests/fixtures/gguf_vocab.py)");
    cJSON *j = NULL;
    struct err err = { 0 };
    struct tokenizer_vocab v = { 0 };
    struct tokenizer *t = NULL;
    struct buf text = { 0 };
    read_file(path, &text);
    CHECK_OK(json_parse(buf_str(&text), false, &j, &err));
    buf_release(&text);
    struct str *tokens = string_array(json_member(j, "tokens"), &v.n_tokens);
    struct str *merges = string_array(json_member(j, "merges"), &v.n_merges);
    int32_t *kinds = MEM_ARRAY(int32_t, v.n_tokens);
    const cJSON *each;
    size_t i = 0;
    cJSON_ArrayForEach (each, json_member(j, "kinds")) kinds[i++] = each->valueint;
    CHECK_EQ_INT(i, v.n_tokens);
    CHECK_OK(json_get_str(j, "model", &v.model, &err));
    CHECK_OK(json_get_str(j, "pre", &v.pre, &err));
    v.tokens = tokens;
    v.merges = merges;
    v.kinds = kinds;
    v.bos = json_member(j, "bos")->valueint;
    v.eos = json_member(j, "eos")->valueint;
    if (tokenizer_from_vocab(&v, &t, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    mem_free(tokens);
    mem_free(merges);
    mem_free(kinds);
    cJSON_Delete(j);
    return t;
}

TEST(tokenizer_smollm2_golden_vectors)
{
    struct tokenizer *t = real_smollm2();
    CHECK_IDS(t, "Hello world! 123", true, "19556,905,17,216,33,34,35");
    CHECK_IDS(t, "Hello, we can use", true, "19556,28,392,416,722");
    CHECK_IDS(t, "The capital of France is", true, "504,3575,282,4649,314");
    CHECK_IDS(t, "\n", true, "198");
    CHECK_IDS(t, "Caf\u00e9 d\u00e9j\u00e0 vu.", true, "51,1939,2756,32564,90,16739,386,101,30");
    CHECK_IDS(t, "  multiple   spaces", true, "216,2701,256,5600");
    CHECK_EQ_INT(tokenizer_eos(t), 2);
    for (size_t i = 0; i < COUNT_OF(long_units); i++) check_time(t, long_units[i]);
    tokenizer_free(t);
}

static void ids_of_json(const cJSON *list, struct buf *out)
{
    const cJSON *each;
    cJSON_ArrayForEach (each, list) buf_printf(out, "%s%d", out->len ? "," : "", each->valueint);
}

/* Checks one line of expected.jsonl against its request; without a rendered template, the text is
 * the request's prompt. */
static void check_reference(const struct tokenizer *t, const cJSON *answer, const cJSON *request)
{
    struct buf want = { 0 }, back = { 0 };
    struct err err = { 0 };
    const char *prompt = NULL, *text = NULL;
    CHECK_OK(json_get_str(json_member(request, "body"), "prompt", &prompt, &err));
    CHECK_OK(json_get_str(answer, "rendered", &prompt, &err));
    CHECK_OK(json_get_str(answer, "text", &text, &err));
    ids_of_json(json_member(answer, "prompt_ids"), &want);
    CHECK_IDS(t, prompt, false, want.data);
    const cJSON *each;
    cJSON_ArrayForEach (each, json_member(answer, "greedy"))
        tokenizer_token_bytes(t, json_member(each, "id")->valueint, true, &back);
    CHECK_EQ_STR(back.data, text);
    buf_release(&want);
    buf_release(&back);
}

TEST(tokenizer_smollm2_reference_prompts)
{
    struct tokenizer *t = real_smollm2();
    struct buf answers = { 0 }, requests = { 0 };
    struct str line, request_line;
    int n = 0;
    read_file(test_data("goldens/smollm2/expected.jsonl"), &answers);
    read_file(test_data("goldens/smollm2/requests.jsonl"), &requests);
    struct str rest = buf_str(&answers), rest_requests = buf_str(&requests);
    while (str_split(&rest, '\n', &line) && str_split(&rest_requests, '\n', &request_line)) {
        cJSON *answer = NULL, *request = NULL;
        struct err err = { 0 };
        if (line.n == 0) continue;
        CHECK_OK(json_parse(line, false, &answer, &err));
        CHECK_OK(json_parse(request_line, false, &request, &err));
        CHECK_EQ_STR(json_member(answer, "custom_id")->valuestring,
                     json_member(request, "custom_id")->valuestring);
        check_reference(t, answer, request);
        cJSON_Delete(answer);
        cJSON_Delete(request);
        n++;
    }
    CHECK_EQ_INT(n, 10);
    buf_release(&answers);
    buf_release(&requests);
    tokenizer_free(t);
}

TEST_MAIN(CASE(tokenizer_merges_by_rank), CASE(tokenizer_ignore_merges_takes_whole_pieces),
          CASE(tokenizer_added_tokens_share_white_space),
          CASE(tokenizer_added_tokens_are_cut_out_first),
          CASE(tokenizer_normalized_added_tokens_match_in_normal_form),
          CASE(tokenizer_puts_begin_and_end_as_the_files_say), CASE(tokenizer_config_adds_tokens),
          CASE(tokenizer_converted_sentencepiece_models), CASE(tokenizer_limit_ends_the_encoding),
          CASE(tokenizer_limit_is_met_before_a_long_piece_merges),
          CASE(tokenizer_refuses_by_name_what_it_cannot_do),
          CASE(tokenizer_of_a_folder_equals_the_definition), CASE(tokenizer_text_comes_back),
          CASE_T(tokenizer_long_texts_take_linear_time, 240), CASE(tokenizer_from_arrays),
          CASE(tokenizer_from_bad_arrays), CASE_T(tokenizer_smollm2_golden_vectors, 120),
          CASE(tokenizer_smollm2_reference_prompts))
