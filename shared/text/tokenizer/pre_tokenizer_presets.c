/* pre_tokenizer_presets.c - the pre-tokenizers of model families by name (pre_tokenizer.h).
 *
 * The names are those of tokenizer.ggml.pre in GGUF files; tiktoken files, which hold no pattern,
 * use the same presets. The patterns are from the families' tokenizer.json.
 * Thread: any. */
#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/tokenizer/pre_tokenizer.h"

#define LLAMA3                                                                                     \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "                     \
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"                                                                \
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QWEN2                                                                                      \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "                          \
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"                                                                \
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define DEEPSEEK_HAN "[\\x{4E00}-\\x{9FA5}\\x{3040}-\\x{309F}\\x{30A0}-\\x{30FF}]+"
#define DEEPSEEK_WORDS                                                                             \
    "[!\"#$%&'()*+,\\-./"                                                                          \
    ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"               \
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

#define TEKKEN                                                                                     \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"    \
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"   \
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
/* DeepSeek before V3: the cased letters that its file lists. */
#define DEEPSEEK_LETTERS                                                                           \
    "A-Za-z\\x{B5}\\x{C0}-\\x{D6}\\x{D8}-\\x{F6}\\x{F8}-\\x{1BA}\\x{1BC}-\\x{1BF}\\x{1C4}-\\x{"    \
    "293}\\x{295}-\\x{2AF}\\x{370}-\\x{373}"                                                       \
    "\\x{376}\\x{377}\\x{37B}-\\x{37D}\\x{37F}\\x{386}\\x{388}-\\x{38A}\\x{38C}\\x{38E}-\\x{3A1}"  \
    "\\x{3A3}-\\x{3F5}\\x{3F7}-\\x{481}"                                                           \
    "\\x{48A}-\\x{52F}\\x{531}-\\x{556}\\x{10A0}-\\x{10C5}\\x{13A0}-\\x{13F5}\\x{13F8}-\\x{13FD}"  \
    "\\x{1C90}-\\x{1CBA}\\x{1CBD}-\\x{1CBF}"                                                       \
    "\\x{1D00}-\\x{1D2B}\\x{1D6B}-\\x{1D77}\\x{1D79}-\\x{1D9A}\\x{1E00}-\\x{1F15}\\x{1F18}-\\x{"   \
    "1F1D}\\x{1F20}-\\x{1F45}"                                                                     \
    "\\x{1F48}-\\x{1F4D}\\x{1F50}-\\x{1F57}\\x{1F59}\\x{1F5B}\\x{1F5D}\\x{1F5F}-\\x{1F7D}\\x{"     \
    "1F80}-\\x{1FB4}\\x{1FB6}-\\x{1FBC}"                                                           \
    "\\x{1FBE}\\x{1FC2}-\\x{1FC4}\\x{1FC6}-\\x{1FCC}\\x{1FD0}-\\x{1FD3}\\x{1FD6}-\\x{1FDB}\\x{"    \
    "1FE0}-\\x{1FEC}\\x{1FF2}-\\x{1FF4}"                                                           \
    "\\x{1FF6}-\\x{1FFC}\\x{2102}\\x{2107}\\x{210A}-\\x{2113}\\x{2115}\\x{2119}-\\x{211D}\\x{"     \
    "2124}\\x{2126}\\x{2128}\\x{212A}-\\x{212D}"                                                   \
    "\\x{212F}-\\x{2134}\\x{2139}\\x{213C}-\\x{213F}\\x{2145}-\\x{2149}\\x{214E}\\x{2183}\\x{"     \
    "2184}\\x{2C00}-\\x{2C7B}"                                                                     \
    "\\x{2C7E}-\\x{2CE4}\\x{2CEB}-\\x{2CEE}\\x{2CF2}\\x{2CF3}\\x{A640}-\\x{A66D}\\x{A680}-\\x{"    \
    "A69B}\\x{A722}-\\x{A76F}"                                                                     \
    "\\x{A771}-\\x{A787}\\x{A78B}-\\x{A78E}\\x{AB70}-\\x{ABBF}\\x{FB00}-\\x{FB06}\\x{FB13}-\\x{"   \
    "FB17}\\x{FF21}-\\x{FF3A}"                                                                     \
    "\\x{FF41}-\\x{FF5A}\\x{10400}-\\x{1044F}\\x{104B0}-\\x{104D3}\\x{104D8}-\\x{104FB}\\x{10C80}" \
    "-\\x{10CB2}\\x{10CC0}-\\x{10CF2}"                                                             \
    "\\x{118A0}-\\x{118DF}\\x{1E900}-\\x{1E943}"
