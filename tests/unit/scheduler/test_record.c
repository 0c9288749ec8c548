/* test_record.c - node records as JSON, ids, proofs and the text of topics. */
#include <stdio.h>
#include <string.h>

#include "scheduler/directory/proofs.h"
#include "scheduler/directory/wire.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static const struct node_record FULL = {
    .node = 0xfedcba9876543211u,
    .name = "a \"b\"\\",
    .topic = "default",
    .role = ROLE_DECODE,
    .host = "fe80::1",
    .cluster_port = 65535,
    .http_port = 1,
    .followers = { { 0x11, "10.0.0.7", 9000 }, { UINT64_MAX, "fe80::2%eth0", 65535 } },
    .n_followers = 2,
    .group = { "10.0.0.7:29550", 2, 8, (1ull << 53) - 2, true },
    .model = UINT64_MAX,
    .kv_type = "fp8_e4m3",
    .kv_lossy = true,
    .max_seqs = 1 << 20,
    .n_blocks = 1 << 30,
    .block_tokens = 64,
    .max_model_len = 131072,
    .draining = true,
    .n_running = 5,
    .n_waiting = 6,
    .n_requests = 11,
    .max_requests = 12,
    .resume_ms = 10000,
    .deterministic = true,
    .prefix_cache = true,
    .n_blocks_free = 7,
    .waiting_tokens = 1ull << 53,
    .prefill_tokens_per_s = 1 << 30,
    .step_us = 12345,
    .progress = (1ull << 53) - 1,
    .has_work = true,
    .placed_tokens = 99,
    .placed_seqs = 3,
    .placed_blocks = 1 << 30,
};

static enum status read_text(const char *json, struct node_record *out, struct err *err)
{
    static char rooms[2][RECORD_TEXT_MAX]; /* a test compares two records at most */
    static int last;
    *err = (struct err){ 0 };
    return node_record_read(str_of(json), rooms[last = 1 - last], out, err);
}

/* Writes a record whose identity has this text. */
static const char *around(const char *identity)
{
    static struct buf b;
    buf_clear(&b);
    buf_add_c(&b, "{\"identity\":");
    json_add_string(&b, str_of(identity));
    buf_add_char(&b, '}');
    return b.data;
}

