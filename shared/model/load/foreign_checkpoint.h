/* foreign_checkpoint.h - recognises checkpoints that other engines made for themselves and that
 * cannot be read, so that the user hears what to give instead and not which tensor was odd.
 * Thread: any. */
#ifndef BATON_MODEL_LOAD_FOREIGN_CHECKPOINT_H
#define BATON_MODEL_LOAD_FOREIGN_CHECKPOINT_H

#include <cjson/cJSON.h>

#include "shared/base/err.h"

/* The sentences, which docs/compatibility.md prints too. */
#define FOREIGN_STATIC                                                                             \
    "static-graph exports (.pdmodel, .pdiparams) are not read: give the model's Hugging Face "     \
    "checkpoint or a GGUF file"
#define FOREIGN_FASTDEPLOY                                                                         \
    "FastDeploy's own FP8 files are not read: give the bf16 checkpoint and --quantization "        \
    "block_wise_fp8"
#define FOREIGN_ASCEND                                                                             \
    "a format of Ascend NPUs: give DeepSeek's own FP8 checkpoint, one in bf16 or a GGUF file"

/* ERR_UNSUPPORTED with one of the sentences when the files of `folder`, or of its folders rank_*,
 * are such a checkpoint; OK for what is not a folder. A static-graph export beside safetensors or
 * GGUF files is no obstacle: those are read. */
enum status foreign_checkpoint_check_folder(const char *folder, struct err *err) MUST_CHECK;
/* The same for the member quantization_config of config.json (may be NULL). */
enum status foreign_checkpoint_check_config(const cJSON *quantization, struct err *err) MUST_CHECK;

#endif
