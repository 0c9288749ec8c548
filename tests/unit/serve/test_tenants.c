/* test_tenants.c - key files, and whose key is whose. */
#include "shared/serve/tenants.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/buf.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/serve/auth.h"
#include "tests/harness/test.h"

static uint32_t tenant_of(const struct tenants *t, const char *key)
{
    uint8_t hash[KEY_HASH_BYTES];
    uint32_t tenant = UINT32_MAX;
    sha256(key, strlen(key), hash);
    return tenants_find(t, hash, &tenant) ? tenant : UINT32_MAX;
}

TEST(without_a_file_there_is_one_tenant)
{
    struct tenants t;
    uint32_t tenant = 7;
    tenants_init(&t);
    CHECK_EQ_INT(t.n, 1);
    CHECK_EQ_STR(t.list[0].name, "default");
    CHECK(t.list[0].weight == 1 && t.list[0].class_ == TENANT_NORMAL && t.list[0].id);
    CHECK(auth_tenant(&t, STR(""), &tenant) && tenant == 0); /* no key is needed */
    CHECK_OK(tenants_add_key(&t, "sk-a", NULL));
    CHECK_OK(tenants_add_key(&t, "sk-a", NULL)); /* given twice */
    CHECK(t.n_keys == 1 && !auth_tenant(&t, STR(""), &tenant));
    CHECK(!auth_tenant(&t, STR("Bearer sk-b"), NULL));
    CHECK(auth_tenant(&t, STR("bearer  sk-a "), &tenant) && tenant == 0);
    CHECK_STATUS(tenants_add_key(&t, "", NULL), ERR_CONFIG);
    tenants_release(&t);
}

