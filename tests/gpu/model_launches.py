"""The launches of a step, with what each must read and compute, its blocks, and the time that model_time.py's constants give it.

A mirror of the launch formulas in kernels/cuda (gemm.cu, gemm_decode.cu, gemm_decode_one.cu, gemm_combine.cu, gemm_combine_one.cu, gemm_skinny.cu, gemm_tiles.cu, gemm_sm90.cu, gemm_f32.cu,
moe_logits.cu, moe_route.cu, moe_sort.cu, attention/attention.cu, cuda_matmul.c) and of the order of ops in shared/model. Where a kernel changes its grid, its function here does. Only
what decides about time is there: no biases, no tensor parallelism, KV in bf16."""
import os

from model_shapes import F8_BLOCK, STEP, blocks_for, experts_of_rows, up

SKINNY_ROWS, SKINNY_W_ROWS, SKINNY_SPAN, SKINNY_BLOCKS_WANTED, SPLIT_MAX, SPLIT_LEAST = 16, 16, 128, 128, 8, 16 * 128
CUBLASLT_ROWS, SM90_ROWS, SMS_USUAL, SEGMENT, SEGMENT_LEAST, SEGMENTS_MANY = 17, 65, 128, 512, 128, 64
SHARED_OF_SM, SHARED_OF_BLOCK = 228 << 10, 227 << 10
DECODE_X_MAX, RING_ROWS, RING_TILES_MAX, STAGED_BLOCKS, STAGED_WIDE, SORT_ROWS = 16384, 8, 128, 40, 96, 16
ROUTER_ROWS, ROUTER_ROWS_MAX, ROUTE_SHARED_MAX = 8, 64, 96 << 10
LOGITS_LEAST_ROWS, LOGITS_ROWS, LOGITS_WIDE, LOGITS_PAIRS, RMS_ROWS_MANY = 1024, 64, 128, 6, 1024
MOE_ROWS, MOE_ELEMENTS = 8192, 128 << 20  # ffn_moe.c: rows of a piece of a prompt
RANGE_ROWS = 256  # attention_mla.c
SM90_TILES = {(128, 128): 12, (128, 256): 21, (256, 128): 21}  # rows, columns: cost
EXPERT_ROWS, EXPERT_COLUMNS, EXPERT_ROWS_USUAL, EXPERT_TILES_MAX, MANY_ROWS = 32, 128, 24, 512, 32
RING_INSTRUCTIONS = {'bf16': 35, 'w8': 90, 'f8': 110, 'w4': 155}  # of a warp for a KiB of W, in sm_90a's SASS (docs/kernels.md)
EXPERT_BLOCKS = {'bf16': 2, 'w8': 2, 'w4': 3, 'f8': 2}  # of an SM, where there is shared memory for them
# gemm_tiles.cu's shapes: rows, columns, blocks per SM
TILES = [(128, 128, 1), (64, 128, 2), (64, 64, 4), (32, 128, 2), (32, 32, 4)]
TILES_SPLIT = [(32, 64, 2), (64, 64, 2)]
TILES_BLOCKS = {('f8', 64, 128): 1, ('f8', 64, 64): 3, ('f8', 32, 128): 1, ('bf16', 64, 64): 3}  # where a layout has other blocks per SM


class Launch:
    """n launches of a kernel with the same arguments. us: of one. must: bytes of weights and KV, without intermediate results."""

    def __init__(self, kernel, op, what, us, bytes=0, flops=0, must=0, blocks=0, working=None, bound='', n=1):
        self.kernel, self.op, self.what, self.us, self.bytes, self.flops, self.must = kernel, op, what, us, bytes, flops, must
        self.blocks, self.working, self.bound, self.n = blocks, blocks if working is None else working, bound, n


def longest(g, **parts):
    """(us of a kernel with the gap before it, what binds it); parts in seconds."""
    bound = max(parts, key=parts.get)
    if parts[bound] * 1e6 <= g.floor_us:
        return g.gap_us + g.floor_us, 'launch'
    return g.gap_us + parts[bound] * 1e6, bound


def small(g, kernel, op, what, bytes, us=0, blocks=1, n=1):
    """A kernel of rows: it reads and writes them, and takes `us` at least."""
    t, bound = longest(g, memory=bytes / g.read, latency=us * 1e-6)
    return Launch(kernel, op, what, t, bytes, blocks=blocks, bound=bound, n=n)


# ---- products ----

