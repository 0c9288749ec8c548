/* node_options.c - see node_options.h. */
#include "deploy/node/node_options.h"

#include <netdb.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/launch/launcher_watch.h"
#include "deploy/launch/ranks.h"
#include "deploy/options/compatibility.h"
#include "deploy/options/config_redis.h"
#include "deploy/tiers/rank_folder.h"
#include "kernels/kv_rows.h"
#include "kernels/quantize.h"
#include "kvtransfer/transport.h"
#include "shared/base/address/host_port.h"
#include "shared/base/hash/hash.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"
#include "shared/kv/tier/disk/disk_folder.h"
#include "shared/model/load/model_files.h"
#include "shared/text/output/reasoning.h"
#include "shared/text/output/tool_parser.h"

enum { SECRET_MAX = 4096 };

static char *dup_in(struct node_options *o, const char *s)
{
    return arena_strndup(&o->arena, s, strlen(s));
}

/* ---- lists of ports ---- */

/* Entry `rank` of a list of ports; 0 when the option is not set. The list may be longer than the
 * number of ranks. */
static enum status entry_of(const struct config *c, const char *name, size_t rank, uint16_t *out,
                            struct err *err)
{
    size_t n = 0;
    int64_t port = 0;
    *out = 0;
    config_list(c, name, 0, &n);
    if (n == 0) return OK;
    if (rank >= n)
        return err_field(err, ERR_CONFIG, name,
                         "--%s has %zu ports, but this is rank %zu; give one port per rank", name,
                         n, rank);
    const char *item = config_list(c, name, rank, NULL);
    if (str_to_i64(str_trim(str_of(item)), &port) != OK || port < 0 || port > 65535)
        return err_field(err, ERR_CONFIG, name, "%s: '%s' is not a port (0 to 65535)",
                         config_source_text(c, name), item);
    *out = (uint16_t)port;
    return OK;
}

static enum status port_of(const struct config *c, const char *name, uint16_t *out, struct err *err)
{
    return entry_of(c, name, ranks_local_id(c), out, err);
}

/* ---- the model ---- */

static bool is_gguf(const char *path) { return str_ends(str_of(path), ".gguf"); }

static enum status read_quantization(const struct config *c, struct node_options *o,
                                     struct err *err)
{
    const char *q = config_string(c, "quantization");
    if (!q || !*q || str_eq_c(str_of(q), "none")) return OK;
    if (str_eq_c(str_of(q), "ascend"))
        return err_field(err, ERR_CONFIG, "quantization",
                         "--quantization ascend is a format of Ascend NPUs; give a checkpoint in "
                         "bf16 or a GGUF file");
    if (quantize_from_name(q, &o->quantize, err) != OK) return err_prefix(err, "--quantization: ");
    if (!is_gguf(o->model_path)) return OK;
    o->quantize = QUANTIZE_NONE;
    buf_printf(&o->notes,
               "note: --quantization %s has no effect on a GGUF file, whose weights are quantised "
               "already\n",
               q);
    return OK;
}

static enum status read_format(const struct config *c, struct node_options *o, struct err *err)
{
    const char *format = config_string(c, "load-format"),
               *is = is_gguf(o->model_path) ? "gguf" : "safetensors";
    o->dummy = strcmp(format, "dummy") == 0;
    if (o->dummy && is_gguf(o->model_path))
        return err_field(err, ERR_CONFIG, "load-format",
                         "--load-format dummy needs a folder with a config.json, and %s is a file",
                         o->model_path);
    const bool any = strcmp(format, "auto") == 0 || strcmp(format, "default") == 0 ||
                     strcmp(format, "default_v1") == 0;
    if (o->dummy || any || strcmp(format, is) == 0) return OK;
    return err_field(err, ERR_CONFIG, "load-format",
                     "--load-format %s, but %s is %s; auto recognises it", format, o->model_path,
                     is);
}

static enum status read_parsers(const struct config *c, struct node_options *o, struct err *err)
{
    o->reasoning_parser = config_string(c, "reasoning-parser");
    o->any_temperature = config_bool(c, "allow-temperature-above-2");
    o->last_item_alone = config_bool(c, "disable-streaming");
    o->max_dec_len = (uint32_t)config_int(c, "max-dec-len");
    o->tool_parser = config_string(c, "tool-call-parser");
    if (!reasoning_parser_is_known(str_of(o->reasoning_parser)))
        return err_field(err, ERR_CONFIG, "reasoning-parser",
                         "--reasoning-parser %s is not known; auto, none, think and ernie are, and "
                         "names of peers for them",
                         o->reasoning_parser);
    if (tool_parser_is_known(str_of(o->tool_parser))) return OK;
    struct buf names = { 0 };
    for (size_t i = 0; tool_format_at(i); i++) buf_printf(&names, ", %s", tool_format_at(i)->name);
    enum status st = err_field(err, ERR_CONFIG, "tool-call-parser",
                               "--tool-call-parser %s is not known; auto, none%s are",
                               o->tool_parser, names.data);
    buf_release(&names);
    return st;
}

enum status node_options_find_model(const char *model, struct buf *path, struct err *err)
{
    const enum status st = model_find(model, path, err);
    const struct compat_entry *known = st == OK ? NULL : compatibility_value(model);
    if (known && known->effect == EFFECT_REFUSED)
        return err_field(err, ERR_CONFIG, "model", "--model %s: %s", model, known->sentence);
    return st;
}