TEST(a_file_has_tenants_keys_and_limits)
{
    static const char text[] =
        "# who may use this\n"
        "\n"
        "alice  sk-alice   weight=4 class=high requests_per_minute=600 tokens_per_minute=200000\n"
        "\tbatch sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae\t"
        "class=low concurrent=8   # \"foo\"\r\n"
        "alice  sk-alice-2          # another key\n"
        "default sk-d weight=1000";
    struct tenants t;
    struct err err = { 0 };
    uint32_t tenant;
    tenants_init(&t);
    CHECK_OK(tenants_add_key(&t, "sk-0", NULL));
    if (tenants_parse(&t, str_of(text), "keys.txt", &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    CHECK(t.n == 3 && t.n_keys == 5);
    const struct tenant *d = &t.list[0], *a = &t.list[1], *b = &t.list[2];
    CHECK_EQ_STR(a->name, "alice");
    CHECK(a->weight == 4 && a->class_ == TENANT_HIGH && a->requests_per_minute == 600);
    CHECK(a->tokens_per_minute == 200000 && a->concurrent == 0);
    CHECK_EQ_STR(b->name, "batch");
    CHECK(b->weight == 1 && b->class_ == TENANT_LOW && b->concurrent == 8);
    CHECK(b->requests_per_minute == 0 && b->tokens_per_minute == 0);
    CHECK(d->weight == 1000 && a->id != b->id && a->id != d->id);
    CHECK_EQ_INT(tenant_of(&t, "sk-alice"), 1);
    CHECK_EQ_INT(tenant_of(&t, "sk-alice-2"), 1);
    CHECK_EQ_INT(tenant_of(&t, "foo"), 2);
    CHECK_EQ_INT(tenant_of(&t, "sk-0"), 0);
    CHECK_EQ_INT(tenant_of(&t, "sk-d"), 0);
    CHECK_EQ_INT(tenant_of(&t, "sk-nobody"), UINT32_MAX);
    CHECK(auth_tenant(&t, STR("Bearer foo"), &tenant) && tenant == 2);
    tenants_release(&t);
}

/* A tenant is the same at every entry node, in whatever order its file names it. */
TEST(ids_depend_on_names_alone)
{
    struct tenants t, u;
    tenants_init(&t);
    tenants_init(&u);
    CHECK_OK(tenants_parse(&t, STR("a k1\nb k2\n"), "f", NULL));
    CHECK_OK(tenants_parse(&u, STR("b k3\na k4\n"), "g", NULL));
    CHECK(t.list[1].id == u.list[2].id && t.list[2].id == u.list[1].id);
    tenants_release(&t);
    tenants_release(&u);
}

static const struct {
    const char *text, *says[4];
} FAULTS[] = {
    { "", { "has no key" } },
    { "# nothing\n\n", { "has no key" } },
    { "alice\n", { "line 1", "key is missing", "NAME KEY" } },
    { "ok k\n\nal ice weight=x\n", { "line 3", "weight is 'x'" } },
    { "a/b key\n", { "line 1", "name is 'a/b'", "letters, digits" } },
    { "a k weight=0\n", { "line 1", "weight is '0'", "from 1 to 1000" } },
    { "a k weight=2.5\n", { "weight is '2.5'", "whole number" } },
    { "a k\nb l class=gold\n", { "line 2", "class is 'gold'", "low, normal or high" } },
    { "a k requests_per_minute=-1\n", { "requests_per_minute is '-1'" } },
    { "a k tokens_per_minute=1e9\n", { "tokens_per_minute is '1e9'" } },
    { "a k concurrent=\n", { "concurrent is ''", "from 1 to 1000000" } },
    { "a k rpm=5\n", { "'rpm'", "requests_per_minute" } },
    { "a k weight\n", { "'weight'", "FIELD=VALUE" } },
    { "a k\na l weight=2\n", { "line 2", "'weight=2'", "first line of its tenant" } },
    { "a k\nb k\n", { "line 2", "already one of the tenant a", "once" } },
    { "a sha256:12\n", { "line 1", "64 hexadecimal digits" } },
};

TEST(a_fault_names_line_field_value_and_what_is_right)
{
    for (size_t i = 0; i < COUNT_OF(FAULTS); i++) {
        struct tenants t;
        struct err err = { 0 };
        tenants_init(&t);
        enum status st = tenants_parse(&t, str_of(FAULTS[i].text), "keys.txt", &err);
        CHECK_STATUS(st, ERR_CONFIG);
        CHECK_EQ_STR(err.field, "api-keys-file");
        CHECK(strstr(err.text, "keys.txt"));
        for (size_t k = 0; k < 4 && FAULTS[i].says[k]; k++)
            if (!strstr(err.text, FAULTS[i].says[k]))
                test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text,
                          FAULTS[i].says[k]);
        tenants_release(&t);
    }
}

TEST(there_are_bounds)
{
    struct buf b = { 0 };
    struct err err = { 0 };
    struct tenants t;
    for (int i = 0; i < TENANTS_MAX; i++) buf_printf(&b, "t%d k%d\n", i, i);
    tenants_init(&t);
    CHECK_STATUS(tenants_parse(&t, buf_str(&b), "f", &err), ERR_CONFIG); /* with "default" */
    CHECK(strstr(err.text, "line 256") && strstr(err.text, "256"));
    tenants_release(&t);
    buf_clear(&b);
    for (int i = 0; i <= TENANT_KEYS_MAX; i++) buf_printf(&b, "a k%d\n", i);
    tenants_init(&t);
    CHECK_STATUS(tenants_parse(&t, buf_str(&b), "f", &err), ERR_CONFIG);
    CHECK(strstr(err.text, "line 1025"));
    tenants_release(&t);
    buf_clear(&b);
    buf_add_c(&b, "a ");
    for (int i = 0; i <= TENANT_KEY_BYTES_MAX; i++) buf_add_char(&b, 'k');
    tenants_init(&t);
    CHECK_STATUS(tenants_parse(&t, buf_str(&b), "f", &err), ERR_CONFIG);
    tenants_release(&t);
    buf_release(&b);
}

TEST(a_file_that_cannot_be_read)
{
    struct tenants t;
    struct err err = { 0 };
    tenants_init(&t);
    CHECK_STATUS(tenants_read(&t, "/nowhere/keys", &err), ERR_CONFIG);
    CHECK(strstr(err.text, "/nowhere/keys") && strstr(err.text, "No such file"));
    CHECK_STATUS(tenants_read(&t, "/", &err), ERR_CONFIG);
    tenants_release(&t);
}

TEST_MAIN(CASE(without_a_file_there_is_one_tenant), CASE(a_file_has_tenants_keys_and_limits),
          CASE(ids_depend_on_names_alone), CASE(a_fault_names_line_field_value_and_what_is_right),
          CASE(there_are_bounds), CASE(a_file_that_cannot_be_read))
