/* scripts.h - the Lua scripts of the `redis` backend: one atomic step each (keys.h names the keys).
 *
 * All scripts: KEYS[1] is the topic's prefix, ARGV[1] the calling entry node, ARGV[2] lease_ms,
 * ARGV[3] how many ms ago, by the caller's monotonic clock, it sent the last call on this
 * connection that was answered; 0: none was.
 * Work is bounded: a sweep removes at most 256 + 256 ended reservations and 256 nodes per call, a
 * snapshot reads the nodes of one topic. Thread: any (constants). */
#ifndef BATON_SCHEDULER_DIRECTORY_REDIS_SCRIPTS_H
#define BATON_SCHEDULER_DIRECTORY_REDIS_SCRIPTS_H

/* Renews a node's record. ARGV[4..9] node, record, role, max_seqs, n_blocks, highest fence seen;
 * ARGV[11] its bid (redis_reserve.h). Returns 1, or 0 when the topic has its limit of nodes
 * (ARGV[10]). */
extern const char DIRECTORY_SCRIPT_PUBLISH[];
/* Reads the live nodes. KEYS[2] the hash of topics; ARGV[4..8] topic, most topics, most nodes, most
 * bytes of a record, most bytes of all records. Returns { nodes, topics, refused }: nodes is a flat
 * list of id, record, tokens, seqs, blocks; topics a flat list of name, "end mixed prefill decode";
 * refused a flat list of id and bytes of records that are too long, or one too many: it names a few
 * of them. */
extern const char DIRECTORY_SCRIPT_SNAPSHOT[];
/* Counts a placement. ARGV[4..10] id, prefill (or decode again), decode, tokens, blocks, ttl_ms,
 * highest fence seen; ARGV[11..15] a query, in binary, big endian: rungs of tag (4) and tokens (4),
 * terms (none: there is no query) of ns, blocks (4 each) and the choice's nodes (8 each; of one
 * twice), uses of kind (8) and flags (1), nodes to avoid (8), drops of node (8) and at_s (4);
 * ARGV[16..] the slot of each rung (2 bytes). Returns the fence as text, with a query a blank and
 * how it was placed behind it (prefix_text.h); "busy" or "gone". */
extern const char DIRECTORY_SCRIPT_RESERVE[];
/* Takes reservations back: ARGV[4] how many, ARGV[5..] their ids, and behind them ids whose prompts
 * were computed: their tokens are taken back. Unknown ids are no error. Returns how many of the
 * former existed. */
extern const char DIRECTORY_SCRIPT_RELEASE[];
/* Removes a node's record: ARGV[4] node. Its placed load stays until it is released. */
extern const char DIRECTORY_SCRIPT_LEAVE[];

/* Counts a report of meter.h, by its rules. ARGV[4..6] entry, number, "tenant requests tokens cost
 * running waiting;..."; ARGV[7..12] lease of an entry, after how many ms its number is forgotten,
 * ms of a slot, slots, most tenants, most entries. Returns { entries, least, "requests tokens
 * served running waiting" of each use, in order }, or what is full: "tenants" or "entries". */
extern const char DIRECTORY_SCRIPT_METER[];

#endif
