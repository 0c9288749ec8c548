/* option_table_pull.c - options about fetching a model: of `baton pull`, and those of them that
 * --pull of other commands reads. Thread: any (a constant table). */
#include "deploy/options/option_entry.h"

const struct option PULL_OPTIONS[] = {
    {
        .name = "pull",
        .env = "BATON_PULL",
        .type = OPT_BOOL,
        .def = "false",
        IN("Pull", PULLS),
        .help = "Fetch --model org/name, or an address, that is not on this host, as `baton pull` "
                "does, and org/name of a small model that drafts; a model that is here is taken "
                "without asking anybody.",
    },
    {
        .name = "model-source",
        .aliases = "source",
        .env = "BATON_MODEL_SOURCE",
        .type = OPT_ENUM,
        .choices = "huggingface|modelscope",
        .def = "huggingface",
        IN("Pull", PULL " " PULLS),
        .help = "The hub that has a model named org/name. hf://org/name and ms://org/name say it "
                "themselves; VLLM_USE_MODELSCOPE=true is modelscope.",
    },
    {
        .name = "hf-endpoint",
        .env = "HF_ENDPOINT",
        .type = OPT_STRING,
        .def = "https://huggingface.co",
        IN("Pull", PULL " " PULLS),
        .help = "Address of Hugging Face's hub, or of a mirror such as https://hf-mirror.com.",
    },
    {
        .name = "modelscope-endpoint",
        .env = "MODELSCOPE_ENDPOINT MODELSCOPE_DOMAIN",
        .type = OPT_STRING,
        .def = "https://www.modelscope.cn",
        IN("Pull", PULL " " PULLS),
        .help = "Address of ModelScope's hub.",
    },
    {
        .name = "model-name",
        .aliases = "model",
        .type = OPT_STRING,
        IN("Pull", PULL),
        .help = "The model, in place of the first word.",
    },
    {
        .name = "dir",
        .aliases = "local-dir",
        .type = OPT_STRING,
        IN("Pull", PULL),
        .help = "Folder for the files. Default: one for this model in the cache, where --model "
                "org/name finds it (BATON_CACHE/models, XDG_CACHE_HOME/baton/models or "
                "~/.cache/baton/models).",
    },
    {
        .name = "revision",
        .type = OPT_STRING,
        IN("Pull", PULL),
        .help = "Branch, tag or commit of the repository; org/name@REVISION says the same.",
    },
    {
        .name = "include",
        .type = OPT_LIST,
        IN("Pull", PULL),
        .help = "Fetch exactly the files that match one of these patterns (*.gguf), in place of "
                "those that a model needs.",
    },
    {
        .name = "exclude",
        .type = OPT_LIST,
        IN("Pull", PULL),
        .help = "Leave out the files that match one of these patterns.",
    },
    {
        .name = "link",
        .type = OPT_BOOL,
        IN("Pull", PULL),
        .help = "Of a folder: make links to its files instead of copies.",
    },
    {
        .name = "connections",
        .aliases = "max-workers j",
        .type = OPT_INT,
        RANGE(1, 64),
        .def = "8",
        IN("Pull", PULL),
        .help = "Connections at once.",
    },
    {
        .name = "chunk-size",
        .type = OPT_INT,
        RANGE(65536, 17179869184),
        .def = "67108864",
        IN("Pull", PULL),
        .help = "Bytes that one connection fetches of a file before it takes the next ones.",
    },
    {
        .name = "retries",
        .type = OPT_INT,
        RANGE(0, 1000),
        .def = "10",
        IN("Pull", PULL),
        .help = "Tries in a row that may fail before the pull ends; the pauses between them grow "
                "to 15 s, or are as long as the server asks for.",
    },
    {
        .name = "stall-timeout",
        .type = OPT_FLOAT,
        RANGE(0.1, 3600),
        .def = "10",
        IN("Pull", PULL),
        .help = "Seconds without a byte after which a connection is given up and made again; three "
                "times as many until the first byte.",
    },
    {
        .name = "nnodes",
        .type = OPT_INT,
        RANGE(1, 256),
        .def = "1",
        IN("Pull", PULL),
        .help = "How many hosts will serve the model. Each needs all of its files: ranks cut every "
                "matrix while they load, and take over the experts of ranks that are lost.",
    },
    {
        .name = "mode",
        .type = OPT_ENUM,
        .choices = "master|slave",
        .def = "master",
        IN("Pull", PULL),
        .help = "Which of --nnodes hosts this is; as each needs all files, both fetch the same.",
    },
    {
        .name = "speculate-model-path",
        .type = OPT_STRING,
        IN("Pull", PULL),
        .help =
            "Accepted: the layers of a checkpoint that draft tokens are among its own files, so "
            "there is nothing to put elsewhere.",
    },
    { .name = NULL },
};
