/* test_host_port.c - "host:port" with and without brackets; ports that are taken. */
#include "shared/base/address/host_port.h"

#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shared/base/address/port.h"
#include "shared/base/mem.h"
#include "tests/fixtures/free_port.h"
#include "tests/harness/test.h"

TEST(host_port_is_parsed_and_written)
{
    static const struct {
        const char *text, *host;
        int port; /* -1: refused */
    } rows[] = {
        { "10.0.0.1:80", "10.0.0.1", 80 },
        { "node-7.example:65535", "node-7.example", 65535 },
        { "[::1]:9400", "::1", 9400 },
        { "[fe80::1%eth0]:1", "fe80::1%eth0", 1 },
        { ":0", "", 0 },
        { "::1:9400", NULL, -1 }, /* which colon? */
        { "::1", NULL, -1 },
        { "[::1]", NULL, -1 },
        { "host", NULL, -1 },
        { "host:", NULL, -1 },
        { "host:65536", NULL, -1 },
        { "host:-1", NULL, -1 },
        { "host:80x", NULL, -1 },
        { "", NULL, -1 },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        char host[HOST_TEXT_MAX], text[HOST_PORT_TEXT_MAX];
        uint16_t port;
        bool ok = host_port_parse(rows[i].text, host, &port);
        if (ok != (rows[i].port >= 0)) test_fail(__FILE__, __LINE__, "%s", rows[i].text);
        if (!ok) continue;
        CHECK_EQ_STR(host, rows[i].host);
        CHECK_EQ_INT(port, rows[i].port);
        CHECK_EQ_STR(host_port_text(host, port, text), rows[i].text);
    }
}

TEST(hosts_in_brackets_and_too_long_ones)
{
    char out[HOST_TEXT_MAX], long_host[400], at[420];
    CHECK(host_copy("[::]", out));
    CHECK_EQ_STR(out, "::");
    CHECK(host_copy("a.b", out));
    CHECK_EQ_STR(out, "a.b");
    memset(long_host, 'h', sizeof long_host - 1);
    long_host[sizeof long_host - 1] = 0;
    CHECK(!host_copy(long_host, out));
    snprintf(at, sizeof at, "%s:1", long_host);
    uint16_t port;
    CHECK(!host_port_parse(at, out, &port));
    CHECK_EQ_STR(host_loopback("::"), "::1");
    CHECK_EQ_STR(host_loopback("0.0.0.0"), "127.0.0.1");
    CHECK_EQ_STR(host_wildcard("[::1]"), "::");
    CHECK(host_is_number("::1") && host_is_number("10.0.0.1"));
    CHECK(!host_is_number("[::1]") && !host_is_number("localhost") && !host_is_number(""));
    CHECK(host_is_wildcard("::") && host_is_wildcard("0.0.0.0") && !host_is_wildcard("::1"));
}

static uint16_t bound_port(int fd)
{
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    CHECK(getsockname(fd, (struct sockaddr *)&a, &n) == 0);
    return ntohs(a.sin_port);
}

/* Starts a process that listens on host:port and ends when `until` is closed. */
static pid_t start_listener(const char *host, uint16_t port, int until[2])
{
    int ready[2];
    char byte;
    CHECK(pipe(until) == 0 && pipe(ready) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct err err = { 0 };
        int fd;
        close(until[1]);
        byte = port_hold(host, port, "--x", &fd, &err) == OK;
        if (write(ready[1], &byte, 1) == 1) (void)!read(until[0], &byte, 1);
        _exit(0);
    }
    close(until[0]);
    CHECK(read(ready[0], &byte, 1) == 1 && byte == 1);
    close(ready[0]);
    close(ready[1]);
    return pid;
}

static void end_listener(pid_t pid, const int until[2])
{
    close(until[1]);
    CHECK(waitpid(pid, NULL, 0) == pid);
}

static void check_conflict(const char *host, uint16_t port, pid_t owner)
{
    struct err err = { 0 };
    char process[64];
    int fd;
    CHECK_STATUS(port_hold(host, port, "--pd-comm-port", &fd, &err), ERR_CONFIG);
    CHECK_EQ_INT(fd, -1);
    snprintf(process, sizeof process, "in use by process %d (", (int)owner);
    if (!strstr(err.text, process) || !strstr(err.text, "(--pd-comm-port)"))
        test_fail(__FILE__, __LINE__, "%s, but process %d has it", err.text, (int)owner);
}

TEST(this_host_is_told_by_its_number)
{
    CHECK(host_is_loopback("127.0.0.1") && host_is_loopback("127.9.9.9") &&
          host_is_loopback("::1"));
    CHECK(!host_is_loopback("127.example.com") && !host_is_loopback("localhost"));
    CHECK(!host_is_loopback("10.0.0.127") && !host_is_loopback("::2") && !host_is_loopback(""));
}

TEST(ports_are_held_and_conflicts_name_the_process)
{
    struct err err = { 0 };
    int held, none, until[2];
    uint16_t port = free_port();
    pid_t pid = start_listener("127.0.0.1", port, until);
    check_conflict("127.0.0.1", port, pid);
    check_conflict("localhost", port, pid);
    check_conflict("0.0.0.0", port, pid);
    end_listener(pid, until);
    CHECK_OK(port_hold(NULL, port, "--x", &held, &err));
    CHECK_EQ_INT(bound_port(held), port);
    close(held);
    CHECK_OK(port_hold("127.0.0.1", 0, "--x", &none, &err));
    CHECK_EQ_INT(none, -1);
    CHECK_STATUS(port_hold("192.0.2.1", port, "--x", &none, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "this machine has no such address"));
}

/* Several processes may listen on one port, each on its own address. */
TEST(the_process_on_the_same_address_is_named)
{
    int until[2][2];
    uint16_t port = free_port();
    pid_t pids[2];
    for (int first = 1; first <= 2; first++) { /* in both orders */
        char hosts[2][16];
        for (int i = 0; i < 2; i++)
            snprintf(hosts[i], sizeof hosts[i], "127.0.0.%d", i == 0 ? first : 3 - first);
        for (int i = 0; i < 2; i++) pids[i] = start_listener(hosts[i], port, until[i]);
        for (int i = 0; i < 2; i++) check_conflict(hosts[i], port, pids[i]);
        for (int i = 1; i >= 0; i--) end_listener(pids[i], until[i]);
    }
    pids[0] = start_listener("0.0.0.0", port, until[0]);
    check_conflict("127.0.0.1", port, pids[0]);
    end_listener(pids[0], until[0]);
}

/* Nobody is told to stop the process that he starts. */
TEST(a_port_that_the_node_has_itself_is_another_options)
{
    struct err err = { 0 };
    int held, again;
    uint16_t port = free_port();
    CHECK_OK(port_hold("127.0.0.1", port, "--port", &held, &err));
    CHECK_STATUS(port_hold("127.0.0.1", port, "--pd-comm-port", &again, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "(--pd-comm-port): another port option of this node"));
    CHECK(!strstr(err.text, "stop it"));
    close(held);
}

TEST_MAIN(CASE(host_port_is_parsed_and_written), CASE(hosts_in_brackets_and_too_long_ones),
          CASE(this_host_is_told_by_its_number),
          CASE(ports_are_held_and_conflicts_name_the_process),
          CASE(the_process_on_the_same_address_is_named),
          CASE(a_port_that_the_node_has_itself_is_another_options))