static enum status read_model(const struct config *c, struct node_options *o, struct err *err)
{
    struct buf path = { 0 };
    size_t n = 0;
    o->model = config_string(c, "model");
    if (!o->model)
        return err_field(err, ERR_CONFIG, "model",
                         "no model was given; use --model FOLDER, FILE.gguf or org/name");
    const enum status st = node_options_find_model(o->model, &path, err);
    if (st == OK) o->model_path = dup_in(o, path.data);
    buf_release(&path);
    if (st != OK) return st;
    TRY(read_format(c, o, err));
    o->chat_template = config_string(c, "chat-template");
    config_list(c, "served-model-name", 0, &n);
    if (n > NODE_NAMES_MAX)
        return err_field(err, ERR_CONFIG, "served-model-name",
                         "%zu served model names were given, at most %d", n, NODE_NAMES_MAX);
    for (size_t i = 0; i < n && i < NODE_NAMES_MAX; i++)
        o->names[o->n_names++] = config_list(c, "served-model-name", i, NULL);
    if (o->n_names == 0) o->names[o->n_names++] = o->model;
    const char *cache = config_string(c, "weights-cache");
    o->weights_cache = *cache && strcmp(cache, "off") != 0 ? cache : NULL;
    return read_quantization(c, o, err);
}

/* ---- the engine ---- */

static int n_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

/* Notes GPU options on a node that computes on the CPU, and the other way round. */
static void note_gpu_options(const struct config *c, struct node_options *o)
{
    const bool cuda = strcmp(o->device, "cuda") == 0;
    static const char *const OF_GPUS[] = { "gpu-memory-utilization", "enforce-eager" },
                             *const OF_CPUS[] = { "weights-cache", "cpu-isa" };
    const char *const *names = cuda ? OF_CPUS : OF_GPUS;
    for (size_t i = 0; i < COUNT_OF(OF_GPUS); i++)
        if (config_is_set(c, names[i]))
            buf_printf(&o->notes, "note: --%s has no effect with --device %s\n", names[i],
                       o->device);
}

enum status node_options_arithmetic(const struct config *c, enum activations *activations,
                                    enum dtype *kv, struct err *err)
{
    const char *type = config_string(c, "kv-cache-dtype");
    *activations = strcmp(config_string(c, "activations"), "f32") == 0 ? ACTIVATIONS_F32
                                                                       : ACTIVATIONS_FAST;
    *kv = kernel_kv_default(*activations);
    if (!*type || strcmp(type, "auto") == 0 || kv_rows_from_name(type, kv, err) == OK) return OK;
    return err_prefix(err, "--kv-cache-dtype: ");
}

/* What users call it: their flag or variable, `usual` where they said nothing. */
static const char *given_as(const struct config *c, const char *name, const char *usual)
{
    return config_is_set(c, name) ? config_source_text(c, name) : usual;
}

/* The memories behind the KV pool. */
static enum status read_tiers(const struct config *c, struct node_options *o, struct err *err)
{
    const char *type = config_string(c, "kv-cache-tier-dtype");
    struct kv_store_options *t = &o->tiers;
    *t = (struct kv_store_options){ .slot_dtype = o->kv_dtype };
    t->host_bytes = (uint64_t)(config_float(c, "swap-space") * (double)(1 << 30));
    t->disk.folder = config_string(c, "kv-cache-dir");
    t->disk.bytes = (uint64_t)(config_float(c, "kv-cache-disk") * (double)(1 << 30));
    if (*type && strcmp(type, "auto") != 0 && kv_rows_from_name(type, &t->slot_dtype, err) != OK)
        return err_prefix(err, "--kv-cache-tier-dtype: ");
    t->rounds = t->slot_dtype != o->kv_dtype;
    if (config_is_set(c, "kv-cache-disk") && !t->disk.folder)
        return err_field(err, ERR_CONFIG, "kv-cache-disk",
                         "--kv-cache-disk needs --kv-cache-dir, the folder to keep KV in");
    if (t->disk.folder) TRY(disk_folder_check(t->disk.folder, err));
    if (t->rounds && !t->host_bytes && !t->disk.folder)
        buf_add_c(&o->notes, "note: --kv-cache-tier-dtype has no effect without --swap-space or "
                             "--kv-cache-dir\n");
    if (t->host_bytes && !o->prefix_cache)
        buf_add_c(&o->notes, "note: without --enable-prefix-caching --swap-space is for preempted "
                             "sequences alone\n");
    if (t->disk.folder && !o->prefix_cache)
        buf_add_c(&o->notes,
                  "note: --kv-cache-dir has no effect without --enable-prefix-caching\n");
    return OK;
}

static enum status read_engine(const struct config *c, struct node_options *o, struct err *err)
{
    o->device = config_string(c, "device");
    o->cpu_isa = config_string(c, "cpu-isa");
    TRY(node_options_arithmetic(c, &o->activations, &o->kv_dtype, err));
    o->n_threads = (int)config_int(c, "compute-threads");
    o->n_host_ranks = ranks_on_host(c);
    if (o->n_threads == 0) o->n_threads = n_cpus() / (int)o->n_host_ranks;
    if (o->n_threads == 0) o->n_threads = 1;
    o->max_model_len = (uint32_t)config_int(c, "max-model-len");
    /* MAX_SEQ_LEN is often that of another model; its own service lowers it, too */
    o->max_model_len_given = config_is_set(c, "max-model-len") &&
                             strcmp(config_source_text(c, "max-model-len"), "MAX_SEQ_LEN") != 0;
    o->block_tokens = (uint32_t)config_int(c, "block-size");
    o->max_seqs = (uint32_t)config_int(c, "max-num-seqs");
    o->max_batched_tokens = (uint32_t)config_int(c, "max-num-batched-tokens");
    o->max_waiting = (uint32_t)config_int(c, "max-waiting");
    o->prefix_cache = config_bool(c, "enable-prefix-caching");
    TRY(read_tiers(c, o, err));
    o->gpu_share = config_float(c, "gpu-memory-utilization");
    o->eager = config_bool(c, "enforce-eager");
    o->deterministic = config_bool(c, "deterministic");
    note_gpu_options(c, o);
    if (o->max_batched_tokens < o->max_seqs)
        return err_field(err, ERR_CONFIG, "max-num-batched-tokens",
                         "--max-num-batched-tokens %u is less than %s %u; every running sequence "
                         "needs one token per step",
                         o->max_batched_tokens, given_as(c, "max-num-seqs", "--max-num-seqs"),
                         o->max_seqs);
    if (config_is_set(c, "num-gpu-blocks-override"))
        o->n_blocks = (uint32_t)config_int(c, "num-gpu-blocks-override");
    o->n_blocks_by = config_source_text(c, "num-gpu-blocks-override");
    if (config_is_set(c, "kv-cache-memory"))
        o->kv_bytes = (uint64_t)(config_float(c, "kv-cache-memory") * (double)(1 << 30));
    return OK;
}

