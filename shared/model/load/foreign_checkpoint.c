/* foreign_checkpoint.c - see foreign_checkpoint.h. Thread: any. */
#include "shared/model/load/foreign_checkpoint.h"

#include <dirent.h>
#include <string.h>

#include "shared/base/buf.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"

/* File names that only one kind of checkpoint has. */
static const struct {
    const char *begin, *end, *sentence;
} FILES[] = {
    { "", ".pdmodel", FOREIGN_STATIC },
    { "", ".pdiparams", FOREIGN_STATIC },
    { "quant_model_description", ".json", FOREIGN_ASCEND }, /* written by msModelSlim */
};

/* Members that FastDeploy's offline quantisation writes instead of quant_method. */
static const char *const FASTDEPLOY_MEMBERS[] = { "dense_quant_type", "moe_quant_type",
                                                  "quantization", "kv_cache_quant_type" };

static const char *sentence_of(struct str name)
{
    for (size_t i = 0; i < COUNT_OF(FILES); i++)
        if (str_starts(name, FILES[i].begin) && str_ends(name, FILES[i].end))
            return FILES[i].sentence;
    return NULL;
}

/* Static-graph exports keep their files in a folder per rank; those are looked into as well. */
static const char *look_into(const char *folder, bool ranks)
{
    DIR *d = opendir(folder);
    const char *sentence = NULL;
    for (struct dirent *e; d && !sentence && (e = readdir(d)) != NULL;) {
        sentence = sentence_of(str_of(e->d_name));
        if (sentence || !ranks || !str_starts(str_of(e->d_name), "rank_")) continue;
        struct buf path = { 0 };
        buf_printf(&path, "%s/%s", folder, e->d_name);
        sentence = look_into(path.data, false);
        buf_release(&path);
    }
    if (d) closedir(d);
    return sentence;
}

enum status foreign_checkpoint_check_folder(const char *folder, struct err *err)
{
    const char *sentence = look_into(folder, true);
    return sentence ? err_field(err, ERR_UNSUPPORTED, "model", "%s: %s", folder, sentence) : OK;
}

enum status foreign_checkpoint_check_config(const cJSON *quantization, struct err *err)
{
    if (!cJSON_IsObject(quantization) || json_member(quantization, "quant_method")) return OK;
    for (size_t i = 0; i < COUNT_OF(FASTDEPLOY_MEMBERS); i++)
        if (json_member(quantization, FASTDEPLOY_MEMBERS[i]))
            return err_field(err, ERR_UNSUPPORTED, "quantization_config",
                             "\"quantization_config\": %s", FOREIGN_FASTDEPLOY);
    return OK;
}