TEST(a_record_reads_back_equal)
{
    struct buf b = { 0 };
    struct node_record r;
    struct err err = { 0 };
    node_record_write(&FULL, &b);
    if (read_text(b.data, &r, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", err.text, b.data);
    CHECK(r.node == FULL.node);
    CHECK(r.model == UINT64_MAX); /* a double would have rounded it */
    CHECK_EQ_STR(r.name, FULL.name);
    CHECK_EQ_STR(r.topic, FULL.topic);
    CHECK_EQ_STR(r.host, FULL.host);
    CHECK_EQ_INT(r.role, FULL.role);
    CHECK_EQ_INT(r.cluster_port, 65535);
    CHECK_EQ_INT(r.http_port, 1);
    CHECK_EQ_INT(r.n_followers, 2);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(r.followers[i].process == FULL.followers[i].process);
        CHECK_EQ_STR(r.followers[i].host, FULL.followers[i].host);
        CHECK_EQ_INT(r.followers[i].port, FULL.followers[i].port);
    }
    CHECK_EQ_STR(r.group.name, FULL.group.name);
    CHECK_EQ_INT(r.group.rank, 2);
    CHECK_EQ_INT(r.group.size, 8);
    CHECK_EQ_INT(r.group.epoch, (1ll << 53) - 2);
    CHECK(r.group.is_whole);
    CHECK_EQ_INT(r.max_seqs, FULL.max_seqs);
    CHECK_EQ_INT(r.n_blocks, FULL.n_blocks);
    CHECK_EQ_INT(r.block_tokens, 64);
    CHECK_EQ_INT(r.max_model_len, 131072);
    CHECK(r.draining && r.has_work);
    CHECK_EQ_INT(r.n_running, 5);
    CHECK_EQ_INT(r.n_waiting, 6);
    CHECK_EQ_INT(r.n_requests, 11);
    CHECK_EQ_INT(r.max_requests, 12);
    CHECK_EQ_INT(r.resume_ms, 10000);
    CHECK(r.deterministic && r.prefix_cache);
    CHECK_EQ_INT(r.n_blocks_free, 7);
    CHECK_EQ_INT(r.waiting_tokens, 1ll << 53);
    CHECK_EQ_INT(r.prefill_tokens_per_s, 1 << 30);
    CHECK_EQ_INT(r.step_us, 12345);
    CHECK_EQ_INT(r.progress, (1ll << 53) - 1);
    CHECK_EQ_INT(r.placed_tokens, 99);
    CHECK_EQ_INT(r.placed_seqs, 3);
    CHECK_EQ_INT(r.placed_blocks, 1 << 30);
    buf_release(&b);
}

TEST(a_long_record_is_refused_unread)
{
    struct node_record r, longest = FULL;
    struct err err = { 0 };
    struct buf b = { 0 };
    char names[][NODE_NAME_MAX] = { "", "", "" };
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        memset(names[i], '"', NODE_NAME_MAX - 1);
        names[i][NODE_NAME_MAX - 1] = 0;
    }
    memcpy(longest.name, names[0], NODE_NAME_MAX);
    memcpy(longest.model_name, names[1], NODE_NAME_MAX);
    memcpy(longest.precision, names[2], NODE_NAME_MAX);
    longest.n_served = RECORD_SERVED_MAX;
    node_record_write(&longest, &b);
    CHECK(b.len < 2600); /* room for what neighbouring versions add */
    CHECK_OK(read_text(b.data, &r, &err));
    CHECK_EQ_STR(r.name, names[0]);
    b.len--;
    buf_printf(&b, ",\"other\":\"%*s\"}", RECORD_TEXT_MAX, "");
    CHECK_STATUS(read_text(b.data, &r, &err), ERR_TOO_LONG);
    CHECK(strstr(err.text, "a node record has at most 4096"));
    /* From a directory server a record comes within a longer text. */
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "identity", b.data);
    CHECK_STATUS(node_record_from_json(o, &r, &err), ERR_TOO_LONG);
    cJSON_Delete(o);
    buf_release(&b);
}

TEST(quantities_above_what_json_keeps_are_cut)
{
    struct node_record r = FULL;
    struct buf b = { 0 };
    struct err err;
    r.waiting_tokens = UINT64_MAX;
    node_record_write(&r, &b);
    CHECK_OK(read_text(b.data, &r, &err));
    CHECK_EQ_INT(r.waiting_tokens, 1ll << 53);
    buf_release(&b);
}

