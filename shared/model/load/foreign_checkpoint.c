/* foreign_checkpoint.c - see foreign_checkpoint.h. Thread: any. */
#include "shared/model/load/foreign_checkpoint.h"

#include <dirent.h>
#include <string.h>

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

enum status foreign_checkpoint_check_folder(const char *folder, struct err *err)
{
    DIR *d = opendir(folder);
    const char *sentence = NULL;
    for (struct dirent *e; d && !sentence && (e = readdir(d)) != NULL;)
        for (size_t i = 0; i < COUNT_OF(FILES) && !sentence; i++)
            if (str_starts(str_of(e->d_name), FILES[i].begin) &&
                str_ends(str_of(e->d_name), FILES[i].end))
                sentence = FILES[i].sentence;
    if (d) closedir(d);
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
