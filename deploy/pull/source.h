/* source.h - what a pull is of, as its user writes it:
 *
 *     org/name[@REVISION][:PART]     a repository; PART: the .gguf file with this in its name
 *     org/name[@REVISION]/FILE       one file of it
 *     org/name/weight_only_int8      a name of PaddleNLP's static models
 *     hf://org/name..., ms://...     the same, of Hugging Face or ModelScope
 *     https://huggingface.co/org/name[/tree|resolve|blob/REVISION[/FILE]], as well of ModelScope
 *     https://host/path/FILE.gguf    a file of any server
 *     FOLDER                         a folder here
 *
 * In place of a static model, an export that is quantised and cut for a number of hosts, the
 * checkpoint is pulled that it was made from: nodes quantise while they load (`quantization`) and
 * cut for any number of ranks. "-2nodes", "-MTP" and the kind of attention are not part of it.
 * Thread: any (a value). */
#ifndef BATON_DEPLOY_PULL_SOURCE_H
#define BATON_DEPLOY_PULL_SOURCE_H

#include <stdbool.h>
#include <stdint.h>

#include "deploy/pull/file_list.h"

enum pull_from { PULL_HUGGING_FACE, PULL_MODELSCOPE, PULL_URL, PULL_FOLDER };

enum { REPOSITORY_MAX = 256, REVISION_MAX = 128, URL_MAX = 2048 };

struct pull_source {
    enum pull_from from;
    char repository[REPOSITORY_MAX]; /* "org/name"; "" with PULL_URL and PULL_FOLDER */
    char revision[REVISION_MAX];     /* "" : the hub's usual one */
    char file[FILE_NAME_MAX + 1];    /* only this one; "": those that a model needs */
    char part[REVISION_MAX];         /* only .gguf files with this in their names; "": any */
    char url[URL_MAX];               /* PULL_URL */
    char folder[URL_MAX];            /* PULL_FOLDER */
    /* Of a static model's name: */
    const char *quantization; /* for --quantization; NULL: it is none, or asks for nothing */
    const char *note;         /* what becomes of its quantisation; NULL: nothing to say */
    uint32_t n_hosts;         /* "-2nodes"; 0: not said */
    bool has_draft;           /* "-MTP" */
};

struct source_options {
    enum pull_from hub; /* of names without one */
    /* Addresses that stand for the hubs, beside their own; or NULL. */
    const char *hugging_face, *modelscope;
    const char *revision; /* NULL, or for a source that names none */
};

/* ERR_CONFIG says what is wrong with `text` and what would be right. */
enum status source_parse(const char *text, const struct source_options *o, struct pull_source *out,
                         struct err *err) MUST_CHECK;
/* Is it a name or an address of a model elsewhere, and no path? */
bool source_is_elsewhere(const char *text);
/* For people and the log: "org/name@REVISION", the URL or the folder. */
void source_print(const struct pull_source *s, struct buf *out);

#endif