TEST(every_field_is_checked)
{
    static const struct {
        const char *json, *field;
    } bad[] = {
        { "{\"topic\":\"t\",\"role\":\"mixed\"}", "node" },
        { "{\"node\":\"0000000000000000\",\"topic\":\"t\",\"role\":\"mixed\"}", "node" },
        { "{\"node\":\"1\",\"topic\":\"t\",\"role\":\"mixed\"}", "node" },
        { "{\"node\":\"00000000000000001\",\"topic\":\"t\",\"role\":\"mixed\"}", "node" },
        { "{\"node\":\"000000000000000 1\",\"topic\":\"t\",\"role\":\"mixed\"}", "node" },
        { "{\"node\":17,\"topic\":\"t\",\"role\":\"mixed\"}", "node" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"model\":"
          "\"zz00000000000000\"}",
          "model" },
        { "{\"node\":\"0000000000000001\",\"role\":\"mixed\"}", "topic" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"\",\"role\":\"mixed\"}", "topic" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"a b\",\"role\":\"mixed\"}", "topic" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"{x}\",\"role\":\"mixed\"}", "topic" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\"}", "role" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"MIXED\"}", "role" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"cluster_port\":"
          "65536}",
          "cluster_port" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"max_seqs\":-1}",
          "max_seqs" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"n_blocks\":1e10}",
          "n_blocks" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"host\":\"a\\nb\"}",
          "host" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"served\":\"a\"}",
          "served" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"served\":[\"1\"]}",
          "served" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"served\":[0,0,0,0,0,"
          "0,"
          "0,0,0,0,0,0,0,0,0,0,0]}",
          "served" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"name\":"
          "\"0123456789012345678901234567890123456789012345678901234567890123\"}",
          "name" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"group\":\"g:1\","
          "\"group_rank\":2,\"group_size\":2}",
          "group_rank" },
        { "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",\"group_size\":-1}",
          "group_size" },
    };
    static const struct {
        const char *members, *field;
    } bad_load[] = {
        { "\"progress\":1e17", "progress" },
        { "\"n_running\":1.5", "n_running" },
        { "\"prefill_tokens_per_s\":1073741825", "prefill_tokens_per_s" },
        { "\"step_us\":-1", "step_us" },
        { "\"draining\":1", "draining" },
        { "\"group_whole\":1", "group_whole" },
        { "\"proof\":\"0123456789abcdef0123456789abcdef0\"", "proof" },
    };
    struct node_record r = { .node = 42 };
    struct err err;
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        if (read_text(around(bad[i].json), &r, &err) != ERR_INVALID)
            test_fail(__FILE__, __LINE__, "taken: %s", bad[i].json);
        CHECK_EQ_STR(err.field, bad[i].field);
        CHECK(err.text[0]);
    }
    for (size_t i = 0; i < COUNT_OF(bad_load); i++) {
        struct buf b = { 0 };
        buf_add_c(&b, around("{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\"}"));
        CHECK_OK(read_text(b.data, &(struct node_record){ 0 }, &err));
        b.len--;
        buf_printf(&b, ",%s}", bad_load[i].members);
        CHECK_STATUS(read_text(b.data, &r, &err), ERR_INVALID);
        CHECK_EQ_STR(err.field, bad_load[i].field);
        buf_release(&b);
    }
    CHECK_STATUS(read_text(around("[1]"), &r, &err), ERR_INVALID);
    CHECK_STATUS(read_text(around("{\"node\":"), &r, &err), ERR_FORMAT);
    CHECK_STATUS(read_text("{\"identity\":{}}", &r, &err), ERR_INVALID);
    CHECK_STATUS(read_text("{}", &r, &err), ERR_INVALID);
    CHECK_EQ_STR(err.text, "a node record needs identity, the text of a JSON object");
    CHECK_STATUS(read_text("[1]", &r, &err), ERR_FORMAT);
    CHECK_STATUS(read_text("", &r, &err), ERR_FORMAT);
    CHECK_STATUS(read_text("{\"node\":", &r, &err), ERR_FORMAT);
    CHECK_EQ_INT(r.node, 42); /* outputs only on success */
}

TEST(served_names_are_kept_as_hashes_and_proven)
{
    static const char *const names[] = { "llama-3", "a name of more than 64 bytes, with blanks and "
                                                    "\"quotes\", that no fixed text would hold" };
    const char *many[RECORD_SERVED_MAX + 1];
    struct node_record r = FULL, back;
    struct buf b = { 0 };
    struct err err;
    node_record_set_served(&r, names, COUNT_OF(names));
    node_record_prove(&r, STR("ours"));
    node_record_write(&r, &b);
    CHECK_OK(read_text(b.data, &back, &err));
    CHECK_EQ_INT(back.n_served, 2);
    CHECK(node_record_serves(&back, str_of(names[0])) &&
          node_record_serves(&back, str_of(names[1])));
    CHECK(!node_record_serves(&back, STR("llama-2")) && !node_record_serves(&back, STR("")));
    CHECK(!node_record_serves(&FULL, STR("llama-3")));
    CHECK(node_record_is_proven(&back, STR("ours"), ""));
    char *served = strstr(b.data, "served") +
                   13; /* who forges it would draw requests to the node */
    *served = *served == '0' ? '1' : '0';
    CHECK_OK(read_text(b.data, &back, &err));
    CHECK(!node_record_serves(&back, str_of(names[0])));
    CHECK(!node_record_is_proven(&back, STR("ours"), ""));
    for (size_t i = 0; i < COUNT_OF(many); i++) many[i] = names[0];
    node_record_set_served(&r, many, COUNT_OF(many));
    CHECK_EQ_INT(r.n_served, RECORD_SERVED_MAX);
    r.n_served = RECORD_SERVED_MAX;
    buf_clear(&b);
    node_record_write(&r, &b);
    CHECK_OK(read_text(b.data, &back, &err));
    buf_release(&b);
}

