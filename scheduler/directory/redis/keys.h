/* keys.h - every Redis key of the directory. A topic's keys begin with "baton:{<topic>}:"; the
 * braces put them into one hash slot. Ids are 16 hex digits. docs/protocol.md lists the keys with
 * their types, contents and expiry.
 *
 * Scores that are times are the topic's own, which passes as Redis' TIME does but does not jump
 * with it (scripts.c); no clock of a node is looked at. When an entry node dies, its
 * reservations are dropped once its owner lease expires; if a release was lost, the reservation is
 * dropped when its ttl has passed; one that was lost with a server that failed over, when the lease
 * has passed of the name that the entry node had there. Everything but the fencing number may be
 * lost at any moment and comes back by renewals; the fencing number is raised above what callers
 * have seen.
 * LIMIT: Redis Cluster is not supported, since baton:topics is in another slot; one server or a
 * failover pair is. Needs Redis 5 (scripts that ask for TIME and write).
 * Thread: any (constants). */
#ifndef BATON_SCHEDULER_DIRECTORY_REDIS_KEYS_H
#define BATON_SCHEDULER_DIRECTORY_REDIS_KEYS_H

#define DIRECTORY_KEY_PREFIX "baton:{%s}:" /* printf: the topic */
#define DIRECTORY_KEY_TOPICS "baton:topics"

#endif
