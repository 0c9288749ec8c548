/* scripts.h - the Lua scripts of the `redis` backend: one atomic step each (keys.h names the keys).
 *
 * All scripts: KEYS[1] is the topic's prefix, ARGV[1] the calling entry node, ARGV[2] lease_ms.
 * Work is bounded: a sweep removes at most 256 + 256 ended reservations per call, a snapshot reads
 * the nodes of one topic. Thread: any (constants). */
#ifndef BATON_SCHEDULER_DIRECTORY_SCRIPTS_H
#define BATON_SCHEDULER_DIRECTORY_SCRIPTS_H

/* Renews a node's record. ARGV[3..8] node, record, role, max_seqs, n_blocks, highest fence seen.
 * Returns 1, or 0 when the topic has its limit of nodes (ARGV[9]). */
extern const char DIRECTORY_SCRIPT_PUBLISH[];
/* Reads the live nodes. KEYS[2] the hash of topics; ARGV[3..7] topic, most topics, most nodes, most
 * bytes of a record, most bytes of all records. Returns { nodes, topics, refused }: nodes is a flat
 * list of id, record, tokens, seqs, blocks; topics a flat list of name, "end mixed prefill decode";
 * refused a flat list of id and bytes of records that are too long, or one too many: it names a few
 * of them. */
extern const char DIRECTORY_SCRIPT_SNAPSHOT[];
/* Counts a placement. ARGV[3..9] id, prefill (or decode again), decode, tokens, blocks, ttl_ms,
 * highest fence seen. Returns the fence as text, "busy" or "gone". */
extern const char DIRECTORY_SCRIPT_RESERVE[];
/* Takes reservations back: ARGV[3..] ids. Unknown ids are no error. Returns how many existed. */
extern const char DIRECTORY_SCRIPT_RELEASE[];
/* Removes a node's record: ARGV[3] node. Its placed load stays until it is released. */
extern const char DIRECTORY_SCRIPT_LEAVE[];

#endif
