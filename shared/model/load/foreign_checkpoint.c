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
    bool beside; /* means its kind also where weights lie that could be read */
} FILES[] = {
    { "", ".pdmodel", FOREIGN_STATIC, false },
    { "", ".pdiparams", FOREIGN_STATIC, false },
    { "quant_model_description", ".json", FOREIGN_ASCEND, true }, /* written by msModelSlim */
};

/* What was found in a folder. */
struct finding {
    const char *sentence, *beside; /* of FILES without and with `beside`; NULL: none */
    bool readable;                 /* weights that this program reads */
};

/* Members that FastDeploy's offline quantisation writes instead of quant_method. */
static const char *const FASTDEPLOY_MEMBERS[] = { "dense_quant_type", "moe_quant_type",
                                                  "quantization", "kv_cache_quant_type" };

static void look_at(struct str name, struct finding *f)
{
    if (str_ends(name, ".safetensors") || str_ends(name, ".gguf")) f->readable = true;
    for (size_t i = 0; i < COUNT_OF(FILES); i++)
        if (str_starts(name, FILES[i].begin) && str_ends(name, FILES[i].end))
            *(FILES[i].beside ? &f->beside : &f->sentence) = FILES[i].sentence;
}

/* Static-graph exports keep their files in a folder per rank; those are looked into as well. */
static void look_into(const char *folder, bool ranks, struct finding *f)
{
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        look_at(str_of(e->d_name), f);
        if (!ranks || !str_starts(str_of(e->d_name), "rank_")) continue;
        struct finding of_rank = { 0 };
        struct buf path = { 0 };
        buf_printf(&path, "%s/%s", folder, e->d_name);
        look_into(path.data, false, &of_rank);
        buf_release(&path);
        if (of_rank.sentence) f->sentence = of_rank.sentence;
        if (of_rank.beside) f->beside = of_rank.beside;
    }
    if (d) closedir(d);
}

enum status foreign_checkpoint_check_folder(const char *folder, struct err *err)
{
    struct finding f = { 0 };
    look_into(folder, true, &f);
    const char *sentence = f.beside ? f.beside : f.readable ? NULL : f.sentence;
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