TEST(unknown_members_are_ignored)
{
    struct node_record r;
    struct err err;
    CHECK_OK(read_text(around("{\"node\":\"00000000000000AB\",\"topic\":\"t\",\"role\":\"prefill\","
                              "\"colour\":[1,2],\"max_seqs\":null}"),
                       &r, &err));
    CHECK_EQ_INT(r.node, 0xab);
    CHECK_EQ_INT(r.max_seqs, 0);
    CHECK_EQ_INT(r.role, ROLE_PREFILL);
}

/* Nodes of earlier versions say nothing of groups, and do not know the members. */
TEST(a_record_without_a_group_has_none)
{
    struct node_record r, alone = FULL;
    struct buf b = { 0 };
    struct err err;
    CHECK_OK(read_text(around("{\"node\":\"00000000000000AB\",\"topic\":\"t\",\"role\":\"mixed\"}"),
                       &r, &err));
    CHECK_EQ_STR(r.group.name, "");
    CHECK(r.group.size == 0 && r.group.epoch == 0 && !r.group.is_whole);
    alone.group = (struct node_group){ 0 };
    node_record_write(&alone, &b);
    CHECK(!strstr(b.data, "group"));
    buf_clear(&b);
    node_record_show(&FULL, &b); /* for people: /cluster */
    CHECK(strstr(b.data, "\"group\":\"10.0.0.7:29550\",\"group_rank\":2,\"group_size\":8"));
    CHECK(strstr(b.data, "\"group_epoch\":9007199254740990,\"group_whole\":true"));
    buf_release(&b);
}

TEST(a_proof_depends_on_every_part)
{
    char a[DIRECTORY_PROOF_MAX], b[DIRECTORY_PROOF_MAX];
    directory_prove(STR("s"), "POST", STR("/p"), STR("body"), a);
    CHECK_EQ_INT(strlen(a), 6 + 64);
    CHECK(strncmp(a, "Baton ", 6) == 0);
    directory_prove(STR("s"), "POST", STR("/p"), STR("body"), b);
    CHECK_EQ_STR(a, b);
    directory_prove(STR("t"), "POST", STR("/p"), STR("body"), b);
    CHECK(strcmp(a, b) != 0);
    directory_prove(STR("s"), "GET", STR("/p"), STR("body"), b);
    CHECK(strcmp(a, b) != 0);
    directory_prove(STR("s"), "POST", STR("/q"), STR("body"), b);
    CHECK(strcmp(a, b) != 0);
    directory_prove(STR("s"), "POST", STR("/p"), STR("bodY"), b);
    CHECK(strcmp(a, b) != 0);
}

TEST(topics_are_listed_with_their_roles)
{
    struct directory_topic t[DIRECTORY_TOPICS_MAX];
    char text[512], small[40];
    size_t n = 0;
    directory_topics_write(t, n, text, sizeof text);
    CHECK_EQ_STR(text, "");
    directory_topics_add(t, &n, "test", ROLE_PREFILL, 1);
    directory_topics_add(t, &n, "default", ROLE_MIXED, 1);
    directory_topics_add(t, &n, "both", ROLE_DECODE, 2);
    directory_topics_add(t, &n, "both", ROLE_MIXED, 1);
    directory_topics_write(t, n, text, sizeof text);
    CHECK_EQ_STR(
        text, "both (0 prefill, 2 decode, 1 mixed), default (1 mixed), test (1 prefill, 0 decode)");
    directory_topics_write(t, n, small, sizeof small);
    CHECK_EQ_STR(small, "...");
    for (int i = 0; i < 30; i++) {
        char name[NODE_NAME_MAX];
        memset(name, 'a' + i % 26, sizeof name - 1);
        name[sizeof name - 1] = 0;
        directory_topics_add(t, &n, name, ROLE_MIXED, 1);
    }
    CHECK_EQ_INT(n, DIRECTORY_TOPICS_MAX);
    directory_topics_write(t, n, text, sizeof text);
    CHECK(strlen(text) < sizeof text);
    CHECK(str_ends(str_of(text), ", ..."));
}

