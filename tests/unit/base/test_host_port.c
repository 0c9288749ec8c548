/* test_host_port.c - "host:port" with and without brackets; ports that are taken. */
#include "shared/base/address/host_port.h"

#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/address/port.h"
#include "shared/base/mem.h"
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
    CHECK(host_is_wildcard("::") && host_is_wildcard("0.0.0.0") && !host_is_wildcard("::1"));
}

static uint16_t bound_port(int fd)
{
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    CHECK(getsockname(fd, (struct sockaddr *)&a, &n) == 0);
    return ntohs(a.sin_port);
}

TEST(ports_are_held_and_conflicts_name_the_process)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    struct err err = { 0 };
    char process[64];
    int fd, held, again, none;
    fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(fd, (struct sockaddr *)&a, sizeof a) == 0);
    uint16_t port = bound_port(fd);
    close(fd);
    CHECK_OK(port_hold("127.0.0.1", port, "--x", &held, &err));
    CHECK_EQ_INT(bound_port(held), port);
    CHECK_STATUS(port_hold(NULL, port, "--pd-comm-port", &again, &err), ERR_CONFIG);
    CHECK_EQ_INT(again, -1);
    snprintf(process, sizeof process, "in use by process %d (", (int)getpid());
    CHECK(strstr(err.text, process));
    CHECK(strstr(err.text, "(--pd-comm-port)"));
    close(held);
    CHECK_OK(port_hold("127.0.0.1", port, "--x", &held, &err));
    close(held);
    CHECK_OK(port_hold("127.0.0.1", 0, "--x", &none, &err));
    CHECK_EQ_INT(none, -1);
    CHECK_STATUS(port_hold("192.0.2.1", port, "--x", &none, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "this machine has no such address"));
}

TEST_MAIN(CASE(host_port_is_parsed_and_written), CASE(hosts_in_brackets_and_too_long_ones),
          CASE(ports_are_held_and_conflicts_name_the_process))
