/* test_numa.c - lists of CPUs as the kernel writes them, folders like /sys/devices/system/node, and
 * which node a thread belongs to. */
#include "kernels/host/numa.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

static int count(const char *list)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    return numa_cpu_list_read(list, &set) ? CPU_COUNT(&set) : -1;
}

TEST(lists)
{
    CHECK_EQ_INT(count(""), 0);
    CHECK_EQ_INT(count("\n"), 0);
    CHECK_EQ_INT(count("0\n"), 1);
    CHECK_EQ_INT(count("0-3,8,10-11\n"), 7);
    CHECK_EQ_INT(count("1000-999999"), CPU_SETSIZE - 1000);
    static const char *const bad[] = { "a",   "1-",   "-1",       "3-1",  "1 2",
                                       "1;2", "1,,2", "12345678", "1-x\n" };
    for (size_t i = 0; i < COUNT_OF(bad); i++) CHECK_EQ_INT(count(bad[i]), -1);
}

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

/* Makes a folder of nodes 0 to 2 with these CPUs each. */
static void make_folder(char *folder, const char *online, const char *const lists[3])
{
    strcpy(folder, "/tmp/baton-nodes-XXXXXX");
    CHECK(mkdtemp(folder));
    write_file(folder, "online", online);
    for (int i = 0; i < 3; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s/node%d", folder, i);
        CHECK(mkdir(name, 0700) == 0);
        snprintf(name, sizeof name, "node%d/cpulist", i);
        if (lists[i]) write_file(folder, name, lists[i]);
    }
}

static void remove_folder(const char *folder)
{
    char path[512];
    static const char *const names[] = { "node0/cpulist", "node1/cpulist", "node2/cpulist", "node0",
                                         "node1",         "node2",         "online",        "" };
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        remove(path);
    }
}

static int nodes_of(const char *online, const char *const lists[3], struct numa_nodes *out)
{
    char folder[64];
    make_folder(folder, online, lists);
    numa_nodes_read(folder, out);
    remove_folder(folder);
    return out->n;
}

TEST(folders)
{
    struct numa_nodes n;
    cpu_set_t mine;
    int first = 0;
    char own[32];
    CHECK(sched_getaffinity(0, sizeof mine, &mine) == 0);
    while (!CPU_ISSET((size_t)first, &mine)) first++;
    snprintf(own, sizeof own, "%d\n", first);
    /* the third has memory only */
    CHECK_EQ_INT(nodes_of("0-2\n", (const char *const[]){ own, own, "\n" }, &n), 2);
    CHECK(CPU_ISSET((size_t)first, &n.cpus[0]) && CPU_COUNT(&n.cpus[1]) == 1);
    CHECK_EQ_INT(nodes_of("0,2\n", (const char *const[]){ own, NULL, own }, &n), 2);
    /* nodes with CPUs that this process may not use */
    CHECK_EQ_INT(nodes_of("0-2\n", (const char *const[]){ own, "1020-1023\n", "1016-1019\n" }, &n),
                 1);
    /* a folder that cannot be parsed counts as one node */
    CHECK_EQ_INT(nodes_of("0-2\n", (const char *const[]){ own, NULL, own }, &n), 1);
    CHECK_EQ_INT(nodes_of("0-2\n", (const char *const[]){ own, "x", own }, &n), 1);
    CHECK_EQ_INT(nodes_of("", (const char *const[]){ own, own, own }, &n), 1);
    numa_nodes_read("/nonexistent", &n);
    CHECK_EQ_INT(n.n, 1);
    numa_nodes_read(NULL, &n);
    CHECK(n.n >= 1 && n.n <= NUMA_NODES_MAX);
}

TEST(threads_are_spread_as_cpus_are)
{
    struct numa_nodes n = { .n = 3 };
    numa_cpu_list_read("0-3", &n.cpus[0]);
    numa_cpu_list_read("4-5", &n.cpus[1]);
    numa_cpu_list_read("6-7", &n.cpus[2]);
    static const int of_eight[] = { 0, 0, 0, 0, 1, 1, 2, 2 }, of_four[] = { 0, 0, 1, 2 };
    for (int i = 0; i < 8; i++) CHECK_EQ_INT(numa_node_of_thread(&n, i, 8), of_eight[i]);
    for (int i = 0; i < 4; i++) CHECK_EQ_INT(numa_node_of_thread(&n, i, 4), of_four[i]);
    CHECK_EQ_INT(numa_node_of_thread(&n, 0, 1), 0);
    for (int i = 1, last = 0; i < 100; i++) { /* never back */
        int now = numa_node_of_thread(&n, i, 100);
        CHECK(now >= last && now < 3);
        last = now;
    }
}

TEST_MAIN(CASE(lists), CASE(folders), CASE(threads_are_spread_as_cpus_are))