TEST(a_record_is_proven_by_the_secret)
{
    struct node_record r = FULL, back;
    struct buf b = { 0 };
    struct err err;
    const struct str ours = STR("ours"), theirs = STR("theirs"), none = { 0 };
    node_record_prove(&r, ours);
    CHECK_EQ_INT(strlen(r.proof), RECORD_PROOF_MAX - 1);
    node_record_write(&r, &b);
    CHECK_OK(read_text(b.data, &back, &err));
    CHECK(node_record_is_proven(&back, ours, "") && !node_record_is_proven(&back, none, ""));
    CHECK(!node_record_is_proven(&back, theirs, ""));
    /* Load changes all the time, addresses do not. */
    back.n_running++;
    back.draining = !back.draining;
    CHECK(node_record_is_proven(&back, ours, ""));
    node_record_prove(&back, none);
    CHECK_EQ_STR(back.proof, "");
    CHECK(!node_record_is_proven(&back, ours, ""));
    buf_release(&b);
}

/* Replaces the first `from` of a record's text, of the same length, and reads it. */
static void forge(struct buf *text, const char *from, const char *to, struct node_record *out)
{
    struct err err;
    char *at = strstr(text->data, from);
    CHECK(at && strlen(from) == strlen(to));
    memcpy(at, to, strlen(to));
    CHECK_OK(read_text(text->data, out, &err));
}