/* Before the model is loaded, which takes minutes. */
static enum status check_draft_model(const struct config *c, const struct node_options *o,
                                     struct err *err)
{
    struct buf path = { 0 };
    if (o->draft.ops != &drafter_model_ops) return OK;
    const enum status st = node_options_find_model(o->draft.model, &path, err);
    buf_release(&path);
    if (st == OK) return OK;
    return err_prefix(err, "%s, the model that drafts: ", draft_options_source(c));
}

static enum status read_pace(const struct config *c, struct node_options *o, struct err *err)
{
    const char *fault = getenv("BATON_ENGINE_FAULT");
    if (fault && *fault) {
        o->fault_text = fault;
        TRY(engine_fault_parse(str_of(fault), &o->fault, err));
    }
    o->pace_file = config_string(c, "pace");
    if (o->pace_file && pace_read(o->pace_file, &o->pace, err) != OK)
        return err_prefix(err, "--pace: ");
    TRY(draft_options_read(c, &o->draft, &o->notes, err));
    return check_draft_model(c, o, err);
}

/* ---- secrets ---- */

enum { SECRET_LEN_RECOMMENDED = 16 }; /* characters; a shorter secret works, with a warning */

enum status node_options_secret(const struct config *c, struct arena *arena, struct str *out,
                                struct err *err)
{
    const char *file = config_string(c, "cluster-secret-file"),
               *env = getenv("BATON_CLUSTER_SECRET");
    char text[SECRET_MAX + 1];
    if (!file) {
        *out = str_of(env);
        return OK;
    }
    FILE *f = fopen(file, "rb");
    if (!f)
        return err_field(err, ERR_CONFIG, "cluster-secret-file",
                         "--cluster-secret-file %s cannot be opened", file);
    size_t n = fread(text, 1, SECRET_MAX, f);
    fclose(f);
    struct str s = str_trim((struct str){ text, n });
    if (s.n == 0)
        return err_field(err, ERR_CONFIG, "cluster-secret-file",
                         "--cluster-secret-file %s is empty", file);
    *out = (struct str){ arena_strndup(arena, s.p, s.n), s.n };
    return OK;
}

/* ---- addresses ---- */

/* The local address that routes to `host`; no packet is sent. */
static bool address_facing(const char *host, char *out, size_t cap)
{
    struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_DGRAM }, *ai = NULL;
    struct sockaddr_storage me;
    socklen_t len = sizeof me;
    bool ok = false;
    if (getaddrinfo(host, "9", &hints, &ai) != 0) return false;
    int fd = socket(ai->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, ai->ai_addr, ai->ai_addrlen) == 0 &&
        getsockname(fd, (struct sockaddr *)&me, &len) == 0)
        ok = getnameinfo((struct sockaddr *)&me, len, out, (socklen_t)cap, NULL, 0,
                         NI_NUMERICHOST) == 0;
    if (fd >= 0) close(fd);
    freeaddrinfo(ai);
    return ok;
}

/* --ips is FastDeploy's name for the address of a host alone, or of all hosts. */
static const char *given_address(const struct config *c)
{
    size_t n, index;
    const char *given = config_string(c, "advertise-host"), *ip = config_list(c, "ips", 0, &n);
    return given ? given : n == 1 ? ip : ranks_own_ip(c, &index);
}

/* Where rank 0 of several hosts listens; NULL: nobody said it. */
static const char *meeting_host(const struct config *c)
{
    return config_bool(c, "enable-expert-parallel") ? config_string(c, "data-parallel-address")
                                                    : NULL;
}

/* The address that faces the directory. Where that is on this host the ranks of others come to rank
 * 0, and have to reach this one, too. */
static bool find_address(const struct config *c, const struct node_options *o, char *out,
                         size_t cap)
{
    const char *towards = o->directory_host      ? o->directory_host
                          : o->redis.n_sentinels ? o->redis.sentinels[0].host
                                                 : o->redis.host,
               *meet = meeting_host(c);
    const bool found = address_facing(towards, out, cap);
    return !meet || (found && !host_is_loopback(out)) ? found : address_facing(meet, out, cap);
}

/* Only processes of this host have the secret that a launcher made, so they listen on loopback as
 * without one. An interface that KV was told to take is listened on all the same. */
static bool may_come_from_elsewhere(const struct node_options *o, const char *given)
{
    const bool names_interface = o->tuning.rdma.rdma_cm ||
                                 (o->tuning.socket_ifname && *o->tuning.socket_ifname);
    return o->secret.n && (!launcher_watch_made_secret() || names_interface ||
                           (given && !host_is_loopback(given)));
}

/* Nodes talk to each other over IPv6 when the API server does, or the address that they are told
 * to use is one. */
