/* measurement.h - one measurement: two probe servers, one transport, one piece size; and the
 * hardware limit to compare it with.
 *
 *   begin  OPEN on both, the hello to the receiver, its answer to the sender, CONNECT;
 *          this process relays the bytes
 *   round  EXPECT, SEND, TAKE; timed at the sender, by its own clock
 *   end    CLOSE on both
 *
 * Thread: main; calls block. */
#ifndef BATON_DEPLOY_PROBE_MEASUREMENT_H
#define BATON_DEPLOY_PROBE_MEASUREMENT_H

#include "deploy/probe/client.h"

struct measurement {
    struct probe_client *sender, *receiver;
    const char *sender_address, *receiver_address; /* listen here; "": the server chooses */
    char transport[PROBE_NAME_MAX];
    uint32_t piece_bytes, n_layers, n_blocks, copiers, connections;
    bool checksum, contiguous;
    /* after begin: bytes per second, 0: unknown */
    uint64_t link_speed;
    /* after a failure: the side that reported it, and the step */
    bool at_sender;
    enum probe_step step;
};

/* On failure both sides are CLOSEd and `err` has the server's sentence. */
enum status measurement_begin(struct measurement *p, struct err *err) MUST_CHECK;
void measurement_end(struct measurement *p);

struct measurement_round {
    uint64_t ns[PROBE_TRANSFERS_MAX]; /* per transfer: from open at the sender to acknowledgement */
    uint32_t n;
    uint64_t total_ns, n_bytes, cpu_ns; /* cpu_ns: of both processes; if one, once */
};
/* Runs n transfers of n_blocks blocks, one after the other. */
enum status measurement_run(struct measurement *p, uint32_t n, uint32_t n_blocks,
                            struct measurement_round *out, struct err *err) MUST_CHECK;

/* Rate in bytes per second at which the hardware moves `n_bytes` between the same two hosts without
 * the transport. *what gets the limit's name (static). */
enum status measurement_limit(struct measurement *p, uint64_t n_bytes, double *rate,
                              const char **what, struct err *err) MUST_CHECK;
/* One-way latencies p50, p99, p99.9 of the trusted tool, in ns; 0 where it reports none.
 * ERR_UNSUPPORTED: no such tool for this transport. */
enum status measurement_limit_latency(struct measurement *p, uint64_t ns[3], const char **what,
                                      struct err *err) MUST_CHECK;

#endif
