/* choose.h - which of a source's files are pulled. By default those that a model needs and nothing
 * else:
 *
 *     a checkpoint   config.json, the tokenizer's files and the chat template (model_files.h),
 *                    model.safetensors, or the index and the shards that it names
 * otherwise      the .gguf file, where there is one model in .gguf files; with several, the user
 *                    says which
 *
 * With patterns of names exactly the files that match. In patterns * stands for '/' too, as
 * huggingface-cli has it.
 * Thread: any. */
#ifndef BATON_DEPLOY_PULL_CHOOSE_H
#define BATON_DEPLOY_PULL_CHOOSE_H

#include "deploy/pull/file_list.h"

#define CHOOSE_INDEX "model.safetensors.index.json"

struct choose_options {
    const char *const *include, *const *exclude; /* [n_include], [n_exclude] */
    size_t n_include, n_exclude;
    const char *file; /* only this one, with the other parts of a split .gguf; "": any */
    const char *part; /* only .gguf files with this in their names; "": any */
};

/* Sets `chosen` of every file. ERR_NOT_FOUND says what is lacking, or lists what there is to choose
 * from; ERR_UNSUPPORTED: a checkpoint of another kind. */
enum status choose_files(struct file_list *l, const struct choose_options *o,
                         struct err *err) MUST_CHECK;
/* Takes the choice of .safetensors files back from those that the index, a stranger's JSON, does
 * not name. ERR_FORMAT: it is no index, or names a file that the source lacks. */
enum status choose_shards(struct file_list *l, struct str index, struct err *err) MUST_CHECK;
/* Does the choice have shards that the index decides about? */
bool choose_needs_index(const struct file_list *l);
/* Is it a model's .gguf file with `part` in its name? */
bool choose_is_gguf(const char *name, const char *part);
/* The file to name as the model's when its folder is not enough: the first .gguf of the choice.
 * NULL: the folder is the model. */
const struct pull_file *choose_model_file(const struct file_list *l);

/* Of the name of one file of a split .gguf model: how many there are, 0 for another name; and the
 * name of file i, from 1 on. */
uint32_t choose_split_parts(const char *name);
void choose_split_name(const char *name, uint32_t i, struct buf *out);

#endif