#define DEEPSEEK_SIGNS                                                                             \
    "\\s?[!-/:-~\\x{FF01}-\\x{FF0F}\\x{FF1A}-\\x{FF5E}\\x{2018}-\\x{201F}\\x{3000}-\\x{3002}]+"
#define DEEPSEEK_EAST "[\\x{800}-\\x{9FA5}\\x{AC00}-\\x{D7FF}]+"
/* The pattern of "default", which early converters wrote. */
#define DEFAULT_WORDS                                                                              \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"

static const struct pre_tokenizer_preset presets[] = {
    {
        .name = "default",
        .patterns = { "[\\p{P}\\$\\+<=>\\^~\\|]+", DEFAULT_WORDS, "\\p{N}+", "[0-9][0-9][0-9]" },
    },
    { .name = "gpt-2", .patterns = { PRE_TOKENIZER_GPT2 } },
    { .name = "phi-2", .patterns = { PRE_TOKENIZER_GPT2 } },
    { .name = "mpt", .patterns = { PRE_TOKENIZER_GPT2 } },
    { .name = "olmo", .patterns = { PRE_TOKENIZER_GPT2 } },
    { .name = "smollm", .patterns = { "\\p{N}", PRE_TOKENIZER_GPT2 } },
    { .name = "starcoder", .patterns = { "\\p{N}", PRE_TOKENIZER_GPT2 } },
    { .name = "refact", .patterns = { "\\p{N}", PRE_TOKENIZER_GPT2 } },
    { .name = "command-r", .patterns = { "\\p{N}", PRE_TOKENIZER_GPT2 } },
    { .name = "llama-bpe", .patterns = { LLAMA3 }, .ignore_merges = true, .add_bos = true },
    { .name = "llama3", .patterns = { LLAMA3 }, .ignore_merges = true, .add_bos = true },
    { .name = "llama-v3", .patterns = { LLAMA3 }, .ignore_merges = true, .add_bos = true },
    { .name = "tekken", .patterns = { TEKKEN }, .ignore_merges = true, .add_bos = true },
    { .name = "qwen2", .patterns = { QWEN2 }, .nfc = true },
    { .name = "deepseek-r1-qwen", .patterns = { QWEN2 }, .nfc = true },
    {
        .name = "deepseek-llm",
        .patterns = { "[\\r\\n]", "\\s?[" DEEPSEEK_LETTERS "]+", DEEPSEEK_SIGNS, "\\s+$",
                      DEEPSEEK_EAST, "\\p{N}+" },
    },
    {
        .name = "deepseek-coder",
        .patterns = { "[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", DEEPSEEK_EAST, "\\p{N}" },
    },
    { .name = "deepseek-v3", .patterns = { "\\p{N}{1,3}", DEEPSEEK_HAN, DEEPSEEK_WORDS } },
};

const struct pre_tokenizer_preset *pre_tokenizer_preset_find(const char *name)
{
    for (size_t i = 0; name && i < COUNT_OF(presets); i++)
        if (strcmp(presets[i].name, name) == 0) return &presets[i];
    return NULL;
}

enum status pre_tokenizer_add_preset(struct pre_tokenizer *p,
                                     const struct pre_tokenizer_preset *preset, struct err *err)
{
    for (size_t i = 0; i < COUNT_OF(preset->patterns) && preset->patterns[i]; i++)
        TRY(pre_tokenizer_add_split(p, str_of(preset->patterns[i]), PRE_TOKENIZER_ISOLATED, false,
                                    err));
    return OK;
}