static enum status read_addresses(const struct config *c, struct node_options *o, struct err *err)
{
    const char *given = given_address(c), *meet = meeting_host(c),
               *like = given && host_is_ipv6(given) ? given
                       : meet && host_is_ipv6(meet) ? meet
                                                    : o->host;
    char address[HOST_TEXT_MAX] = "";
    o->cluster_host = may_come_from_elsewhere(o, given) ? host_wildcard(like) : host_loopback(like);
    if (given && !host_copy(given, address)) address[0] = 0;
    if (!given && o->secret.n && !find_address(c, o, address, sizeof address)) address[0] = 0;
    if (!given && !address[0]) snprintf(address, sizeof address, "%s", host_loopback(like));
    if (!host_is_number(address))
        return err_field(err, ERR_CONFIG, "advertise-host",
                         "--advertise-host %s is not an IP address", given ? given : address);
    o->advertise_host = dup_in(o, address);
    return OK;
}

/* ---- the cluster ---- */

/* Refuses unknown members of vLLM's JSON, and notes which of the others have no effect here. */
static enum status check_kv_members(const cJSON *doc, struct buf *notes, struct err *err)
{
    const cJSON *v;
    if (!cJSON_IsObject(doc)) return err_set(err, ERR_CONFIG, "it is not a JSON object");
    cJSON_ArrayForEach (v, doc) {
        char name[128];
        snprintf(name, sizeof name, "--kv-transfer-config %.80s", v->string);
        const struct compat_entry *known = compatibility_value(name);
        if (!known)
            return err_field(err, ERR_CONFIG, "kv-transfer-config",
                             "there is no member '%.80s'; kv_role is the one that has an effect, "
                             "and docs/compatibility.md lists the others",
                             v->string);
        if (known->effect == EFFECT_ACCEPTED && log_level() >= LOG_INFO)
            buf_printf(notes, "note: %s: %s\n", name, known->sentence);
    }
    return OK;
}

/* The role in vLLM's JSON. */
static enum status read_role(const struct config *c, struct node_options *o, struct err *err)
{
    const char *name = config_string(c, "splitwise-role"),
               *json = config_string(c, "kv-transfer-config"), *role = NULL;
    (void)node_role_from_name(name, &o->role); /* the option takes no other */
    if (!json) return OK;
    cJSON *doc = NULL;
    enum node_role given = o->role;
    enum status st = json_parse(str_of(json), false, &doc, err);
    if (st == OK) st = check_kv_members(doc, &o->notes, err);
    if (st == OK) st = json_get_str(doc, "kv_role", &role, err);
    if (st != OK) err_prefix(err, "--kv-transfer-config: ");
    else if (!role)
        st = err_field(err, ERR_CONFIG, "kv-transfer-config",
                       "--kv-transfer-config has no kv_role (kv_producer, kv_consumer or kv_both)");
    else if (str_eq_c(str_of(role), "kv_producer")) o->role = ROLE_PREFILL;
    else if (str_eq_c(str_of(role), "kv_consumer")) o->role = ROLE_DECODE;
    else if (str_eq_c(str_of(role), "kv_both")) o->role = ROLE_MIXED;
    else
        st = err_field(err, ERR_CONFIG, "kv-transfer-config",
                       "kv_role '%s' is not one of kv_producer, kv_consumer, kv_both", role);
    if (st == OK && config_is_set(c, "splitwise-role") && given != o->role)
        st = err_field(
            err, ERR_CONFIG, "splitwise-role",
            "--splitwise-role %s and --kv-transfer-config's kv_role %s contradict each other", name,
            role);
    cJSON_Delete(doc);
    return st == OK ? OK : ERR_CONFIG;
}

/* Keeps the allowed protocols that this binary has. An unknown name is an error; a known one that
 * is not built is left out, with a note when the user listed it. */
static enum status read_protocols(const struct config *c, struct node_options *o, struct err *err)
{
    const struct kvt_transport_ops *ops;
    struct buf kept = { 0 };
    size_t n = 0;
    config_list(c, "cache-transfer-protocol", 0, &n);
    for (size_t i = 0; i < n; i++) {
        struct str p = str_trim(str_of(config_list(c, "cache-transfer-protocol", i, NULL)));
        if (!kvt_transport_is_known(p)) {
            buf_release(&kept);
            return err_field(err, ERR_CONFIG, "cache-transfer-protocol",
                             "--cache-transfer-protocol: '%.*s' is not one of " KVT_TRANSPORT_NAMES,
                             STR_ARG(p));
        }
        if (kvt_transport_find(p, &ops, NULL) == OK) {
            if (kept.len) buf_add_char(&kept, ',');
            buf_add_str(&kept, p);
        } else if (config_is_set(c, "cache-transfer-protocol")) {
            buf_printf(&o->notes,
                       "note: --cache-transfer-protocol: %.*s is not built into this binary\n",
                       STR_ARG(p));
        }
    }
    bool none = kept.len == 0;
    o->protocols = dup_in(o, none ? "" : kept.data);
    o->protocols_named = config_is_set(c, "cache-transfer-protocol");
    buf_release(&kept);
    if (none)
        return err_field(err, ERR_CONFIG, "cache-transfer-protocol",
                         "none of the protocols in --cache-transfer-protocol is built into this "
                         "binary; add ipc (same host) or tcp");
    return OK;
}

enum status node_options_tuning(struct kvt_tuning *t, struct err *err)
{
    for (const struct kvt_tuning_name *n = kvt_tuning_names; n->name; n++) {
        const char *value = getenv(n->name);
        bool known;
        if (value && *value) TRY(kvt_tuning_set(t, n->name, value, &known, err));
    }
    return OK;
}

/* A host may stand in brackets, as in a URL. */
static enum status read_host(const struct config *c, struct node_options *o, const char *name,
                             const char **out, struct err *err)
{
    char host[HOST_TEXT_MAX];
    if (!host_copy(config_string(c, name), host))
        return err_field(err, ERR_CONFIG, name, "--%s is longer than %d characters", name,
                         HOST_TEXT_MAX - 1);
    *out = dup_in(o, host);
    return OK;
}