TEST(all_that_does_not_change_is_proven)
{
    static const char *const rows[][2] = {
        { "\\\"http_port\\\":1,", "\\\"http_port\\\":2," },
        { "fe80::1", "fe80::2" },
        { "max_seqs\\\":1048576", "max_seqs\\\":1048575" },
        { "n_blocks\\\":1073741824", "n_blocks\\\":1073741823" },
        { "block_tokens\\\":64", "block_tokens\\\":16" },
        { "max_model_len\\\":131072", "max_model_len\\\":131073" },
        { "max_requests\\\":12", "max_requests\\\":13" },
        { "deterministic\\\":true", "deterministic\\\":null" },
        { "prefix_cache\\\":true", "prefix_cache\\\":null" },
        { "kv_lossy\\\":true", "kv_lossy\\\":null" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct node_record r = FULL, back;
        struct buf b = { 0 };
        struct err err;
        node_record_prove(&r, STR("ours"));
        node_record_write(&r, &b);
        CHECK_OK(read_text(b.data, &back, &err));
        CHECK(node_record_is_proven(&back, STR("ours"), ""));
        forge(&b, rows[i][0], rows[i][1], &back);
        if (node_record_is_proven(&back, STR("ours"), ""))
            test_fail(__FILE__, __LINE__, "%s may become %s", rows[i][0], rows[i][1]);
        buf_release(&b);
    }
}

/* A node of a newer version has more to say; what this version does not know is passed on and
 * proven all the same. */
TEST(members_of_newer_versions_are_passed_on_and_proven)
{
    static char newer[] = "{\"node\":\"0000000000000001\", \"topic\":\"t\",\"role\":\"mixed\","
                          "\"trust\":\"low \u00e4\"}";
    struct node_record r = { .identity = str_of(newer) }, back, again;
    struct buf b = { 0 }, proof = { 0 };
    struct err err;
    uint8_t mac[32];
    buf_printf(&proof, "baton record identity\n%s", newer);
    hmac_sha256("ours", 4, proof.data, proof.len, mac);
    for (size_t i = 0; i < 16; i++) snprintf(r.proof + 2 * i, 3, "%02x", mac[i]);
    node_record_write(&r, &b);
    CHECK_OK(read_text(b.data, &back, &err));
    CHECK(str_eq_c(back.identity, newer));
    CHECK(node_record_is_proven(&back, STR("ours"), ""));
    buf_clear(&b);
    node_record_write(&back, &b); /* as the directory server does */
    CHECK_OK(read_text(b.data, &again, &err));
    CHECK(str_eq_c(again.identity, newer));
    CHECK(node_record_is_proven(&again, STR("ours"), ""));
    forge(&b, "low", "top", &back);
    CHECK(!node_record_is_proven(&back, STR("ours"), ""));
    buf_release(&b);
    buf_release(&proof);
}

TEST(a_record_of_an_earlier_version_is_refused_with_the_reason)
{
    struct node_record r;
    struct err err;
    CHECK_STATUS(read_text("{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\","
                           "\"proof\":\"0123456789abcdef0123456789abcdef\"}",
                           &r, &err),
                 ERR_INVALID);
    CHECK_EQ_STR(err.text, "it has the form of an earlier version, whose proof leaves members out; "
                           "give all nodes of the cluster the same version");
}

TEST(people_are_shown_a_record_without_its_proof)
{
    struct node_record r = FULL;
    struct buf b = { 0 };
    cJSON *o = NULL;
    node_record_prove(&r, STR("ours"));
    node_record_show(&r, &b);
    CHECK_OK(json_parse(buf_str(&b), true, &o, NULL));
    CHECK(json_member(o, "name") && json_member(o, "max_requests") && json_member(o, "n_running"));
    CHECK(!json_member(o, "identity") && !json_member(o, "proof"));
    cJSON_Delete(o);
    buf_release(&b);
}

/* A snapshot of n records, read from their texts. */
struct read_snapshot {
    struct node_record nodes[3];
    char rooms[3][RECORD_TEXT_MAX];
};

static void take_snapshot(struct read_snapshot *s, struct buf *texts, size_t n)
{
    for (size_t i = 0; i < n; i++)
        CHECK_OK(node_record_read(buf_str(&texts[i]), s->rooms[i], &s->nodes[i], NULL));
}

TEST(verdicts_are_kept_from_snapshot_to_snapshot)
{
    static struct read_snapshot s;
    struct buf texts[3] = { { 0 } };
    struct proofs p = { 0 };
    struct node_record bad;
    const struct str ours = STR("ours");
    for (size_t i = 0; i < 3; i++) {
        struct node_record r = FULL;
        r.node = i + 1;
        node_record_prove(&r, i == 1 ? STR("theirs") : ours);
        node_record_write(&r, &texts[i]);
    }
    for (int k = 0; k < 3; k++) {
        take_snapshot(&s, texts, 3);
        CHECK_EQ_INT(proofs_keep_proven(&p, ours, "", s.nodes, 3, &bad), 2);
        CHECK_EQ_INT(s.nodes[0].node, 1);
        CHECK_EQ_INT(s.nodes[1].node, 3);
        CHECK_EQ_INT(bad.node, 2);
        CHECK_EQ_INT(s.nodes[1].identity.n, 0); /* it ends with the snapshot */
        CHECK_EQ_INT(p.n_computed, 3);
    }
    /* Another proof, or another byte, is another record. */
    *(strstr(texts[0].data, "fe80::1") + 6) = '2';
    take_snapshot(&s, texts, 1);
    CHECK_EQ_INT(proofs_keep_proven(&p, ours, "", s.nodes, 1, &bad), 0);
    CHECK_EQ_INT(p.n_computed, 4);
    CHECK_EQ_INT(p.verdicts.len, 1); /* no more than the snapshot had */
    *(strstr(texts[0].data, "fe80::2") + 6) = '1';
    take_snapshot(&s, texts, 1);
    CHECK_EQ_INT(proofs_keep_proven(&p, ours, "", s.nodes, 1, &bad), 1);
    CHECK_EQ_INT(bad.node, 0);
    char *proof = strstr(texts[0].data, "\"proof\":\"") + 9;
    *proof = *proof == '0' ? '1' : '0';
    take_snapshot(&s, texts, 1);
    CHECK_EQ_INT(proofs_keep_proven(&p, ours, "", s.nodes, 1, &bad), 0);
    proofs_release(&p);
    for (size_t i = 0; i < 3; i++) buf_release(&texts[i]);
}

/* Whoever can write to the directory could name an address of their own. */
TEST(without_a_secret_only_records_of_this_host_are_taken)
{
    static const struct {
        const char *host, *own;
        bool taken;
    } rows[] = {
        { "127.0.0.1", "", true },         { "127.8.9.1", "", true },  { "::1", "", true },
        { "10.0.0.5", "10.0.0.5", true }, /* --advertise-host */
        { "10.0.0.6", "10.0.0.5", false }, { "10.0.0.5", "", false },  { "", "", false },
        { "127.evil.example", "", false }, { "localhost", "", false }, { "fe80::1", "", false },
    };
    const struct str none = { 0 };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct node_record r = FULL;
        r.n_followers = 0;
        snprintf(r.host, sizeof r.host, "%s", rows[i].host);
        if (node_record_is_proven(&r, none, rows[i].own) != rows[i].taken)
            test_fail(__FILE__, __LINE__, "%s, own %s", rows[i].host, rows[i].own);
        node_record_prove(&r, STR("ours")); /* with a secret the address does not matter */
        CHECK(node_record_is_proven(&r, STR("ours"), rows[i].own));
    }
}

