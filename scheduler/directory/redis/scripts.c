/* scripts.c - see scripts.h. Each script begins with the shared functions, since Redis has no
 * modules for scripts. */
#include "scheduler/directory/redis/scripts.h"

/* now     the topic's time in ms: it passes as the server's does, but does not jump with it
 * keep    lets a key live at least `ms` and a day more, at most three days
 * count   adds to a node's placed load; deletes it when nothing is placed
 * drop    ends one reservation
 * hear    renews the lease of the calling entry node
 * lapse   takes out the nodes whose lease has ended
 * sweep   ends what has expired
 * raise   raises the fence to at least `seen`
 * Differences are written 0 - x, since HINCRBY refuses "-0".
 *
 * Somebody may set the wall clock of the server's host, and a replica that takes over has another
 * one. Leases and ends are therefore in the topic's own time, which the key `clock` keeps beside
 * the wall time of the last call. No more of it passes in a step than the caller has waited since
 * its last answer on this connection (with half a second for what waits on the way), and none when
 * the wall clock goes back; nor does any while Redis is away, or stands still. Keys expire by the
 * wall clock, but only a day after the scripts have no use for them. */
#define COMMON                                                                                     \
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
    "end\n"                                                                                        \
    "redis.call('SET', P .. 'clock', string.format('%.0f %.0f', wall, now), 'PX', 3 * DAY)\n"      \
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
    "  redis.call('ZADD', P .. 'owners', now + lease, ARGV[1])\n"                                  \
    "  keep(P .. 'owners', lease)\n"                                                               \
    "end\n"                                                                                        \
    "local function lapse()\n"                                                                     \
    "  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'alive', '-inf', now, 'LIMIT', 0, "    \
    "256)) do\n"                                                                                   \
    "    redis.call('ZREM', P .. 'alive', id)\n"                                                   \
    "    redis.call('DEL', P .. 'node:' .. id)\n"                                                  \
    "  end\n"                                                                                      \
    "end\n"                                                                                        \
    "local function sweep()\n"                                                                     \
    "  lapse()\n"                                                                                  \
    "  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'res_end', '-inf', now, 'LIMIT', 0, "  \
    "256)) do drop(id) end\n"                                                                      \
    "  for _, o in ipairs(redis.call('ZRANGEBYSCORE', P .. 'owners', '-inf', now, 'LIMIT', 0, "    \
    "1)) do\n"                                                                                     \
    "    for _, id in ipairs(redis.call('SPOP', P .. 'owned:' .. o, 256)) do drop(id) end\n"       \
    "    if redis.call('SCARD', P .. 'owned:' .. o) == 0 then redis.call('ZREM', P .. 'owners', "  \
    "o) end\n"                                                                                     \
    "  end\n"                                                                                      \
    "end\n"                                                                                        \
    "local function raise(seen)\n"                                                                 \
    "  if tonumber(redis.call('GET', P .. 'fence') or '0') < tonumber(seen) then "                 \
    "redis.call('SET', P .. 'fence', seen) end\n"                                                  \
    "end\n"

/* The number of ids is bounded. */
const char DIRECTORY_SCRIPT_PUBLISH[] = COMMON
    "hear()\n"
    "lapse()\n"
    "raise(ARGV[9])\n"
    "local alive, key = P .. 'alive', P .. 'node:' .. ARGV[4]\n"
    "if redis.call('ZCARD', alive) >= tonumber(ARGV[10]) and not redis.call('ZSCORE', alive, "
    "ARGV[4]) then return 0 end\n"
    "redis.call('ZADD', alive, now + lease, ARGV[4])\n"
    "keep(alive, lease)\n"
    "redis.call('HSET', key, 'record', ARGV[5], 'role', ARGV[6], 'max_seqs', ARGV[7], 'n_blocks', "
    "ARGV[8])\n"
    "keep(key, lease)\n"
    "return 1\n";

/* A snapshot of a topic writes the topic's field in the hash of topics; the field is valid for one
 * lease. Topics have no time in common, so that is by the wall clock, and an end that lies further
 * ahead than any lease is of before the clock went back. Whoever can write to the server can make a
 * field of hundreds of megabytes, which all nodes would then be sent each second: so lengths are
 * asked for first, and nothing long leaves the server. */
