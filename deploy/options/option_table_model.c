/* option_table_model.c - options about the model: its files, names, parsers and arithmetic.
 * Thread: any (a constant table). */
#include "deploy/options/option_entry.h"

const struct option MODEL_OPTIONS[] = {
    {
        .name = "model",
        .aliases = "model-path model_name_or_path m",
        .env = "BATON_MODEL",
        .type = OPT_STRING,
        IN("Model", TEXT),
        .help = "A Hugging Face folder, a .gguf file, or org/name in a local cache.",
    },
    {
        .name = "served-model-name",
        .aliases = "alias a",
        .env = "BATON_SERVED_MODEL_NAME",
        .type = OPT_LIST,
        IN("Model", TEXT),
        .help = "Names under which clients may ask for the model; the first is the one in answers. "
                "Default: the model as given.",
    },
    {
        .name = "chat-template",
        .aliases = "chat-template-file",
        .env = "BATON_CHAT_TEMPLATE",
        .type = OPT_STRING,
        IN("Model", TEXT),
        .help = "File with a Jinja chat template to use in place of the model's own.",
    },
    {
        .name = "reasoning-parser",
        .env = "BATON_REASONING_PARSER",
        .type = OPT_STRING,
        .def = "auto",
        IN("Model", TEXT),
        .help =
            "How a chat answer's reasoning is told from the answer: auto (by the chat template), "
            "none, think or ernie; names of FastDeploy, vLLM and "
            "SGLang for these are known (qwen3, deepseek_r1, ernie-x1 ...).",
    },
    {
        .name = "tool-call-parser",
        .env = "BATON_TOOL_CALL_PARSER",
        .type = OPT_STRING,
        .def = "auto",
        IN("Model", TEXT),
        .help = "How the model writes tool calls: auto (by the chat template), none, hermes, "
                "qwen3_coder, deepseek_v3, deepseek_v31, llama3_json, ernie, "
                "mistral or mistral_v11; names of FastDeploy, vLLM and SGLang for these are known.",
    },
    {
        .name = "quantization",
        .aliases = "q",
        .type = OPT_STRING,
        IN("Model", NODE),
        .help = "Quantise a checkpoint while loading: wint8, wint4 (attention, feed-forward blocks "
                "and experts, one scale per output) or block_wise_fp8 "
                "(128 x 128 blocks). In ERNIE with experts wint4 is for the routed experts and the "
                "rest is wint8. Embedding, head, norms, routers and kv_b "
                "of latent attention stay as they are. A GGUF file is quantised already: there the "
                "option has no effect.",
    },
    {
        .name = "activations",
        .env = "BATON_ACTIVATIONS",
        .type = OPT_ENUM,
        .choices = "auto|f32",
        .def = "auto",
        IN("Model", NODE),
        .help =
            "Arithmetic: auto rounds the inputs of quantised matrices to int8, those of bf16 "
            "ones and attention's queries to bf16 where the CPU "
            "multiplies them, and keeps the KV cache in bf16; f32 is exact. Nodes of one cluster "
            "must agree.",
    },
    {
        .name = "weights-cache",
        .env = "BATON_WEIGHTS_CACHE",
        .type = OPT_STRING,
        .def = "off",
        IN("Model", NODE),
        .help =
            "Folder for copies of weights as they are packed (and quantised) for this CPU: a "
            "later start maps the copy, and the nodes of a host "
            "share its memory. A copy is about as large as the weights. off: pack at every start.",
    },
    {
        .name = "load-format",
        .aliases = "load-choices",
        .type = OPT_ENUM,
        .choices = "auto|default|default_v1|safetensors|gguf|dummy",
        .def = "auto",
        IN("Model", NODE),
        .help =
            "Format of the weights; auto (and default, default_v1, as FastDeploy calls it) "
            "recognises it, another one is refused where the files are "
            "not of it. dummy: no weights are read, config.json is enough; they are dummy values "
            "(bf16, then as --quantization says) for measurements of "
            "speed and memory, and answers mean nothing.",
    },
    { .name = NULL },
};
