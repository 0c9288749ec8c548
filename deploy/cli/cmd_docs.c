/* cmd_docs.c - `baton docs PAGE`: prints the pages of docs/ that are generated from tables, so that
 * they cannot go stale. Thread: main. */
#include <stdio.h>
#include <string.h>

#include "deploy/cli/commands.h"
#include "deploy/options/compatibility.h"
#include "deploy/options/near_name.h"
#include "deploy/options/option_table.h"
#include "kvtransfer/tuning.h"
#include "scheduler/recovery_page.h"
#include "shared/base/mem.h"

static const char INTRO[] =
    "usage: baton docs configuration|compatibility|recovery\n\nPrint a page "
    "of docs/ that is made from the program's own tables.\n";

static const char CONFIGURATION_HEAD[] =
    "# Configuration\n"
    "\n"
    "Every option of every command. A flag beats its environment variable, which beats the "
    "default; at\n"
    "start a node prints the most important values and where they came from. `_` and `-` are equal "
    "in\n"
    "names; a flag of one or two letters has one dash, an alias may (`-ngl`). Lists take commas "
    "or\n"
    "repetition. Names are FastDeploy's where it has one; vLLM's and others' are aliases.\n"
    "\n"
    "A variable that begins with `BATON_` and that nothing reads is named in a warning at start, "
    "with\n"
    "the one most likely meant. If that is a secret which the node would lack, it does not start.\n"
    "\n"
    "Effect says whether an option does what it says (works), changes no answer and is said once "
    "at\n"
    "start (accepted), or stops the start with its reason (refused). This page is printed by "
    "`baton\n"
    "docs configuration`; a test holds it against the program.\n"
    "\n"
    "Environment variables that have no flag:\n"
    "\n"
    "| Variable | What it is |\n"
    "|---|---|\n"
    "| `BATON_CLUSTER_SECRET` | The secret that all nodes share (or --cluster-secret-file). "
    "Without one node-to-node ports stay on loopback; `launch` makes one for its nodes. |\n"
    "| `BATON_CACHE` | Folder whose `models/` has what `baton pull` fetches without --dir; default "
    "`XDG_CACHE_HOME/baton` or `~/.cache/baton`. |\n"
    "| `HF_TOKEN`, `HF_TOKEN_PATH`, `MODELSCOPE_API_TOKEN` | Tokens with which hubs are asked, or "
    "a "
    "file with one (docs/pull.md). |\n"
    "| `HF_HUB_OFFLINE` | `1`: `baton pull` and --pull fetch nothing. |\n"
    "| `SSL_CERT_FILE`, `SSL_CERT_DIR` | Certificate authorities for `baton pull` in place of the "
    "system's. |\n"
    "| `BATON_MODELS` | Folders, joined by `:`, in which `--model org/name` is looked for first. "
    "|\n"
    "| `HF_HUB_CACHE`, `HF_HOME` | Hugging Face's cache, in which `--model org/name` is looked "
    "for; default `~/.cache/huggingface`. |\n"
    "| `MODELSCOPE_CACHE` | ModelScope's cache, in which it is looked for next; default "
    "`~/.cache/modelscope`. |\n"
    "| `BATON_CUDA_OVERLAP` | `off`: a kernel on a GPU does not start before the previous one has "
    "ended; otherwise it does from compute capability 9.0 on. |\n"
    "| `BATON_CUDA_MULTICAST` | `on`: of a GPU of compute capability 9.0 two blocks that multiply "
    "rows of the same expert share what they load of its weights; otherwise each loads them for "
    "itself. |\n"
    "| `BATON_CUBLASLT` | cublasLt's file, a folder that has it, or `off`; default: where the "
    "loader and CUDA's folder have it. Of --device cuda without --deterministic. |\n"
    "| `BATON_NCCL_LIBRARY` | NCCL's file; default: libnccl.so.2 where the loader and CUDA's "
    "folder have it. |\n"
    "| `BATON_ENGINE_FAULT` | Faults of the engine to inject, such as `hang@40`; for tests only "
    "(docs/pace.md). |\n"
    "\n";

static void tuning_markdown(struct buf *out)
{
    buf_add_c(out, "Variables that tune how KV is moved (docs/kv-transfer.md says when to);\n"
                   "without one the node chooses:\n\n"
                   "| Variable | Values | What it is |\n|---|---|---|\n");
    for (const struct kvt_tuning_name *n = kvt_tuning_names; n->name; n++)
        buf_printf(out, "| `%s` | %s | %s |\n", n->name, n->values, n->help);
    buf_add_c(out, "\n");
}

static void configuration_page(struct buf *out)
{
    buf_add_c(out, CONFIGURATION_HEAD);
    tuning_markdown(out);
    config_markdown(OPTIONS, out);
}

static const struct page {
    const char *name;
    void (*write)(struct buf *out);
} PAGES[] = {
    { "configuration", configuration_page },
    { "compatibility", compatibility_markdown },
    { "recovery", recovery_markdown },
};

static void say_unknown(const char *name)
{
    struct near_search near;
    near_begin(&near, str_of(name));
    for (size_t i = 0; i < COUNT_OF(PAGES); i++) near_offer(&near, str_of(PAGES[i].name), i);
    const struct str meant = near_found(&near);
    fprintf(stderr, "baton docs: there is no page '%s'%s%.*s%s; pages are", name,
            meant.n ? ", did you mean '" : "", STR_ARG(meant), meant.n ? "'?" : "");
    for (size_t i = 0; i < COUNT_OF(PAGES); i++)
        fprintf(stderr, "%s %s", i ? "," : "", PAGES[i].name);
    fputs("; those written by hand are in the folder docs/ of the source\n", stderr);
}

int cmd_docs(int argc, char **argv)
{
    bool done;
    const char *words[1];
    int n_words = 1;
    struct buf out = { 0 };
    struct config *c = command_config("docs", INTRO, argc, argv, words, &n_words, &done);
    if (!c) return done ? 0 : 2;
    for (size_t i = 0; n_words == 1 && i < COUNT_OF(PAGES); i++)
        if (strcmp(PAGES[i].name, words[0]) == 0) PAGES[i].write(&out);
    if (out.len) fwrite(out.data, 1, out.len, stdout);
    else if (n_words == 1) say_unknown(words[0]);
    else fputs(INTRO, stderr);
    int exit_status = out.len ? 0 : 2;
    buf_release(&out);
    config_free(c);
    return exit_status;
}