static enum status read_host_port(struct node_options *o, const char *name, const char *text,
                                  struct err *err)
{
    char host[HOST_TEXT_MAX];
    if (!host_port_parse(text, host, &o->directory_port) || !host[0] || o->directory_port == 0)
        return err_field(
            err, ERR_CONFIG, name,
            "--%s %s is not host:port (an IPv6 address stands in brackets, [::1]:9400)", name,
            text);
    /* the documents spell this host as its wildcard */
    o->directory_host = host_is_wildcard(host) ? host_loopback(host) : dup_in(o, host);
    o->directory = "http";
    return OK;
}

bool node_options_in_redis(const struct config *c)
{
    struct str name = str_of(config_string(c, "scheduler-name"));
    return str_eq_c(name, "splitwise") || str_eq_c(name, "global");
}

/* Only of the command line: an environment is often that of a whole cluster. */
void node_options_warn_alone(const struct config *c, bool others_join)
{
    static const char *const OF_REDIS[] = { "scheduler-host",     "scheduler-port",
                                            "scheduler-db",       "scheduler-password",
                                            "scheduler-username", "scheduler-sentinels",
                                            "scheduler-tls",      "scheduler-topic" };
    size_t n = COUNT_OF(OF_REDIS) - others_join; /* the topic is the last */
    if (node_options_in_redis(c) || config_string(c, "router") ||
        strcmp(config_string(c, "log-level"), "error") == 0)
        return;
    for (size_t i = 0; i < n; i++)
        if (config_source(c, OF_REDIS[i]) == SOURCE_ARGS)
            fprintf(stderr, "warning: %s has no effect without --scheduler-name splitwise%s\n",
                    config_source_text(c, OF_REDIS[i]),
                    i + 1 == COUNT_OF(OF_REDIS) ? " or --router: no other node can join this one"
                                                : ": the cluster view is not in Redis");
}

/* The master is the one that the sentinels name. */
static void note_named_server(const struct config *c, struct node_options *o)
{
    static const char *const OF_ONE_SERVER[] = { "scheduler-host", "scheduler-port" };
    for (size_t i = 0; i < COUNT_OF(OF_ONE_SERVER); i++)
        if (config_is_set(c, OF_ONE_SERVER[i]))
            buf_printf(&o->notes,
                       "note: %s has no effect with --scheduler-sentinels, which name the master\n",
                       config_source_text(c, OF_ONE_SERVER[i]));
}

static enum status read_directory(const struct config *c, struct node_options *o, struct err *err)
{
    const char *scheduler = config_string(c, "scheduler-name"),
               *router = config_string(c, "router");
    const char *innode = config_list(c, "innode-prefill-ports", 0, NULL);
    bool redis = node_options_in_redis(c);
    o->directory = redis ? "redis" : "local";
    o->topic = config_string(c, "scheduler-topic");
    TRY(config_redis(c, &o->arena, &o->redis, err));
    if (o->redis.n_sentinels && redis) note_named_server(c, o);
    o->ttl_s = (uint32_t)config_int(c, "scheduler-ttl");
    o->grace_ms = (uint32_t)(config_float(c, "placement-timeout") * 1000);
    o->max_queue_ms = (uint32_t)(config_float(c, "max-queue-time") * 1000);
    o->unsplit = strcmp(scheduler, "global") == 0;
    o->resume_ms = (uint32_t)(config_float(c, "resume-window") * 1000);
    if (strlen(o->topic) == 0 || strlen(o->topic) >= NODE_NAME_MAX)
        return err_field(err, ERR_CONFIG, "scheduler-topic",
                         "--scheduler-topic must have 1 to %d characters", NODE_NAME_MAX - 1);
    if (redis && (router || innode))
        return err_field(err, ERR_CONFIG, router ? "router" : "innode-prefill-ports",
                         "--scheduler-name %s keeps the cluster view in Redis; --%s names another "
                         "directory server",
                         scheduler, router ? "router" : "innode-prefill-ports");
    if (router) return read_host_port(o, "router", router, err);
    if (innode) {
        char text[64];
        snprintf(text, sizeof text, host_is_ipv6(o->host) ? "[::1]:%.32s" : "127.0.0.1:%.32s",
                 innode);
        return read_host_port(o, "innode-prefill-ports", text, err);
    }
    o->serves_directory = !redis &&
                          (o->role == ROLE_PREFILL || config_is_set(c, "engine-worker-queue-port"));
    return OK;
}

/* The first rank listens for the others with its cluster port. */
static enum status take_cluster_port(struct node_options *o, uint16_t port, const char *option,
                                     struct err *err)
{
    if (o->cluster_port && o->cluster_port != port)
        return err_field(err, ERR_CONFIG, "pd-comm-port",
                         "rank 0 listens for the other ranks with its cluster port: "
                         "--pd-comm-port %u and --%s %u must be the same",
                         o->cluster_port, option, port);
    o->cluster_port = port;
    return OK;
}

/* vLLM's own names stand for what is best here. */
static const char *backend_of(const char *name)
{
    return strcmp(name, "shm") == 0 ? "shm" : strcmp(name, "ucx") == 0 ? "ucx" : NULL;
}

static enum dtype row_type_of(const char *name)
{
    return strcmp(name, "bf16") == 0  ? DTYPE_BF16
           : strcmp(name, "fp8") == 0 ? DTYPE_F8_E4M3
                                      : DTYPE_F32;
}

