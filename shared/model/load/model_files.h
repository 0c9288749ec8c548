/* model_files.h - finds a model, and loads the files of its tokenizer and chat template.
 *
 * Reads the small files of a folder or the metadata of a GGUF file, no weights. The caller owns the
 * result; pointers in it are valid until model_text_release. shared/text takes these plain arrays,
 * so it knows no file format.
 *
 * Thread: any. */
#ifndef BATON_MODEL_LOAD_MODEL_FILES_H
#define BATON_MODEL_LOAD_MODEL_FILES_H

#include <stdbool.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

struct model_text {
    /* Folder: whole files; empty when absent. Without a tokenizer.json, tokenizer_model is the
     * first that exists of tekken.json, tokenizer.model, spm.model, ernie_token_100k.model,
     * qwen.tiktoken and other names. */
    struct buf tokenizer_json, tokenizer_config;
    struct buf tokenizer_model, added_tokens, special_tokens;
    const char *tokenizer_model_name; /* NULL: none */
    /* GGUF: arrays borrowed from the mapped file; n_tokens 0 for a folder. */
    const char *gguf_model, *gguf_pre;
    struct str *tokens;
    int32_t *kinds;
    size_t n_tokens;
    struct str *merges;
    size_t n_merges;
    int32_t bos, eos;
    bool add_bos, add_eos;
    float *scores; /* [n_tokens], or NULL */
    bool add_space_prefix;
    /* Both: the chat template ("" when the model has none), the one for requests with tools (empty:
     * the same), and special token texts (NULL when none). */
    struct buf chat_template, tool_template;
    char *bos_text, *eos_text, *pad_text, *unk_text;
    void *mapping; /* private */
};

/* The files of a folder that model_text_load and config_hf_load read, in that order; a NULL name
 * ends it. A vocabulary is read only where there is no tokenizer.json, the first that exists. */
struct model_text_file {
    const char *name;
    bool is_vocabulary;
};
extern const struct model_text_file MODEL_TEXT_FILES[];

enum status model_text_load(const char *path, struct model_text *out, struct err *err) MUST_CHECK;
void model_text_release(struct model_text *t);

/* Finds the path of `name`: an existing path as it is; "org/name" in BATON_MODELS (a folder, or
 * several joined by ':'), the cache of `baton pull` once it is complete there, the Hugging Face
 * cache (HF_HUB_CACHE, HF_HOME/hub, ~/.cache/huggingface/hub:
 * models--org--name/snapshots/<refs/main>) and ModelScope's (MODELSCOPE_CACHE,
 * ~/.cache/modelscope/hub[/models]/org/name). A folder that has exactly one .gguf and no
 * config.json stands for that file. ERR_NOT_FOUND lists every place looked at. */
enum status model_find(const char *name, struct buf *out, struct err *err) MUST_CHECK;
/* Appends the folder of the models that `baton pull` brings: BATON_CACHE/models,
 * XDG_CACHE_HOME/baton/models or ~/.cache/baton/models. */
void model_cache_folder(struct buf *out);
/* The file that is in a folder once a pull into it is complete. */
#define MODEL_PULLED ".baton-pull.json"

#endif