const char DIRECTORY_SCRIPT_SNAPSHOT[] = COMMON
    "hear()\n"
    "sweep()\n"
    "local nodes, topics, refused = {}, {}, {}\n"
    "local record_max, bytes_left = tonumber(ARGV[7]), tonumber(ARGV[8])\n"
    "local function load_of(id)\n"
    "  local key = P .. 'load:' .. id\n"
    "  for _, field in ipairs({ 'tokens', 'seqs', 'blocks' }) do\n"
    "    if redis.call('HSTRLEN', key, field) > 20 then redis.call('HDEL', key, field) end\n"
    "  end\n"
    "  local load = redis.call('HMGET', key, 'tokens', 'seqs', 'blocks')\n"
    "  return load[1] or '0', load[2] or '0', load[3] or '0'\n"
    "end\n"
    "local roles = { mixed = 0, prefill = 0, decode = 0 }\n"
    "local n = 0\n"
    "for _, id in ipairs(redis.call('ZRANGE', P .. 'alive', 0, ARGV[6] - 1)) do\n"
    "  local key = P .. 'node:' .. id\n"
    "  local size = redis.call('HSTRLEN', key, 'record')\n"
    "  local all = #id + size + redis.call('HSTRLEN', key, 'role')\n"
    "  if size == 0 then\n"
    "    redis.call('ZREM', P .. 'alive', id)\n"
    "  elseif all > record_max or all > bytes_left then\n"
    "    if #refused < 16 then\n"
    "      refused[#refused + 1] = string.sub(id, 1, 32)\n"
    "      refused[#refused + 1] = string.format('%.0f', all)\n"
    "    end\n"
    "  else\n"
    "    local node = redis.call('HMGET', key, 'record', 'role')\n"
    "    nodes[n + 1], nodes[n + 2] = id, node[1]\n"
    "    nodes[n + 3], nodes[n + 4], nodes[n + 5] = load_of(id)\n"
    "    n = n + 5\n"
    "    bytes_left = bytes_left - all\n"
    "    if roles[node[2]] then roles[node[2]] = roles[node[2]] + 1 end\n"
    "  end\n"
    "end\n"
    "local counts = string.format('%d %d %d', roles.mixed, roles.prefill, roles.decode)\n"
    "local function set_topic(topic, text)\n"
    "  redis.call('HSET', KEYS[2], topic, string.format('%.0f %s', wall + lease, text))\n"
    "end\n"
    "if n == 0 then\n"
    "  redis.call('HDEL', KEYS[2], ARGV[4])\n"
    "elseif redis.call('HLEN', KEYS[2]) < tonumber(ARGV[5]) or redis.call('HEXISTS', KEYS[2], "
    "ARGV[4]) == 1 then\n"
    "  set_topic(ARGV[4], counts)\n"
    "  keep(KEYS[2], lease)\n"
    "end\n"
    "for _, topic in ipairs(redis.call('HKEYS', KEYS[2])) do\n"
    "  local short = #topic <= 64 and redis.call('HSTRLEN', KEYS[2], topic) <= 64\n"
    "  local text = short and redis.call('HGET', KEYS[2], topic) or ''\n"
    "  local ends, rest = string.match(text, '^(%d+) (.*)$')\n"
    "  ends = tonumber(ends) or 0\n"
    "  if ends <= wall then\n"
    "    redis.call('HDEL', KEYS[2], topic)\n"
    "  elseif #topics < 2 * ARGV[5] then\n"
    "    if ends > wall + 10 * lease then set_topic(topic, rest) end\n"
    "    topics[#topics + 1] = topic\n"
    "    topics[#topics + 1] = text\n"
    "  end\n"
    "end\n"
    "return { nodes, topics, refused }\n";

/* Both nodes are checked and counted in one step, so that two entry nodes cannot both take the last
 * place. */