/* A rank's part of a list of names: the first ranks have the first name. */
static uint64_t domain_of(const char *names, uint32_t rank, uint32_t size)
{
    struct str left = str_of(names), name = { 0 };
    uint32_t n = 1;
    for (size_t i = 0; i < left.n; i++) n += left.p[i] == ',';
    for (uint32_t i = 0; i <= (uint64_t)rank * n / size; i++) (void)str_split(&left, ',', &name);
    return name.n ? hash_64(name.p, name.n, 0) : 0;
}

/* Each rank of a node has a folder of its own, and its share of the room. */
static void divide_disk(struct node_options *o)
{
    char folder[RANK_FOLDER_MAX];
    struct tier_disk_options *d = &o->tiers.disk;
    if (o->tp.size < 2 || !d->folder) return;
    rank_folder(d->folder, o->tp.rank, o->tp.size, folder);
    d->folder = dup_in(o, folder);
    d->bytes /= o->tp.size;
}

/* The ranks that share the attention; they share the experts as well, all of the group or those of
 * the node. */
static enum status read_group(const struct config *c, struct node_options *o, struct err *err)
{
    struct ranks r;
    TRY(node_balance_read(c, &o->balance, err));
    o->group.rows = row_type_of(config_string(c, "ep-row-type"));
    TRY(ranks_read(c, 0, &r, err));
    if (r.kind != RANKS_ONE) return OK;
    o->tp.size = r.tp.size;
    o->tp.rank = r.tp.rank;
    o->tp.host = dup_in(o, r.tp.host);
    o->tp.port = r.tp.port;
    divide_disk(o);
    if (r.tp.rank == 0 && r.tp.size > 1)
        TRY(take_cluster_port(o, r.tp.port, "tensor-parallel-port", err));
    o->group.host = r.experts ? dup_in(o, r.host) : o->tp.host;
    o->group.port = r.experts ? r.port : o->tp.port;
    o->group.backend = backend_of(config_string(c, "all2all-backend"));
    o->group.size = r.experts ? r.size * r.tp.size : r.tp.size;
    o->group.rank = r.rank * r.tp.size + r.tp.rank;
    o->group.first = r.first * r.tp.size;
    o->group.n_local = r.n_local * r.tp.size;
    o->group.domain = domain_of(config_string(c, "memory-domain"), o->group.rank, o->group.size);
    if (o->group.rank > 0 || !r.experts) return OK;
    if (r.tp.size > 1 && r.tp.port != r.port)
        return err_field(err, ERR_CONFIG, "tensor-parallel-port",
                         "the first rank of all listens for others with its cluster port: "
                         "--tensor-parallel-port %u and --data-parallel-rpc-port %u must be the "
                         "same",
                         r.tp.port, r.port);
    return take_cluster_port(o, r.port, "data-parallel-rpc-port", err);
}

/* A rank that follows the first of its node has no port of the API, and is in no directory. Lists
 * of ports, but --rdma-comm-ports, are of nodes. */
static void follow_first(struct node_options *o)
{
    if (o->tp.size < 2 || o->tp.rank == 0) return;
    o->cluster_port = o->kv_port = o->control_port = 0;
    o->http = o->serves_directory = false;
    o->directory = "local";
}

static enum status read_cluster(const struct config *c, struct node_options *o, struct err *err)
{
    TRY(read_role(c, o, err));
    TRY(node_options_secret(c, &o->arena, &o->secret, err));
    TRY(read_protocols(c, o, err));
    TRY(port_of(c, "engine-worker-queue-port", &o->control_port, err));
    TRY(port_of(c, "pd-comm-port", &o->cluster_port, err));
    TRY(port_of(c, "cache-queue-port", &o->kv_port, err));
    TRY(node_options_tuning(&o->tuning, err));
    TRY(entry_of(c, "rdma-comm-ports", ranks_local_process(c), &o->tuning.rdma.port, err));
    TRY(read_directory(c, o, err));
    TRY(read_addresses(c, o, err));
    o->kv_checksum = config_bool(c, "kv-checksum");
    TRY(read_group(c, o, err));
    follow_first(o);
    return OK;
}

/* ---- HTTP ---- */

static enum status read_tenants(const struct config *c, struct tenants *t, struct err *err)
{
    const char *file = config_string(c, "api-keys-file");
    size_t n = 0;
    tenants_init(t);
    config_list(c, "api-key", 0, &n);
    for (size_t i = 0; i < n; i++) TRY(tenants_add_key(t, config_list(c, "api-key", i, NULL), err));
    return file ? tenants_read(t, file, err) : OK;
}

static enum status read_port(const struct config *c, struct node_options *o, struct err *err)
{
    const int64_t port = config_int(c, "port");
    o->api = port >= 0;
    o->port = o->api ? (uint16_t)port : 0;
    if (o->api || o->grpc_port) return OK;
    return err_field(err, ERR_CONFIG, "port",
                     "%s is -1, no HTTP API, and without --grpc-port (SERVICE_GRPC_PORT) clients "
                     "have no other: give one of the two ports",
                     config_source_text(c, "port"));
}

/* `name` has a port that none of `others` has. 0 is any free one. */
static enum status check_own_port(const struct config *c, const char *name,
                                  const char *const *others, size_t n, struct err *err)
{
    const int64_t port = config_int(c, name);
    for (size_t i = 0; port && i < n; i++)
        if (config_int(c, others[i]) == port)
            return err_field(
                err, ERR_CONFIG, name, "%s and %s are both %lld; give each a port of its own",
                config_source_text(c, name), config_source_text(c, others[i]), (long long)port);
    return OK;
}

