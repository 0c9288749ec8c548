/* host_port.h - "host:port" as people write it: an IPv6 address stands in brackets, [::1]:8000.
 * Inside the program a host has no brackets. Thread: any. */
#ifndef BATON_BASE_ADDRESS_HOST_PORT_H
#define BATON_BASE_ADDRESS_HOST_PORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HOST_TEXT_MAX = 256, HOST_PORT_TEXT_MAX = HOST_TEXT_MAX + 8 };

/* Parses "host:port" with a port of 0 to 65,535; an empty host stays empty. False: it is not that,
 * or an IPv6 address without brackets, where nobody knows which colon is meant. */
bool host_port_parse(const char *text, char host[HOST_TEXT_MAX], uint16_t *port);
/* Copies a host, without brackets around it; false: it is too long. */
bool host_copy(const char *text, char out[HOST_TEXT_MAX]);
bool host_is_ipv6(const char *host); /* with or without brackets */
/* Is it an IP address, without brackets, and not a name? */
bool host_is_number(const char *host);
/* Is it this host by its number? A name that begins with 127 may lead anywhere. */
bool host_is_loopback(const char *host);
/* The addresses that mean this host, and all of its addresses, in the family of `host`. */
const char *host_loopback(const char *host);
const char *host_wildcard(const char *host);
bool host_is_wildcard(const char *host);
/* Writes host:port, with brackets where they are needed; returns `out`. */
const char *host_port_text(const char *host, uint16_t port, char out[HOST_PORT_TEXT_MAX]);

#endif
