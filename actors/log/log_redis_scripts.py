"""The Lua scripts of the log, which run in the Redis server; see ``actors.log.log_redis`` for the keys."""

from __future__ import annotations

# A stream holds the records of one kind under row numbers from a counter; a hash maps each id to its row. An example is
# an entry without data of its own: it gets its row when the second of forecast and finished request is written. A
# sorted set of the trace ids finds traces by the beginning of their ids.
WRITE = """
local examples, example_rows, last, trace_ids = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local partner, ids = {6, 5}, {[4] = trace_ids}
local max_rows = tonumber(ARGV[1])
local at = 6
local num_new = {0, 0, 0, 0}

local function append(stream, rows, id, ...)
    local row = string.format('%.0f', redis.call('HINCRBY', last, stream, 1))
    redis.call('XADD', stream, row .. '-0', 'id', id, ...)
    redis.call('HSET', rows, id, row)
end

for kind = 1, 4 do
    local stream, rows = KEYS[kind], KEYS[4 + kind]
    for _ = 1, tonumber(ARGV[1 + kind]) do
        local id, data = ARGV[at], ARGV[at + 1]
        at = at + 2
        if redis.call('HEXISTS', rows, id) == 0 then
            append(stream, rows, id, 'data', data)
            num_new[kind] = num_new[kind] + 1
            if ids[kind] then
                redis.call('ZADD', ids[kind], 0, id)
            end
            if partner[kind] and redis.call('HEXISTS', KEYS[partner[kind]], id) == 1 then
                append(examples, example_rows, id)
            end
        end
    end
    local surplus = redis.call('XLEN', stream) - max_rows
    if surplus > 0 then
        for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+', 'COUNT', surplus)) do
            local id = entry[2][2]
            redis.call('HDEL', rows, id)
            if ids[kind] then
                redis.call('ZREM', ids[kind], id)
            end
            local example = partner[kind] and redis.call('HGET', example_rows, id)
            if example then
                redis.call('XDEL', examples, example .. '-0')
                redis.call('HDEL', example_rows, id)
            end
        end
        redis.call('XTRIM', stream, 'MAXLEN', max_rows)
    end
end
return num_new
"""

READ = """
local found = {}
if ARGV[2] ~= '0' then
    found = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1] .. '-0', '+', 'COUNT', ARGV[2])
end
return {found, redis.call('HGET', KEYS[2], KEYS[1]) or '0'}
"""

READ_EXAMPLES = """
local forecasts, requests, forecast_rows, request_rows, examples, last = unpack(KEYS)

local function data(stream, rows, id)
    local row = redis.call('HGET', rows, id) .. '-0'
    return redis.call('XRANGE', stream, row, row)[1][2][4]
end

local found = {}
if ARGV[2] ~= '0' then
    for i, entry in ipairs(redis.call('XRANGE', examples, '(' .. ARGV[1] .. '-0', '+', 'COUNT', ARGV[2])) do
        local id = entry[2][2]
        found[i] = {entry[1], data(requests, request_rows, id), data(forecasts, forecast_rows, id)}
    end
end
return {found, redis.call('HGET', last, examples) or '0'}
"""

READ_TRACES = """
local stream, rows, ids = unpack(KEYS)
local found = {}
for i, id in ipairs(redis.call('ZRANGEBYLEX', ids, ARGV[1], ARGV[2])) do
    local row = redis.call('HGET', rows, id) .. '-0'
    found[i] = redis.call('XRANGE', stream, row, row)[1][2][4]
end
return found
"""

# One hash holds the description of each version and another its data, both under "kind:version"; a sorted set for each
# kind has the versions in order. The newest versions are kept, and the current one.
_PRUNE = """
local function prune(kind, versions, info, data, current, keep)
    local used = redis.call('HGET', current, kind)
    for _, version in ipairs(redis.call('ZREVRANGE', versions, keep, -1)) do
        if version ~= used then
            redis.call('ZREM', versions, version)
            redis.call('HDEL', info, kind .. ':' .. version)
            redis.call('HDEL', data, kind .. ':' .. version)
        end
    end
end
"""

PUT = f"""{_PRUNE}
local versions, info, data, current, last = unpack(KEYS)
local kind, version, new_info, new_data, keep = unpack(ARGV)
local field = kind .. ':' .. version
if redis.call('HGET', info, field) == new_info and redis.call('HGET', data, field) == new_data then
    return {{0, '0'}}
end
local last_version = redis.call('HGET', last, kind) or '0'
if tonumber(version) <= tonumber(last_version) then
    return {{-1, last_version}}
end
redis.call('HSET', last, kind, version)
redis.call('HSET', info, field, new_info)
redis.call('HSET', data, field, new_data)
redis.call('ZADD', versions, version, version)
prune(kind, versions, info, data, current, keep)
return {{1, version}}
"""

SET_CURRENT = f"""{_PRUNE}
local versions, info, data, current = unpack(KEYS)
local kind, version, keep = unpack(ARGV)
if redis.call('HEXISTS', info, kind .. ':' .. version) == 0 then
    return 0
end
redis.call('HSET', current, kind, version)
prune(kind, versions, info, data, current, keep)
return 1
"""

GET_ARTEFACT = """
local info, data, current = unpack(KEYS)
local kind = ARGV[1]
local version = ARGV[2] or redis.call('HGET', current, kind)
if not version then
    return false
end
local field = kind .. ':' .. version
local found = redis.call('HGET', info, field)
return found and {version, found, redis.call('HGET', data, field)}
"""