/* gRPC is another protocol, and probes must not meet the answers of another port. */
static enum status read_health(const struct config *c, struct node_options *o, struct err *err)
{
    static const char *const OTHERS[] = { "port", "metrics-port", "grpc-port" };
    TRY(check_own_port(c, "grpc-port", OTHERS, 2, err));
    TRY(check_own_port(c, "health-port", OTHERS, COUNT_OF(OTHERS), err));
    o->health_port = (uint16_t)config_int(c, "health-port");
    o->hang_ms = (uint32_t)config_int(c, "check-health-interval") * 1000;
    return OK;
}

static enum status read_http(const struct config *c, struct node_options *o, struct err *err)
{
    int64_t max_size = config_int(c, "scheduler-max-size");
    o->http = true;
    TRY(read_host(c, o, "host", &o->host, err));
    o->metrics_port = (uint16_t)config_int(c, "metrics-port");
    o->grpc_port = (uint16_t)config_int(c, "grpc-port");
    TRY(read_port(c, o, err));
    TRY(read_health(c, o, err));
    o->http_limits = HTTP_LIMITS_DEFAULT;
    o->http_limits.n_connections = (uint32_t)config_int(c, "max-connections");
    o->http_limits.n_client_connections = (uint32_t)config_int(c, "max-connections-per-client");
    o->http_limits.n_client_requests = (uint32_t)config_int(c, "max-requests-per-client");
    o->http_limits.answers_bytes = (size_t)config_int(c, "answer-memory") << 20;
    o->http_limits.large_bodies_bytes = (size_t)config_int(c, "large-body-memory") << 20;
    o->max_requests = (uint32_t)(max_size > 0 ? max_size : config_int(c, "max-concurrency"));
    o->shutdown_s = (uint32_t)config_int(c, "drain-timeout");
    o->log_requests = config_bool(c, "log-requests");
    o->pass_requests = config_bool(c, "pass-requests");
    return read_tenants(c, &o->tenants, err);
}

enum status node_options_log(const struct config *c, const char *file_name, struct err *err)
{
    static const struct {
        const char *name;
        enum log_level level;
    } levels[] = {
        { "error", LOG_ERROR }, { "warn", LOG_WARN }, { "info", LOG_INFO }, { "debug", LOG_DEBUG }
    };
    const struct log_file_options file = {
        .dir = config_string(c, "log-dir"),
        .name = file_name,
        .max_bytes = (uint64_t)config_int(c, "log-max-mib") << 20,
        .n_old = (unsigned)config_int(c, "log-files"),
    };
    for (size_t i = 0; i < COUNT_OF(levels); i++)
        if (str_eq_c(str_of(config_string(c, "log-level")), levels[i].name))
            log_set_level(levels[i].level);
    if (!file.dir) return OK;
    if (log_set_file(&file) != OK)
        return err_field(err, ERR_CONFIG, "log-dir", "--log-dir %s cannot be written", file.dir);
    log_set_console(config_bool(c, "log-to-console"));
    log_reopen_on_hangup();
    return OK;
}

static enum status read_but_model(const struct config *c, struct node_options *o, struct err *err)
{
    TRY(read_parsers(c, o, err));
    TRY(read_engine(c, o, err));
    TRY(read_pace(c, o, err));
    TRY(read_http(c, o, err));
    return read_cluster(c, o, err);
}

/* Without a secret rank 0 listens on loopback only. */
static enum status check_reach(const struct node_options *o, struct err *err)
{
    if (o->group.size < 2 || o->secret.n || host_is_loopback(o->group.host)) return OK;
    return err_field(err, ERR_CONFIG, "cluster-secret-file",
                     "the ranks meet at %s, and without a cluster secret ports between nodes stay "
                     "on loopback: give all the same BATON_CLUSTER_SECRET or "
                     "--cluster-secret-file, or on one host let them meet at %s",
                     o->group.host, host_loopback(o->group.host));
}

enum status node_options_read(const struct config *c, struct node_options *out, struct err *err)
{
    *out = (struct node_options){ 0 };
    arena_init(&out->arena);
    TRY(read_but_model(c, out, err));
    TRY(read_model(c, out, err));
    return check_reach(out, err);
}

enum status node_options_check_read(const struct config *c, struct node_options *out,
                                    struct err *err)
{
    *out = (struct node_options){ 0 };
    arena_init(&out->arena);
    TRY(read_but_model(c, out, err));
    if (config_is_set(c, "model")) TRY(read_model(c, out, err));
    return check_reach(out, err);
}

void node_options_print_notes(const struct node_options *o)
{
    if (o->notes.len) fwrite(o->notes.data, 1, o->notes.len, stderr);
}

void node_options_release(struct node_options *o)
{
    buf_release(&o->notes);
    addresses_release(&o->listed);
    tenants_release(&o->tenants);
    arena_release(&o->arena);
}

/* ---- the start page ---- */

static void line(struct buf *out, const char *what, const char *value, const char *source)
{
    buf_printf(out, "  %-12s %s%s%s%s\n", what, value, source ? "   (" : "", source ? source : "",
               source ? ")" : "");
}

static void print_port(struct buf *out, const struct config *c, const char *what, const char *host,
                       uint16_t port, const char *option)
{
    char text[HOST_PORT_TEXT_MAX];
    if (port) host_port_text(host, port, text);
    else snprintf(text, sizeof text, "%s, any free port", host);
    line(out, what, text, config_source_text(c, option));
}

static void print_directory(const struct node_options *o, const struct config *c, struct buf *out)
{
    char at[HOST_PORT_TEXT_MAX], server[REDIS_SERVER_TEXT_MAX], text[sizeof server + 64];
    if (str_eq_c(str_of(o->directory), "redis"))
        snprintf(text, sizeof text, "in Redis at %s db %d%s", redis_server_text(&o->redis, server),
                 o->redis.db, o->redis.tls ? " over TLS" : "");
    else if (str_eq_c(str_of(o->directory), "http"))
        snprintf(text, sizeof text, "held by %s",
                 host_port_text(o->directory_host, o->directory_port, at));
    else
        snprintf(text, sizeof text, "in this process%s",
                 o->serves_directory ? "; others may register on the control port" : "");
    line(out, "cluster view", text, config_source_text(c, "scheduler-name"));
    if (o->serves_directory)
        print_port(out, c, "control", o->cluster_host, o->control_port, "engine-worker-queue-port");
}

