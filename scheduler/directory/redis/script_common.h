/* script_common.h - the functions with which each Lua script begins, since Redis has no modules for
 * scripts. For the files of this folder only. Thread: any (constants). */
#ifndef BATON_SCHEDULER_DIRECTORY_REDIS_SCRIPT_COMMON_H
#define BATON_SCHEDULER_DIRECTORY_REDIS_SCRIPT_COMMON_H

/* now     the topic's time in ms: it passes as the server's does, but does not jump with it
 * keep    lets a key live at least `ms` and a day more, at most three days
 * count   adds to a node's placed load; deletes it when nothing is placed
 * drop    ends one reservation
 * hear    renews the lease of the calling entry node
 * lapse   takes out the nodes whose lease has ended
 * sweep   ends what has expired
 * raise   raises the fence to at least `seen`
 * Each function costs time even if it is not called: SCRIPT_CLOCK has those before `count`.
 * Differences are written 0 - x, since HINCRBY refuses "-0".
 *
 * Somebody may set the wall clock of the server's host, and a replica that takes over has another
 * one. Leases and ends are therefore in the topic's own time, which the key `clock` keeps beside
 * the wall time of the last call. No more of it passes in a step than the caller has waited since
 * its last answer on this connection (with half a second for what waits on the way), and none when
 * the wall clock goes back; nor does any while Redis is away, or stands still. Keys expire by the
 * wall clock, but only a day after the scripts have no use for them. A script may leave `clock` as
 * it is for much less than that half second. */
#define SCRIPT_CLOCK                                                                               \
    "local P, lease, since = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3])\n"                      \
    "local DAY = 86400000\n"                                                                       \
    "local function keep(key, ms)\n"                                                               \
    "  if redis.call('PTTL', key) < ms + DAY then redis.call('PEXPIRE', key, ms + 2 * DAY) end\n"  \
    "end\n"                                                                                        \
    "local time = redis.call('TIME')\n"                                                            \
    "local wall = time[1] * 1000 + math.floor(time[2] / 1000)\n"                                   \
    "local now = wall\n"                                                                           \
    "local last, before = string.match(redis.call('GET', P .. 'clock') or '', '^(%d+) (%d+)$')\n"  \
    "if last then\n"                                                                               \
    "  local step = wall - last\n"                                                                 \
    "  if step > since + 500 then step = since end\n"                                              \
    "  now = before + math.max(step, 0)\n"                                                         \
    "end\n"

#define SCRIPT_CLOCK_SET                                                                           \
    "redis.call('SET', P .. 'clock', string.format('%.0f %.0f', wall, now), 'PX', 3 * DAY)\n"

#define SCRIPT_FUNCTIONS                                                                           \
    "local function count(node, tokens, seqs, blocks)\n"                                           \
    "  local key = P .. 'load:' .. node\n"                                                         \
    "  local t = redis.call('HINCRBY', key, 'tokens', tokens)\n"                                   \
    "  local s = redis.call('HINCRBY', key, 'seqs', seqs)\n"                                       \
    "  redis.call('HINCRBY', key, 'blocks', blocks)\n"                                             \
    "  if t <= 0 and s <= 0 then redis.call('DEL', key) end\n"                                     \
    "  return key\n"                                                                               \
    "end\n"                                                                                        \
    "local function drop(id)\n"                                                                    \
    "  local text = redis.call('HGET', P .. 'res', id)\n"                                          \
    "  redis.call('ZREM', P .. 'res_end', id)\n"                                                   \
    "  if not text then return 0 end\n"                                                            \
    "  redis.call('HDEL', P .. 'res', id)\n"                                                       \
    "  local p, d, t, b, o = string.match(text, '^(%x+) (%x+) (%d+) (%d+) (%x+)$')\n"              \
    "  if not p then return 0 end\n"                                                               \
    "  redis.call('SREM', P .. 'owned:' .. o, id)\n"                                               \
    "  count(p, 0 - t, 0, 0)\n"                                                                    \
    "  count(d, 0, -1, 0 - b)\n"                                                                   \
    "  return 1\n"                                                                                 \
    "end\n"                                                                                        \
    "local function hear()\n"                                                                      \
    "  local n = redis.call('ZADD', P .. 'owners', now + lease, ARGV[1])\n"                        \
    "  if n > 0 or now % 64 == 0 then keep(P .. 'owners', lease) end\n"                            \
    "end\n"                                                                                        \
    "local function lapse()\n"                                                                     \
    "  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'alive', '-inf', now, 'LIMIT', 0, "    \
    "256)) do\n"                                                                                   \
    "    redis.call('ZREM', P .. 'alive', id)\n"                                                   \
    "    redis.call('DEL', P .. 'node:' .. id)\n"                                                  \
    "    redis.call('HDEL', P .. 'bids', id)\n"                                                    \
    "  end\n"                                                                                      \
    "end\n"                                                                                        \
    "local function sweep()\n"                                                                     \
    "  local n = 0\n"                                                                              \
    "  lapse()\n"                                                                                  \
    "  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'res_end', '-inf', now, 'LIMIT', 0, "  \
    "256)) do n = n + drop(id) end\n"                                                              \
    "  for _, o in ipairs(redis.call('ZRANGEBYSCORE', P .. 'owners', '-inf', now, 'LIMIT', 0, "    \
    "1)) do\n"                                                                                     \
    "    for _, id in ipairs(redis.call('SPOP', P .. 'owned:' .. o, 256)) do n = n + drop(id) "    \
    "end\n"                                                                                        \
    "    if redis.call('SCARD', P .. 'owned:' .. o) == 0 then redis.call('ZREM', P .. 'owners', "  \
    "o) end\n"                                                                                     \
    "  end\n"                                                                                      \
    "  return n\n"                                                                                 \
    "end\n"                                                                                        \
    "local function raise(seen)\n"                                                                 \
    "  if tonumber(redis.call('GET', P .. 'fence') or '0') < tonumber(seen) then "                 \
    "redis.call('SET', P .. 'fence', seen) end\n"                                                  \
    "end\n"

#define SCRIPT_COMMON SCRIPT_CLOCK SCRIPT_CLOCK_SET SCRIPT_FUNCTIONS

#endif