const char DIRECTORY_SCRIPT_RESERVE[] = COMMON
    "local id, p, d, tokens, blocks, ttl = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], "
    "tonumber(ARGV[9])\n"
    "hear()\n"
    "sweep()\n"
    "drop(id)\n"
    "local limits = redis.call('HMGET', P .. 'node:' .. d, 'max_seqs', 'n_blocks')\n"
    "if not limits[1] or redis.call('EXISTS', P .. 'node:' .. p) == 0 then return 'gone' end\n"
    "local load = redis.call('HMGET', P .. 'load:' .. d, 'seqs', 'blocks')\n"
    "local seqs, placed = tonumber(load[1] or '0'), tonumber(load[2] or '0')\n"
    "if seqs >= tonumber(limits[1]) or placed + blocks > tonumber(limits[2]) then return 'busy' "
    "end\n"
    "raise(ARGV[10])\n"
    "local fence = redis.call('INCR', P .. 'fence')\n"
    "redis.call('HSET', P .. 'res', id, table.concat({ p, d, tokens, blocks, ARGV[1] }, ' '))\n"
    "redis.call('ZADD', P .. 'res_end', now + ttl, id)\n"
    "redis.call('SADD', P .. 'owned:' .. ARGV[1], id)\n"
    "keep(P .. 'res', ttl)\n"
    "keep(P .. 'res_end', ttl)\n"
    "keep(P .. 'owned:' .. ARGV[1], ttl)\n"
    "keep(count(d, 0, 1, blocks), ttl)\n"
    "keep(count(p, tokens, 0, 0), ttl)\n"
    "return string.format('%.0f', fence)\n";

const char DIRECTORY_SCRIPT_RELEASE[] = COMMON "hear()\n"
                                               "local n = 0\n"
                                               "for i = 4, #ARGV do n = n + drop(ARGV[i]) end\n"
                                               "return n\n";

const char DIRECTORY_SCRIPT_LEAVE[] = COMMON "redis.call('ZREM', P .. 'alive', ARGV[4])\n"
                                             "return redis.call('DEL', P .. 'node:' .. ARGV[4])\n";

/* Reports of meter.h. All of a topic's is in the hash `meter`, so that it is lost as a whole, and
 * its entries' leases are in the zset `metered`; when the two do not fit together, or time went
 * back, both begin anew. Fields of `meter`, each of bounded length:
 *   topic       "newest slot, floor (meter_book.c), living entries, entries in `metered`"
 *   tenants     "id served requests tokens running waiting used;..."
 *   s<n>        of the slots that are n modulo their number the newest: "id requests tokens;..."
 *   e<entry>    "number id running waiting;...", what it told last
 * A score of `metered` is the end of the entry's lease, or 10^15 more when it has lapsed. */