TEST(texts_that_terminals_or_shells_would_obey_are_refused)
{
    static const char *const rows[][2] = {
        { "\"name\":\"\xC2\x9B"
          "31mred\"",
          "name contains a control character" },
        { "\"name\":\"\xE2\x80\xAE"
          "dlrow\"",
          "name contains a control character" },
        { "\"host\":\"x;reboot #\"", "host is not a name or an address" },
        { "\"host\":\"a b\"", "host is not a name or an address" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct buf b = { 0 };
        struct node_record r;
        struct err err;
        buf_printf(&b, "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\",%s}",
                   rows[i][0]);
        CHECK(read_text(around(b.data), &r, &err) == ERR_INVALID);
        CHECK_EQ_STR(err.text, rows[i][1]);
        buf_release(&b);
    }
    struct node_record r;
    struct err err;
    CHECK_OK(read_text(around("{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\","
                              "\"name\":\"\u00e4\u65e5\",\"host\":\"fe80::1%eth0\"}"),
                       &r, &err));
}

TEST(followers_are_checked)
{
    static const char *const wrong[] = {
        "7",
        "[7]",
        "[\"0000000000000011\"]",
        "[\"0000000000000011 9000\"]",
        "[\"0000000000000011 9000 \"]",
        "[\"0000000000000011 0 host\"]",
        "[\"0000000000000011 65536 host\"]",
        "[\"0000000000000011 -1 host\"]",
        "[\"0000000000000000 9000 host\"]",
        "[\"000000000000001x 9000 host\"]",
        "[\"0000000000000011 9000 a;b\"]",
    };
    struct node_record r;
    struct err err;
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        char text[256];
        snprintf(text, sizeof text,
                 "{\"node\":\"0000000000000001\",\"topic\":\"t\",\"role\":\"mixed\","
                 "\"followers\":%s}",
                 wrong[i]);
        CHECK_STATUS(read_text(around(text), &r, &err), ERR_INVALID);
        CHECK_EQ_STR(err.field, "followers");
    }
}

/* Without a secret a record must not lead to another host, by its followers neither. */
TEST(followers_elsewhere_are_not_proven)
{
    struct node_record r = { .node = 1, .host = "127.0.0.1", .n_followers = 1 };
    snprintf(r.followers[0].host, sizeof r.followers[0].host, "127.0.0.1");
    CHECK(node_record_is_proven(&r, STR(""), ""));
    snprintf(r.followers[0].host, sizeof r.followers[0].host, "10.0.0.7");
    CHECK(!node_record_is_proven(&r, STR(""), ""));
    CHECK(node_record_is_proven(&r, STR(""), "10.0.0.7"));
}

TEST_MAIN(CASE(a_record_reads_back_equal), CASE(a_record_is_proven_by_the_secret),
          CASE(all_that_does_not_change_is_proven),
          CASE(members_of_newer_versions_are_passed_on_and_proven),
          CASE(a_record_of_an_earlier_version_is_refused_with_the_reason),
          CASE(people_are_shown_a_record_without_its_proof),
          CASE(verdicts_are_kept_from_snapshot_to_snapshot),
          CASE(without_a_secret_only_records_of_this_host_are_taken),
          CASE(texts_that_terminals_or_shells_would_obey_are_refused),
          CASE(a_long_record_is_refused_unread), CASE(quantities_above_what_json_keeps_are_cut),
          CASE(every_field_is_checked), CASE(served_names_are_kept_as_hashes_and_proven),
          CASE(unknown_members_are_ignored), CASE(a_record_without_a_group_has_none),
          CASE(a_proof_depends_on_every_part), CASE(topics_are_listed_with_their_roles),
          CASE(followers_are_checked), CASE(followers_elsewhere_are_not_proven))