class Groups:
    """Rows of the groups of a product: how many there are with a given number of rows. One group has all rows, and so has each of n_each; experts have random
    ones. slots: gemm.h's n_rows."""

    def __init__(self, rows, n_experts=0, n_used=0, n_each=1):
        self.slots, self.n_groups, self.begin = rows * (n_used or 1), n_experts or n_each, n_experts > 0
        self.p = experts_of_rows(n_experts, n_used, rows) if self.begin else [0.0] * rows + [1.0]

    def count(self, above=0, at_most=1 << 30):
        """Expected groups with above < rows <= at_most."""
        return self.n_groups * sum(self.p[above + 1:at_most + 1])

    def tiles(self, rows, above=0, at_most=1 << 30):
        """Expected tiles of so many rows of these groups."""
        return self.n_groups * sum(blocks_for(i, rows) * p for i, p in enumerate(self.p) if above < i <= at_most)

    def rows(self, above=0, at_most=1 << 30):
        return self.n_groups * sum(i * p for i, p in enumerate(self.p) if above < i <= at_most)

    def tiles_at_most(self, rows, above=0):
        if not self.begin:
            return self.n_groups * blocks_for(self.slots, rows)
        return self.slots // rows + min(self.slots // (above + 1), self.n_groups)

    def usual(self):
        return blocks_for(self.slots, self.n_groups) if self.begin else self.slots