const char DIRECTORY_SCRIPT_METER[] = COMMON
    "hear()\n"
    "local M, H, GONE, SUM = P .. 'meter', P .. 'metered', 1e15, 2 ^ 53\n"
    "local entry, number = ARGV[4], tonumber(ARGV[5])\n"
    "local entry_lease, forget, slot_ms = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])\n"
    "local slots, tenants_max, entries_max = tonumber(ARGV[10]), tonumber(ARGV[11]), "
    "tonumber(ARGV[12])\n"
    "local slot, n_tenants, tenants = math.floor(now / slot_ms), 0, {}\n"
    "local function whole(v) return string.format('%.0f', math.min(v, SUM)) end\n"
    "local function read(field)\n"
    "  if redis.call('HSTRLEN', M, field) > 128 * tenants_max then return '' end\n"
    "  return redis.call('HGET', M, field) or ''\n"
    "end\n"
    "local function ring(s) return 's' .. s % slots end\n"
    "local head = '^(%d+) (%d+) (%d+) (%d+)$'\n"
    "local newest, floor, living, known = string.match(read('topic'), head)\n"
    "if not newest or tonumber(newest) > slot or tonumber(known) ~= redis.call('ZCARD', H) then\n"
    "  redis.call('DEL', M, H)\n"
    "  newest, floor, living, known = slot, 0, 0, 0\n"
    "end\n"
    "newest, floor, living, known = tonumber(newest), tonumber(floor), tonumber(living), "
    "tonumber(known)\n"
    "local function add(id, served, requests, tokens, running, waiting, used)\n"
    "  n_tenants = n_tenants + 1\n"
    "  tenants[id] = { served = tonumber(served), requests = tonumber(requests), tokens = "
    "tonumber(tokens),\n"
    "    running = tonumber(running), waiting = tonumber(waiting), used = tonumber(used) }\n"
    "  return tenants[id]\n"
    "end\n"
    "local seven = '(%x+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+);'\n"
    "for a, b, c, d, e, f, g in string.gmatch(read('tenants'), seven) do add(a, b, c, d, e, f, g) "
    "end\n"
    "for s = math.max(newest + 1, slot - slots + 1), slot do\n"
    "  for id, requests, tokens in string.gmatch(read(ring(s)), '(%x+) (%d+) (%d+);') do\n"
    "    local t = tenants[id]\n"
    "    if t then\n"
    "      t.requests, t.tokens = math.max(t.requests - requests, 0), math.max(t.tokens - tokens, "
    "0)\n"
    "    end\n"
    "  end\n"
    "  redis.call('HDEL', M, ring(s))\n"
    "end\n"
    "local function release(held)\n"
    "  for id, running, waiting in string.gmatch(held, '(%x+) (%d+) (%d+);') do\n"
    "    local t = tenants[id]\n"
    "    if t then\n"
    "      t.running, t.waiting = math.max(t.running - running, 0), math.max(t.waiting - waiting, "
    "0)\n"
    "    end\n"
    "  end\n"
    "end\n"
    "local function number_of(held) return tonumber(string.match(held, '^(%d+) ')) or 0 end\n"
    "local function first(from, to, n)\n"
    "  return redis.call('ZRANGEBYSCORE', H, from, to, 'WITHSCORES', 'LIMIT', 0, n)\n"
    "end\n"
    "local function forget_entry(id)\n"
    "  redis.call('ZREM', H, id)\n"
    "  redis.call('HDEL', M, 'e' .. id)\n"
    "  known = known - 1\n"
    "end\n"
    "local lapsed = first('-inf', now, 256)\n"
    "for i = 1, #lapsed, 2 do\n"
    "  local held = read('e' .. lapsed[i])\n"
    "  release(held)\n"
    "  redis.call('HSET', M, 'e' .. lapsed[i], whole(number_of(held)) .. ' ')\n"
    "  redis.call('ZADD', H, whole(GONE + lapsed[i + 1]), lapsed[i])\n"
    "  living = living - 1\n"
    "end\n"
    "local over = first(whole(GONE), whole(GONE + now - forget), 256)\n"
    "for i = 1, #over, 2 do forget_entry(over[i]) end\n"
    "local uses, n_new, full = {}, 0, nil\n"
    "local six = '(%x+) (%d+) (%d+) (%d+) (%d+) (%d+);'\n"
    "for id, requests, tokens, cost, running, waiting in string.gmatch(ARGV[6], six) do\n"
    "  local u = { id = id, requests = tonumber(requests), tokens = tonumber(tokens),\n"
    "    cost = tonumber(cost), running = tonumber(running), waiting = tonumber(waiting) }\n"
    "  u.empty = u.requests + u.tokens + u.cost + u.running + u.waiting == 0\n"
    "  uses[#uses + 1] = u\n"
    "  if tenants[id] then tenants[id].named = true elseif not u.empty then n_new = n_new + 1 end\n"
    "end\n"
    "local function evict()\n"
    "  local oldest\n"
    "  for id, t in pairs(tenants) do\n"
    "    if not t.named and t.running + t.waiting + t.requests + t.tokens == 0\n"
    "      and (not oldest or t.used < tenants[oldest].used) then oldest = id end\n"
    "  end\n"
    "  if not oldest or now - tenants[oldest].used < slot_ms * (slots - 1) then return false end\n"
    "  tenants[oldest] = nil\n"
    "  n_tenants = n_tenants - 1\n"
    "  return true\n"
    "end\n"
    "while not full and n_tenants + n_new > tenants_max do\n"
    "  if not evict() then full = 'tenants' end\n"
    "end\n"
    "local score = tonumber(redis.call('ZSCORE', H, entry) or '0')\n"
    "if not full and (score == 0 or score >= GONE) then\n"
    "  if living >= entries_max then\n"
    "    full = 'entries'\n"
    "  else\n"
    "    if score == 0 then\n"
    "      if known >= entries_max then forget_entry(first(whole(GONE), '+inf', 1)[1]) end\n"
    "      known = known + 1\n"
    "    end\n"
    "    living = living + 1\n"
    "  end\n"
    "end\n"
    "local function use(t, u, now_used)\n"
    "  local most = 2 ^ 46\n"
    "  local requests = math.min(now_used.requests + u.requests, most)\n"
    "  local tokens = math.min(now_used.tokens + math.min(u.tokens, most), most)\n"
    "  t.requests = t.requests + requests - now_used.requests\n"
    "  t.tokens = t.tokens + tokens - now_used.tokens\n"
    "  now_used.requests, now_used.tokens = requests, tokens\n"
    "  t.served = math.min(t.served + math.min(u.cost, most), SUM)\n"
    "  t.used = now\n"
    "end\n"
    "local function count()\n"
    "  local current, out = {}, {}\n"
    "  for id, requests, tokens in string.gmatch(read(ring(slot)), '(%x+) (%d+) (%d+);') do\n"
    "    current[id] = { requests = tonumber(requests), tokens = tonumber(tokens) }\n"
    "  end\n"
    "  for _, u in ipairs(uses) do\n"
    "    if not u.empty then\n"
    "      local t = tenants[u.id] or add(u.id, 0, 0, 0, 0, 0, 0)\n"
    "      if t.running + t.waiting == 0 then t.served = math.max(t.served, floor) end\n"
    "      current[u.id] = current[u.id] or { requests = 0, tokens = 0 }\n"
    "      use(t, u, current[u.id])\n"
    "    end\n"
    "  end\n"
    "  for id, c in pairs(current) do\n"
    "    if c.requests + c.tokens > 0 then\n"
    "      out[#out + 1] = string.format('%s %.0f %.0f;', id, c.requests, c.tokens)\n"
    "    end\n"
    "  end\n"
    "  if #out > 0 then redis.call('HSET', M, ring(slot), table.concat(out)) end\n"
    "end\n"
    "local function hold(last)\n"
    "  local out = { whole(math.max(number, last)) .. ' ' }\n"
    "  for _, u in ipairs(uses) do\n"
    "    if u.running + u.waiting > 0 then\n"
    "      local t = tenants[u.id] or add(u.id, 0, 0, 0, 0, 0, 0)\n"
    "      t.running, t.waiting = t.running + u.running, t.waiting + u.waiting\n"
    "      out[#out + 1] = string.format('%s %.0f %.0f;', u.id, u.running, u.waiting)\n"
    "    end\n"
    "  end\n"
    "  redis.call('HSET', M, 'e' .. entry, table.concat(out))\n"
    "end\n"
    "if not full then\n"
    "  local held = read('e' .. entry)\n"
    "  local last = number_of(held)\n"
    "  if number > last then count() end\n"
    "  if number >= last then\n"
    "    release(held)\n"
    "    hold(last)\n"
    "  end\n"
    "  redis.call('ZADD', H, whole(now + entry_lease), entry)\n"
    "end\n"
    "local function least_served()\n"
    "  local least, most\n"
    "  for _, t in pairs(tenants) do\n"
    "    if t.running + t.waiting > 0 then least = math.min(least or t.served, t.served) end\n"
    "    most = math.max(most or 0, t.served)\n"
    "  end\n"
    "  return least, most or 0\n"
    "end\n"
    "local least, most = least_served()\n"
    "floor = math.max(floor, least or most)\n"
    "if floor > 2 ^ 52 then\n"
    "  for _, t in pairs(tenants) do t.served = math.max(t.served - floor, 0) end\n"
    "  floor = 0\n"
    "  least = least_served()\n"
    "end\n"
    "local out = {}\n"
    "for id, t in pairs(tenants) do\n"
    "  out[#out + 1] = string.format('%s %.0f %.0f %.0f %.0f %.0f %.0f;', id, t.served, "
    "t.requests,\n"
    "    t.tokens, t.running, t.waiting, t.used)\n"
    "end\n"
    "local topic = table.concat({ whole(slot), whole(floor), whole(living), whole(known) }, ' ')\n"
    "redis.call('HSET', M, 'topic', topic, 'tenants', table.concat(out))\n"
    "keep(M, forget)\n"
    "keep(H, forget)\n"
    "if full then return full end\n"
    "local sums = { whole(living), whole(least or 0) }\n"
    "local min, U32 = math.min, 4294967295\n"
    "for _, u in ipairs(uses) do\n"
    "  local t = tenants[u.id] or { requests = 0, tokens = 0, served = 0, running = 0, waiting = 0 "
    "}\n"
    "  sums[#sums + 1] = string.format('%.0f %.0f %.0f %.0f %.0f', min(t.requests, U32),\n"
    "    min(t.tokens, SUM), min(t.served, SUM), min(t.running, U32), min(t.waiting, U32))\n"
    "end\n"
    "return sums\n";
