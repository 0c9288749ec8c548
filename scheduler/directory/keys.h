/* keys.h - every Redis key of the directory. All of a topic begin with the prefix
 * "baton:{<topic>}:", whose braces make them one hash slot; ids are 16 hex digits.
 *
 *   key               type    content                                            ends
 *   nodes             set     ids of nodes that published                        10 leases after the last publish; ids without a
 *                                                                                node: key are
 *                                                                                taken out by
 *                                                                                snapshot
 *   node:<id>         hash    record (JSON), role, max_seqs, n_blocks            lease_ms after the last publish (server side)
 *   load:<id>         hash    tokens, seqs, blocks placed on the node            with its last reservation; at the latest with res
 *   res               hash    reservation -> "prefill decode tokens blocks owner"  60 s after the longest ttl in it
 *   res_end           zset    reservation, score = its end, server time in ms    as res
 *   owners            zset    entry, score = end of its lease, server time in ms   10 leases after the last call
 *   owned:<owner>     set     reservations of that entry                         as res
 *   fence             string  the last fencing number, decimal                   never (one small number per topic)
 *   baton:topics      hash    topic -> "end mixed prefill decode", end in ms     10 leases after the last snapshot that saw a node;
 *                                                                                fields past their
 *                                                                                end are taken out
 *                                                                                by snapshot
 * Ends in scores are compared with Redis's own TIME only. The load of an entry that died goes with
 * its owner lease, that of a request whose release was lost with its ttl. Everything but fence can
 * be lost at any moment and comes back by renewals; fence is raised above what callers have seen.
 * LIMIT: Redis Cluster is not supported, because baton:topics is in another slot; one server, or a
 * failover pair of them, is. Needs Redis 5 or later (scripts that ask for TIME and write). */
#ifndef BATON_SCHEDULER_DIRECTORY_KEYS_H
#define BATON_SCHEDULER_DIRECTORY_KEYS_H

#define DIRECTORY_KEY_PREFIX "baton:{%s}:" /* printf: the topic */
#define DIRECTORY_KEY_TOPICS "baton:topics"

#endif