static void print_tiers(const struct node_options *o, const struct config *c, struct buf *out)
{
    const struct kv_store_options *t = &o->tiers;
    char text[512];
    if (t->host_bytes) {
        snprintf(text, sizeof text, "%.1f GiB of host memory, as %s%s",
                 (double)t->host_bytes / (1 << 30), kv_rows_name(t->slot_dtype),
                 o->tp.size > 1 ? ", on each rank of the node" : "");
        line(out, "KV behind it", text, config_source_text(c, "swap-space"));
    }
    if (t->disk.folder) {
        snprintf(text, sizeof text, "%.1f GiB in %.400s, as %s", (double)t->disk.bytes / (1 << 30),
                 t->disk.folder, kv_rows_name(t->slot_dtype));
        line(out, "KV on disk", text, config_source_text(c, "kv-cache-dir"));
    }
}

/* What bounds a request and where it is computed. */
static void print_compute(const struct node_options *o, const struct config *c, struct buf *out)
{
    char text[256], features[128];
    kernel_cpu_features(features, sizeof features);
    snprintf(text, sizeof text,
             "%u tokens of context, %u sequences, %u tokens per step, blocks of %u",
             o->max_model_len, o->max_seqs, o->max_batched_tokens, o->block_tokens);
    line(out, "limits", text, config_source_text(c, "max-model-len"));
    snprintf(text, sizeof text, "%d threads, %s, activations %s; this CPU has %s", o->n_threads,
             o->cpu_isa, config_string(c, "activations"), features);
    line(out, "CPU", text, config_source_text(c, "cpu-isa"));
    if (o->pace_file) line(out, "paced by", o->pace_file, config_source_text(c, "pace"));
    line(out, "KV cache", kv_rows_name(o->kv_dtype), config_source_text(c, "kv-cache-dtype"));
    if (o->draft.ops) {
        snprintf(text, sizeof text, "%s, up to %u token%s", o->draft.ops->name, o->draft.n_tokens,
                 o->draft.n_tokens == 1 ? "" : "s");
        line(out, "drafts", text, draft_options_source(c));
    }
    print_tiers(o, c, out);
    line(out, "computes on",
         strcmp(o->device, "cuda") == 0 ? "the GPU (first of CUDA_VISIBLE_DEVICES)" : "the CPU",
         config_source_text(c, "device"));
}

void node_options_print_secret(struct str secret, struct buf *out)
{
    if (!secret.n)
        buf_add_c(out, "  no cluster secret (BATON_CLUSTER_SECRET): node-to-node ports stay on "
                       "loopback, so other hosts cannot join\n");
    else if (secret.n < SECRET_LEN_RECOMMENDED)
        buf_printf(out,
                   "  the cluster secret has %zu characters: whoever guesses it can join and read "
                   "KV; take %d random ones or more\n",
                   secret.n, SECRET_LEN_RECOMMENDED);
}

/* Who may use the node and who may join its cluster. */
static void print_security(const struct node_options *o, const struct config *c, struct buf *out)
{
    line(out, "API keys",
         o->tenants.n_keys ? "required" : "none: anyone who reaches the port may use it",
         config_source_text(c, config_is_set(c, "api-keys-file") ? "api-keys-file" : "api-key"));
    node_options_print_secret(o->secret, out);
}

void node_options_print(const struct node_options *o, const struct config *c, struct buf *out)
{
    buf_printf(out, "baton %s\n", BATON_VERSION);
    line(out, "model", o->model_path, config_source_text(c, "model"));
    if (o->dummy)
        line(out, "weights", "dummy: answers mean nothing", config_source_text(c, "load-format"));
    line(out, "role", node_role_name(o->role),
         config_source_text(c, config_is_set(c, "kv-transfer-config") ? "kv-transfer-config"
                                                                      : "splitwise-role"));
    line(out, "topic", o->topic, config_source_text(c, "scheduler-topic"));
    if (o->http && o->api) print_port(out, c, "API", o->host, o->port, "port");
    else if (o->http) line(out, "API", "no HTTP, gRPC alone", config_source_text(c, "port"));
    else line(out, "API", "none: requests come from the first process of the node", NULL);
    if (o->http && o->metrics_port)
        print_port(out, c, "metrics", o->host, o->metrics_port, "metrics-port");
    if (o->http && o->grpc_port) print_port(out, c, "gRPC", o->host, o->grpc_port, "grpc-port");
    if (o->http && o->health_port)
        print_port(out, c, "health", o->host, o->health_port, "health-port");
    print_port(out, c, "nodes", o->cluster_host, o->cluster_port, "pd-comm-port");
    print_port(out, c, "KV", o->cluster_host, o->kv_port, "cache-queue-port");
    if (config_is_set(c, "rdma-comm-ports"))
        print_port(out, c, "rdma", o->cluster_host, o->tuning.rdma.port, "rdma-comm-ports");
    line(out, "KV by", o->protocols, config_source_text(c, "cache-transfer-protocol"));
    print_directory(o, c, out);
    print_compute(o, c, out);
    print_security(o, c, out);
    config_print_variables(c, out);
    if (o->role == ROLE_MIXED &&
        (config_is_set(c, "rdma-comm-ports") || config_is_set(c, "pd-comm-port")))
        buf_add_c(out, "  note: ports for prefill/decode splitting were given, but the role is "
                       "mixed; was a line of the command lost?\n");
}