def n_splits(w, groups, columns, wanted, k_least):
    tiles = blocks_for(w.n_out, columns)
    if groups.begin or groups.n_groups > 1 or tiles >= wanted:
        return 1
    return max(1, min(blocks_for(wanted, tiles), w.n_in_padded // k_least, SPLIT_MAX))


def row_bytes(w, rows, x=2, y=4):
    return rows * (w.n_in * x + (w.n_out // 2 * 2 if w.paired else w.n_out * y))


def waves_s(g, blocks, resident, payload):
    """Rounds of blocks, each of which begins with what all have: finding its rows, reading x, its first loads' latency."""
    return max(1.0, blocks / resident) * (g.block_us * 1e-6 + payload / g.block_read) if blocks else 0.0


def skinny(g, w, groups, what, op='matmul', at_most=1 << 30):
    split = n_splits(w, groups, SKINNY_W_ROWS, SKINNY_BLOCKS_WANTED, SPLIT_LEAST)
    tiles, used = blocks_for(w.n_out, SKINNY_W_ROWS), groups.count(0, at_most)
    launched = min(groups.slots, groups.n_groups) if groups.begin else groups.n_groups
    rows, must = groups.rows(0, at_most), used * w.bytes
    t, bound = longest(g, memory=(must + row_bytes(w, rows)) / g.read - g.prefetch_us * 1e-6,
                       blocks=waves_s(g, tiles * used * split, 2 * g.n_sms, SKINNY_W_ROWS * w.row_bytes / split),
                       empty=tiles * (launched - used) / (2 * g.n_sms) * g.empty_us * 1e-6)
    return Launch('skinny', op, what, t, must + row_bytes(w, rows), w.flops(rows), must, tiles * launched * split, tiles * used * split, bound)


def skinny_fused(g, matrices, rows, what):
    groups = Groups(rows)
    splits = [n_splits(w, groups, SKINNY_W_ROWS, SKINNY_BLOCKS_WANTED, SPLIT_LEAST) for w in matrices]
    tiles = [blocks_for(w.n_out, SKINNY_W_ROWS) for w in matrices]
    working = sum(n * s for n, s in zip(tiles, splits))
    must, moved = sum(w.bytes for w in matrices), sum(w.bytes + row_bytes(w, rows) for w in matrices)
    payload = max(SKINNY_W_ROWS * w.row_bytes / s for w, s in zip(matrices, splits))
    t, bound = longest(g, memory=moved / g.read - g.prefetch_us * 1e-6, blocks=waves_s(g, working, 2 * g.n_sms, payload))
    return Launch('skinny_fused', 'matmul', what, t, moved, sum(w.flops(rows) for w in matrices), must, working, working, bound)


def decode_fits(matrices, groups, x_rows):
    """gemm_decode_supports: x in shared memory, W through a ring that begins before the wait."""
    w = matrices[0]
    return (w.n_in % SKINNY_SPAN == 0 and x_rows * w.n_in <= DECODE_X_MAX and
            groups.slots <= (RING_TILES_MAX if groups.begin else RING_ROWS) and (groups.begin or groups.n_groups == 1))


def ring_shared(w, x_rows, static):
    """Shared memory of a block: the ring, x, and what is static (gemm_ring.cuh)."""
    ring_bytes = 9 * 2 * 16 * 256 if w.layout == 'w4' else 5 * 4 * 16 * 256 + (5 * 4 * 256 if w.layout == 'f8' else 0)
    return ring_bytes + x_rows * (w.n_in + 32) * 2 + static


def ring(g, kernel, matrices, groups, what, op, jobs, shared, extra_us=0.0, of_sm=2):
    """Persistent blocks, of_sm per SM if their shared memory fits. Loads of W are in flight while the kernel before ends and x is prepared."""
    used, rows = groups.count(), groups.rows()
    must, moved = sum(used * w.bytes for w in matrices), sum(used * w.bytes + row_bytes(w, rows) for w in matrices)
    blocks = min(jobs, g.n_sms * (of_sm if of_sm * shared <= SHARED_OF_SM else 1))
    in_flight = blocks * 64 * 1024 / (g.latency_us * 1e-6)
    parts = {'memory': moved / min(g.read, in_flight), 'latency': g.ring_us * 1e-6,
             'instructions': sum(used * w.n_out * w.row_bytes / 1024 * RING_INSTRUCTIONS[w.layout] for w in matrices) / (min(blocks, g.n_sms) * g.issue)}
    us = max(parts['memory'], parts['instructions']) * 1e6 + g.ring_us + extra_us
    return Launch(kernel, op, what, us, moved, sum(w.flops(rows) for w in matrices), must, blocks, None, max(parts, key=parts.get))


def decode(g, matrices, groups, what, op='matmul', x_rows=None):
    jobs = sum(blocks_for(w.n_out, SKINNY_W_ROWS) * n_splits(w, groups, SKINNY_W_ROWS, SKINNY_BLOCKS_WANTED, SPLIT_LEAST) for w in matrices)
    return ring(g, 'decode', matrices, groups, what, op, jobs * groups.count(), ring_shared(matrices[0], x_rows or groups.slots, 13 * 1024))


def combine(g, w, groups, rows, what):
    """gemm_combine.cu, gemm_combine_one.cu: down of experts and the sum of each row's."""
    x = ring(g, 'combine_gemm', [w], groups, what, 'experts', blocks_for(w.n_out, SKINNY_W_ROWS), combine_shared(w, groups), g.combine_us, 1 if rows == 1 else 2)
    x.bytes += rows * w.n_out * 8 - groups.slots * w.n_out * 4
    return x


def combine_shared(w, groups):
    return ring_shared(w, groups.slots, 4 * 1024) + up(groups.slots, 4) * 17 * 4


def combine_fits(w, groups, rows):
    return w.n_in % SKINNY_SPAN == 0 and groups.slots <= RING_TILES_MAX and rows <= 16 and combine_shared(w, groups) <= SHARED_OF_BLOCK


def small_tile_share(g, w):
    """Of cuBLAS's rate: tiles of few outputs wait for barriers and shared memory."""
    return g.w4_tile_share if w.layout == 'w4' else g.small_tile_share


def tiles(g, w, groups, what, op='matmul', above=0):
    """mma.sync tiles (gemm_tiles.cu)."""
    split, usual = 1, groups.usual()
    each = 1 if groups.begin else groups.n_groups
    fits = [t for t in TILES[:-1] if 2 * usual > t[0] and blocks_for(groups.slots, t[0]) * blocks_for(w.n_out, t[1]) * each >= SMS_USUAL]
    rows, columns, per_sm = fits[0] if fits else TILES[-1]
    if not groups.begin and groups.n_groups == 1 and groups.slots <= 64:
        wide, few = blocks_for(w.n_out, 128) >= SMS_USUAL, groups.slots <= 32
        rows, columns, per_sm = (TILES[3] if few else TILES[1]) if wide else TILES_SPLIT[not few]
        split = 1 if wide else n_splits(w, groups, 64, SMS_USUAL, 4 * STEP)
    if split == 1:
        per_sm = TILES_BLOCKS.get((w.layout, rows, columns), per_sm)
    across, working = blocks_for(w.n_out, columns), groups.tiles(rows, above)
    launched, must, n = groups.tiles_at_most(rows, above) * across * split, groups.count(above) * w.bytes, groups.rows(above)
    if groups.begin:  # as many as there are at least; they take what is more as well
        launched = min(launched, max(0 if above else blocks_for(groups.slots, rows) * across, per_sm * g.n_sms))
    at_once = min(1.0, working * across * split / g.n_sms)  # of the SMs
    share = (g.mma_share if rows * columns == 128 * 128 else small_tile_share(g, w)) * max(at_once, 1e-3)
    t, bound = longest(g, memory=(must + row_bytes(w, n)) / g.read, products=2.0 * working * rows * across * columns * w.n_in / (g.bf16 * share),
                       l2=working * across * (rows * w.n_in * 2 + columns * w.row_bytes) / g.l2,
                       blocks=waves_s(g, working * across * split, per_sm * g.n_sms, columns * w.row_bytes / split),
                       empty=max(0, launched - working * across * split) / (per_sm * g.n_sms) * g.empty_us * 1e-6)
    return Launch('tiles', op, what, t, must + row_bytes(w, n), w.flops(n), must, launched, min(launched, working * across * split), bound)


def sm90_fits(g, w, groups, f8_x):
    usual = groups.slots // groups.n_groups if groups.begin else groups.slots
    tiles_ = groups.tiles_at_most(128) * blocks_for(w.n_out, 128)
    return (w.layout != 'f8' or f8_x) and usual >= SM90_ROWS and 2 * tiles_ >= g.n_sms and w.n_in_padded >= 128


def sm90_tile(g, w, groups, above):
    """(rows, columns) by gemm_sm90_choose: rounds of all SMs, each as long as its tile."""
    def cost(tile):
        return blocks_for(groups.tiles_at_most(tile[0], above) * blocks_for(w.n_out, tile[1]), g.n_sms) * SM90_TILES[tile]

    narrow, larger = (128, 128), (256, 128) if w.layout == 'f8' else (128, 256)
    return larger if cost(larger) <= cost(narrow) else narrow


def sm90_shares(w, groups, rows, columns):
    """Blocks of a cluster load each other's W (gemm_sm90_multicast.cuh): experts of two row tiles on average, in layouts that are multiplied as stored."""
    if os.environ.get('BATON_CUDA_MULTICAST') != 'on':
        return False
    return groups.begin and groups.slots // groups.n_groups >= 2 * rows and w.layout in ('bf16', 'f8') and (w.layout == 'f8' or columns == 256)


def sm90(g, w, groups, what, op='matmul', above=0):
    """wgmma tiles (gemm_sm90.cu, gemm_sm90_f8.cu, gemm_sm90_upconvert.cu): persistent blocks, or clusters of two."""
    f8, small_w = w.layout == 'f8', w.layout in ('w4', 'w8')
    rows, columns = sm90_tile(g, w, groups, above)
    together = 2 if sm90_shares(w, groups, rows, columns) else 1  # row tiles and blocks of a cluster
    across, at_most, working = blocks_for(w.n_out, columns), groups.tiles_at_most(together * rows, above), groups.tiles(rows, above)
    sets = groups.tiles(together * rows, above)  # of row tiles that share W; in some there is one
    alone = 2 * sets - working if together == 2 else 0
    n_tiles, n, places = working * across, groups.rows(above), g.n_sms // together
    jobs = (sets - alone) * across + alone * blocks_for(across, together)
    rounds = max(1.0, jobs / places if jobs > 4 * places else float(blocks_for(jobs, places)))
    rate = g.fp8 * g.fp8_share if f8 else g.bf16 * (g.upconvert_share if small_w else g.wgmma_share)
    of_tile = 2.0 * rows * columns * w.n_in / (rate / g.n_sms) + g.tile_us * 1e-6
    in_l2 = (rows * w.n_in * (1 if f8 else 2) * working + columns * w.row_bytes * sets) * across / g.l2
    must = groups.count(above) * w.bytes
    t, bound = longest(g, memory=(must + row_bytes(w, n)) / g.read, products=rounds * of_tile, l2=in_l2)
    launched = min(at_most * across, places) * together
    return Launch('sm90_f8' if f8 else 'sm90', op, what, t, must + row_bytes(w, n), w.flops(n), must, launched, min(launched, n_tiles), bound)


def experts_fit(g, w, groups):
    at_most = groups.tiles_at_most(EXPERT_ROWS)
    return (groups.begin and w.layout != 'f32' and groups.slots <= EXPERT_ROWS_USUAL * groups.n_groups and at_most <= EXPERT_TILES_MAX and
            at_most * blocks_for(w.n_out, EXPERT_COLUMNS) >= EXPERT_BLOCKS[w.layout] * g.n_sms)


def experts(g, w, groups, what, op='matmul'):
    """Experts of dozens of rows at most (gemm_tiles.cu): persistent blocks, whose ring of stages never drains."""
    jobs, must, n = groups.tiles(EXPERT_ROWS) * blocks_for(w.n_out, EXPERT_COLUMNS), groups.count() * w.bytes, groups.rows()
    t, bound = longest(g, memory=(must + row_bytes(w, n)) / g.read + g.block_us * 1e-6,
                       products=2.0 * jobs * EXPERT_ROWS * EXPERT_COLUMNS * w.n_in / (g.bf16 * small_tile_share(g, w)),
                       l2=jobs * (EXPERT_ROWS * w.n_in * 2 + EXPERT_COLUMNS * w.row_bytes) / g.l2)
    blocks = EXPERT_BLOCKS[w.layout] * g.n_sms
    return Launch('experts', op, what, t, must + row_bytes(w, n), w.flops(n), must, blocks, min(blocks, jobs), bound)


def library_takes(g, w, groups):
    return g.has_library and not groups.begin and groups.slots >= CUBLASLT_ROWS and w.layout == 'bf16' and not w.paired


def cublaslt(g, w, rows, what, n_groups=1):
    n_tiles = blocks_for(rows, 128) * blocks_for(w.n_out, 256) * n_groups
    share = n_tiles / (blocks_for(n_tiles, g.n_sms) * g.n_sms)
    moved = n_groups * (w.bytes + row_bytes(w, rows))
    t, bound = longest(g, memory=moved / g.read, products=n_groups * w.flops(rows) / (g.bf16 * max(share, 0.5)))
    return Launch('cublasLt', 'matmul', what, t + g.library_us, moved, n_groups * w.flops(rows), n_groups * w.bytes, bound=bound)


def wants_f8(g, w, groups):
    return w.layout == 'f8' and groups.slots > SKINNY_ROWS and (groups.begin or groups.n_groups == 1) and sm90_fits(g, w, groups, True)


def product(g, w, groups, what, op='matmul', x_rows=None):
    """gemm_run: the launches of one product. x_rows: of x, where groups share rows."""
    if library_takes(g, w, groups):
        return [cublaslt(g, w, groups.slots, what, groups.n_groups)]
    if wants_f8(g, w, groups):
        return [sm90(g, w, groups, what, op)]
    if decode_fits([w], groups, x_rows or groups.slots):
        return [decode(g, [w], groups, what, op, x_rows)]
    if groups.slots <= SKINNY_ROWS:
        return [skinny(g, w, groups, what, op)]
    if experts_fit(g, w, groups):
        return [experts(g, w, groups, what, op)]
    large = sm90 if sm90_fits(g, w, groups, False) else tiles
    if not groups.begin or groups.slots // groups.n_groups >= SKINNY_ROWS:
        return [large(g, w, groups, what, op)]
    return [skinny(g, w, groups, what, op, SKINNY_ROWS), large(g, w, groups, what, op, SKINNY_ROWS)]


def f32(g, w, rows, what):
    """gemm_f32.cu, narrow and long: routers."""
    r, c = (1, 4) if rows == 1 else (8, 4)
    if blocks_for(rows, 64) * blocks_for(w.n_out, 32) >= STAGED_BLOCKS:
        wide = blocks_for(w.n_out, 32) % 2 == 0 and blocks_for(rows, 64) * blocks_for(w.n_out, 64) >= STAGED_WIDE
        r, c = 64, 64 if wide else 32
    elif rows > 8 and blocks_for(rows, 8) * blocks_for(w.n_out, 16) >= 64:
        r, c = 8, 16
    blocks = blocks_for(rows, r) * blocks_for(w.n_out, c)
    moved = w.bytes + rows * (w.n_in + w.n_out) * 4
    t, bound = longest(g, memory=moved / g.read, l2=blocks * (r + c) * w.n_in * 4 / g.l2, products=w.flops(rows) / g.f32,
                       blocks=waves_s(g, blocks, g.n_sms, c * w.row_bytes / 2))
    return Launch('f32', 'matmul', what, t, moved, w.flops(rows), w.bytes, blocks, None, bound)


def logits(g, w, rows, what):
    """moe_logits.cu: routers of prompts, in parts of bf16."""
    if rows < LOGITS_LEAST_ROWS or w.n_in % STEP:
        return f32(g, w, rows, what)
    c = LOGITS_WIDE // 2 if (w.n_out - 1) % LOGITS_WIDE < LOGITS_WIDE // 2 else LOGITS_WIDE
    blocks = blocks_for(rows, LOGITS_ROWS) * blocks_for(w.n_out, c)
    moved, of_block = w.bytes + rows * (w.n_in + w.n_out) * 4, 2.0 * LOGITS_PAIRS * LOGITS_ROWS * c * w.n_in
    t, bound = longest(g, memory=moved / g.read, l2=blocks * (LOGITS_ROWS + c) * w.n_in * 4 / g.l2,
                       products=blocks_for(blocks, g.n_sms) * g.n_sms * of_block / (g.bf16 * g.logits_share))
    return Launch('logits', 'matmul', what, t, moved, w.flops(rows), w.bytes, blocks, None, bound)


def inputs(g, w, rows, what, n=None, norm=True, x=4):
    """prepare_inputs: rows of f32 become what the product takes."""
    n = n or w.n_in
    return small(g, 'prepare_inputs', 'matmul', what, rows * n * (x + (1 if w.layout == 'f8' and rows > SKINNY_ROWS else 2)), 0.5 if norm else 0.0, rows)


def unless_decode(launch, w, groups, rows):
    """Kernels of decode steps prepare their inputs themselves."""
    return [] if decode_fits([w], groups, rows) else [launch]


# ---- attention ----

def append(g, m, rows):
    heads = m.n_heads + 2 * m.n_kv_heads
    return small(g, 'append', 'rope, kv_append', '', rows * (heads * m.head_dim * 4 * 2 + m.kv_token_bytes), 0.5, rows * heads)


def merge(g, m, rows, n_segments, v_dim):
    part = rows * n_segments * m.n_heads * (v_dim + 2) * 4
    return small(g, 'merge', 'attention', '', part, 0.5 + blocks_for(n_segments, 32) * g.merge_round_us, rows * m.n_heads)


def segment_of(m, rows, context):
    """Keys of a decode row's segments."""
    n = SEGMENT if m.latent or rows >= MANY_ROWS else SEGMENT_LEAST
    while n < SEGMENT and context > n * SEGMENTS_MANY:
        n *= 2
    return n


def attention_decode(g, m, rows, context):
    """A block for each segment of a KV head (all heads, of latents). The last block of a row merges its segments if all run at a time. Heads are
    rotated and appended by the same launch."""
    keys = segment_of(m, rows, context)
    n_segments, heads = blocks_for(context, keys), 1 if m.latent else m.n_kv_heads
    dims = m.latent * 2 + m.rope if m.latent else 2 * m.head_dim
    must, units = rows * context * m.kv_token_bytes, rows * n_segments * heads
    flops = 2.0 * rows * context * m.n_heads * dims
    resident, payload = 2 * g.n_sms, min(context, keys) * m.kv_token_bytes / heads
    moved = must + rows * m.n_heads * dims * 4 + 2 * rows * n_segments * m.n_heads * (m.latent or m.head_dim) * 4
    if not m.latent:
        moved += rows * (2 * m.n_kv_heads * m.head_dim * 4 + m.kv_token_bytes)
    alone = n_segments > 1 and (m.latent or units > resident)
    last_us = g.merge_us if n_segments > 1 and not alone else 0.0
    # A unit that ends lets its block begin the next one's loads only then: the ring drains.
    of_block = min(g.unit_read, g.read / min(units, resident))
    t, bound = longest(g, memory=moved / g.read + (g.ramp_us + last_us) * 1e-6, products=flops / (g.bf16 * g.mma_share),
                       blocks=max(1.0, units / resident) * (g.unit_us * 1e-6 + payload / of_block) + last_us * 1e-6)
    out = [Launch('attend_mla' if m.latent else 'attend_mma', 'attention', '', t, moved, flops, must, min(units, resident), None, bound)]
    return out + ([merge(g, m, rows, n_segments, m.latent or m.head_dim)] if alone else [])


def attention_prefill(g, m, rows, begin):
    """Tiles of wgmma (attention_prefill_sm90.cuh); latents: the absorbed path, whose rows read their keys one by one from L2."""
    pairs = rows * begin + rows * (rows + 1) / 2
    if m.latent:
        flops = 2.0 * pairs * m.n_heads * (2 * m.latent + m.rope)
        keys, n = pairs * m.kv_token_bytes, blocks_for(rows, RANGE_ROWS)
        t, bound = longest(g, l2=keys / n / g.l2, products=flops / n / (g.bf16 * g.latent_share))
        merges = merge(g, m, min(rows, RANGE_ROWS), blocks_for(begin + rows, SEGMENT) / 2, m.latent)
        merges.n = sum(begin + (i + 1) * RANGE_ROWS > SEGMENT for i in range(n))  # ranges whose rows have several segments
        return [Launch('attend_mla', 'attention', '', t, keys / n / RANGE_ROWS, flops / n, bound=bound, n=n), *([merges] if merges.n else [])]
    flops, moved = 2.0 * pairs * m.n_heads * 2 * m.head_dim, (begin + rows) * m.kv_token_bytes + rows * m.n_heads * m.head_dim * 8
    t, bound = longest(g, memory=moved / g.read, products=flops / (g.bf16 * g.attention_share))
    blocks = min(blocks_for(rows * m.n_heads // m.n_kv_heads, 128) * m.n_kv_heads, g.n_sms)
    return [Launch('attend_sm90', 'attention', '', t, moved, flops, (begin + rows) * m.kv_token_bytes, blocks, None, bound)]


# ---- a step ----

class Step:
    """A step of decode (rows sequences of `context` tokens) or prefill (one prompt of `context` tokens)."""

    def __init__(self, m, rows, context, prefill=False):
        self.m, self.rows, self.context, self.prefill = m, context if prefill else rows, context, prefill

    def name(self):
        return f'prefill of {self.context} tokens' if self.prefill else f'decode of {self.rows} at {self.context}'


def together(matrices):
    return ' + '.join(w.what() for w in matrices)


def projection_inputs(g, s, matrices):
    """Prepared once for all that take the same type."""
    groups, what = Groups(s.rows), together(matrices)
    n = len({wants_f8(g, w, groups) for w in matrices})
    return [inputs(g, matrices[0], s.rows, what)] * n if not decode_fits(matrices, groups, s.rows) else []


def projections(g, s, matrices):
    what, groups = together(matrices), Groups(s.rows)
    if decode_fits(matrices, groups, s.rows):
        return [decode(g, matrices, groups, what)]
    if s.rows <= SKINNY_ROWS and all(w.n_in_padded % SKINNY_SPAN == 0 for w in matrices):
        return [skinny_fused(g, matrices, s.rows, what)]
    if library_takes(g, matrices[0], groups):
        equal = {w.n_out: [v for v in matrices if v.n_out == w.n_out] for w in matrices}  # k and v are one call
        return [cublaslt(g, of[0], s.rows, what, len(of)) for of in equal.values()]
    return [x for w in matrices for x in product(g, w, groups, what)]


def latent_layer(g, s):
    m, part = s.m, min(s.rows, RANGE_ROWS)
    n = blocks_for(s.rows, RANGE_ROWS)
    q = m.n_heads * (m.nope + m.rope)
    out = [*projection_inputs(g, s, m.qkv), *projections(g, s, m.qkv),
           small(g, 'norm', 'rms_norm', '', s.rows * m.latent * 8, 0.5, s.rows), small(g, 'rope', 'rope', '', s.rows * (m.n_heads + 1) * m.rope * 8),
           append(g, m, s.rows)]
    for w, what in ((m.k_up, 'up'), (m.v_up, 'down')):
        # One product of all heads: each has its own columns.
        some = [inputs(g, w, part, what, m.n_heads * w.n_in, norm=False),
                *product(g, w, Groups(part, n_each=m.n_heads), f'{m.n_heads} heads: {w.what()}')]
        if w is m.k_up:
            some.append(small(g, 'copy_rows', 'copy_rows', '', part * m.n_heads * m.rope * 8))
            some += attention_prefill(g, m, s.rows, 0) if s.prefill else attention_decode(g, m, s.rows, s.context)
        for x in some:
            if x.op != 'attention':
                x.n = n
        out += some
    assert q == m.qkv[0].n_out
    return out + output(g, s)


def output(g, s, rounded=False):
    """rounded: attention left its results in bf16 as well."""
    o, all_rows = s.m.o, Groups(s.rows)
    if rounded and not wants_f8(g, o, all_rows):
        return product(g, o, all_rows, o.what())
    return [*unless_decode(inputs(g, o, s.rows, o.what(), norm=False), o, all_rows, s.rows), *product(g, o, all_rows, o.what())]


def heads_layer(g, s):
    m = s.m
    attend = [append(g, m, s.rows), *attention_prefill(g, m, s.rows, 0)] if s.prefill else attention_decode(g, m, s.rows, s.context)
    return [*projection_inputs(g, s, m.qkv), *projections(g, s, m.qkv), *attend, *output(g, s, s.prefill)]


def ready(g, w, rows, groups):
    """What the product before left in bf16 is quantised again if this one takes e4m3."""
    return [inputs(g, w, rows, w.what(), norm=False, x=2)] if wants_f8(g, w, groups) else []


def dense_layer(g, s):
    m, all_rows = s.m, Groups(s.rows)
    first = unless_decode(inputs(g, m.gate_up, s.rows, m.gate_up.what()), m.gate_up, all_rows, s.rows)
    return [*first, *product(g, m.gate_up, all_rows, m.gate_up.what()),
            *ready(g, m.down, s.rows, all_rows), *product(g, m.down, all_rows, m.down.what())]


def route(g, m, rows):
    moved, choices = rows * m.n_experts * 4, rows * m.n_used
    if rows <= 32:
        return [small(g, 'route_one_block', 'route', '', moved, g.route_us)]
    out = [small(g, 'route', 'route', '', moved, g.route_us, blocks_for(rows, SORT_ROWS))]
    if choices <= 1024:
        return out + [small(g, 'sort', 'route', '', choices * 8, g.route_us)]
    n = blocks_for(rows, SORT_ROWS)
    return out + [small(g, 'scan', 'route', '', n * m.n_experts * 8, 1.0, blocks_for(m.n_experts, 8)),
                  small(g, 'place', 'route', '', choices * 12, 1.5, n)]


def router(g, m, rows):
    """The norm, the router and the choice of experts: in one launch for few rows (moe_router.cu), with a sort beyond 8."""
    width = up(m.hidden, 32)
    if rows > ROUTER_ROWS_MAX or (min(rows, ROUTER_ROWS) + 1) * width * 4 > ROUTE_SHARED_MAX:
        out = [small(g, 'norm', 'rms_norm', '', rows * m.hidden * 8, 0.5, rows), logits(g, m.router, rows, m.router.what()), *route(g, m, rows)]
    else:
        blocks = blocks_for(m.n_experts, 4) * blocks_for(rows, ROUTER_ROWS)
        out = [small(g, 'router', 'router', m.router.what(), m.router.bytes + blocks * min(rows, ROUTER_ROWS) * m.hidden * 4, g.router_us, blocks)]
        out[0].must, out[0].flops = m.router.bytes, m.router.flops(rows)
        out += [small(g, 'sort', 'router', '', rows * m.n_used * 8, 1.0)] if rows > ROUTER_ROWS else []
    for x in out:
        x.op = 'router'
    return out


def sparse_layer(g, s):
    """Routed experts, in pieces of rows."""
    m = s.m
    most = min(MOE_ROWS, MOE_ELEMENTS // (m.n_used * max(m.hidden, m.expert_down.n_in)))
    rows = min(s.rows, most)
    groups, all_rows = Groups(rows, m.n_experts, m.n_used), Groups(rows)
    gate_up, down = m.expert_gate_up, m.expert_down
    first = router(g, m, rows)
    rounded = rows >= RMS_ROWS_MANY and not wants_f8(g, gate_up, groups)  # by the router's norm
    out = [*first, *([] if rounded else unless_decode(inputs(g, gate_up, rows, 'experts', norm=False), gate_up, groups, rows))]
    if m.shared:
        out += product(g, m.shared[0], all_rows, m.shared[0].what())
    out += product(g, gate_up, groups, 'gate_up ' + gate_up.what(), x_rows=rows)
    if m.shared:
        out += [*ready(g, m.shared[1], rows, all_rows), *product(g, m.shared[1], all_rows, m.shared[1].what())]
    if combine_fits(down, groups, rows):
        out.append(combine(g, down, groups, rows, 'down ' + down.what()))
    else:
        last = product(g, down, groups, 'down ' + down.what())
        of_result = 2 if last[0].kernel.startswith('sm90') else 4  # in bf16 between the two
        out += [*ready(g, down, groups.slots, groups), *last,
                small(g, 'combine', 'combine', '', rows * m.hidden * (of_result * m.n_used + 8), 0.3, blocks_for(rows * m.hidden, 1024))]
    for x in out[len(first):]:
        if x.op == 'matmul' or x.op == 'combine':
            x.op = 'experts'
    for x in out:
        x.n *= s.rows / rows
    return out


def layers(g, s):
    """[(how many layers, their launches)]"""
    m = s.m
    attend = latent_layer if m.latent else heads_layer
    out = [(m.n_dense, attend(g, s) + dense_layer(g, s))] if m.n_dense else []
    return out + ([(m.n_sparse, attend(g, s) + sparse_layer(g, s))] if m.n_sparse else [])


def ends(g, s):
    """The embedding, the head and the choice of tokens."""
    m, n = s.m, 1 if s.prefill else s.rows
    out = [small(g, 'embed', 'embed', '', s.rows * m.hidden * 6, 0, s.rows), *unless_decode(inputs(g, m.head, n, m.head.what()), m.head, Groups(n), n),
           *product(g, m.head, Groups(n), m.head.what())]
    return out + [small(g, 'argmax', 'sample', '', n * m.vocab * 4, 2.0, n)]
