"""Scores of a tile: S = Q K^T on tensor cores.

A warp holds its queries as mma operands, in registers as far as these reach, else in shared memory, and reads the keys
from shared memory, 16 keys x 16 columns an ldmatrix.

Column parts   What limits a tile is shared memory: each key row is read once for every 16 query rows, since a warp has
               room for the queries of one row fragment.  So two score warps share their two fragments: each keeps half
               of the columns of both and reads half of each key.  The products are then sums over half of the columns;
               each warp sends the other what is the other's, and adds what it gets.  Three warps share three fragments
               in the same way; one or two are shared by four, and those that own no fragment send all of their sums.

Layout of scores in a lane: ``s[(r * key_frags + j) * 2 + i]`` is row ``8 r + g`` of the fragment, key
``8 j + 2 t + i``, with g = lane // 4 and t = lane % 4: what mma gives, sorted by row.
"""

from numba import cuda, uint32
from numba.cuda import libdevice

from nbverify.kernels import ptx
from nbverify.kernels.geometry import WARP
from nbverify.kernels.row_copies import CHUNK_BYTES
from nbverify.kernels.rows import make_advance, make_swizzle
from nbverify.kernels.softmax import ZERO
from nbverify.kernels.team_places import make_find_first_key

STEP_BYTES = 32  # of a row: 16 columns
FRAG_BYTES = 16 * WARP  # four 32-bit registers of each lane


def make_multiply(dtype):
    """The mma of a 16-bit type."""
    return ptx.mma_bf16 if dtype == "bfloat16" else ptx.mma_f16


def make_find_step(geometry):
    """``first_column(part)`` and ``step_columns(k)``: where step ``k`` of a column part lies in a row, in bytes.

    Parts take turns of ``run_steps`` steps; the sum of the two is that place.
    """
    parts, run = geometry.column_parts, geometry.run_steps

    @cuda.jit(device=True, forceinline=True)
    def first_column(part):
        return uint32(part * uint32(run * STEP_BYTES))

    @cuda.jit(device=True, forceinline=True)
    def step_columns(k):
        return (k // run * parts * run + k % run) * STEP_BYTES

    return first_column, step_columns


def step_registers_of(geometry):
    """32-bit registers of the operands of a k16 step."""
    return 2 * geometry.key_frags + (4 * geometry.shared_frags if geometry.query_rest else 0)


def make_multiply_keys(spec, geometry):
    """``multiply_keys(me, shared, tile, queries, fragments, s, begin, end)``: steps ``begin`` to ``end`` of Q K^T.

    ``tile`` is the address of the tile's K rows.  A call that begins with step 0 starts the sums anew.  ``s`` has the
    scores of all fragments of the warp one after the other, its own first; with several column parts they are sums over
    the warp's columns alone (``make_exchange``).
    """
    steps, kept, rest = geometry.part_steps, geometry.query_steps_kept, geometry.query_rest
    key_frags, has_roles, find_first_key = geometry.key_frags, geometry.has_roles, make_find_first_key(geometry)
    k_pitch, queries_offset = geometry.k_pitch, geometry.queries_offset
    parts, frags = geometry.column_parts, geometry.shared_frags
    row_stride, key_pairs = 2 * key_frags, key_frags // 2
    step_registers, ahead = step_registers_of(geometry), geometry.steps_ahead
    multiply, swizzle, advance = make_multiply(spec.dtype), make_swizzle(k_pitch), make_advance(k_pitch)
    first_column, step_columns = make_find_step(geometry)

    @cuda.jit(device=True, forceinline=True)
    def load_step(keys, mine, k, fragments):
        """Operands of step ``k``: keys, and queries that have no register of their own (``mine``: where they lie)."""
        ptx.unroll_loops()
        here = k % (ahead + 1) * step_registers
        for pair in range(key_pairs):
            x = ptx.ldmatrix_x4(advance(keys, step_columns(k)) + uint32(pair * 16 * k_pitch))
            at = here + 4 * pair
            fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]
        for j in range(frags):
            q, at = k * frags + j, here + 4 * key_pairs + 4 * j
            if q >= kept:
                x = ptx.load_shared_v4_u32(mine + uint32((q - kept) * FRAG_BYTES))
                fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = x[0], x[1], x[2], x[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply_keys(me, shared, tile, queries, fragments, s, begin, end):
        ptx.unroll_loops()
        lane, warp = me.lane, me.warp
        # Matrices of the ldmatrix: keys 0-7 and then 8-15, of each the first and then the second 8 columns.
        key, half = lane % uint32(8) + lane // uint32(16) * uint32(8), lane // uint32(8) % uint32(2)
        column = uint32(half * uint32(CHUNK_BYTES))
        if has_roles:
            column = uint32(column + first_column(warp % uint32(parts)))
        else:
            key = uint32(key + find_first_key(warp))
        keys = uint32(tile + key * uint32(k_pitch) + (column ^ swizzle(key)))
        mine = uint32(shared + warp * uint32(rest * FRAG_BYTES) + lane * uint32(16) + uint32(queries_offset))
        if begin == 0:
            for i in range(2 * row_stride * frags):
                s[i] = ZERO
            for k in range(min(ahead, steps)):
                load_step(keys, mine, k, fragments)
        for k in range(begin, end):
            if k + ahead < steps:
                load_step(keys, mine, k + ahead, fragments)
            here = k % (ahead + 1) * step_registers
            for j in range(frags):
                q, at = k * frags + j, here + 4 * key_pairs + 4 * j
                if q < kept:
                    a = (queries[4 * q], queries[4 * q + 1], queries[4 * q + 2], queries[4 * q + 3])
                else:
                    a = (fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3])
                for n in range(key_frags):
                    up, b = 2 * row_stride * j + 2 * n, here + 2 * n
                    low = up + row_stride
                    c = multiply(a, (fragments[b], fragments[b + 1]), (s[up], s[up + 1], s[low], s[low + 1]))
                    s[up], s[up + 1], s[low], s[low + 1] = c[0], c[1], c[2], c[3]

    return multiply_keys


def make_find_fragment(geometry):
    """``find_fragment(part, j)``: which of the shared fragments is number ``j`` in what warp ``part`` of them computes.

    Its own first, if it owns one: the first warps of those that share own a fragment each.
    """
    frags = geometry.shared_frags

    @cuda.jit(device=True, forceinline=True)
    def find_fragment(part, j):
        return uint32(part + uint32(j)) % uint32(frags)

    return find_fragment


def make_exchange(geometry):
    """Sums over the columns of one warp become scores: ``send_others``, ``send_all``, ``add``.

    ``send_others(me, shared, parity, s)`` gives the owners of the other shared fragments what belongs to theirs;
    ``send_all`` is for a warp that owns none.  ``add(me, shared, parity, own)`` adds what an owner was given to
    ``own``, in a fixed order.  A barrier of these warps lies between the two, and another one between an ``add`` and
    the next sending of its parity.
    """
    parts, frags, key_frags = geometry.column_parts, geometry.shared_frags, geometry.key_frags
    exchange_offset, exchange_bytes = geometry.exchange_offset, geometry.exchange_bytes
    num_scores, find_fragment = 4 * key_frags, make_find_fragment(geometry)
    sums_bytes = key_frags * FRAG_BYTES  # of a fragment, from one warp

    @cuda.jit(device=True, forceinline=True)
    def place_of(me, shared, parity, owner, number):
        """Where sums for the fragment of a warp lie, ``number`` of the ``parts - 1`` that it is given."""
        start = uint32(owner * uint32(parts - 1) + number) * uint32(sums_bytes)
        start = uint32(parity * uint32(exchange_bytes) + start + me.lane * uint32(16))
        return uint32(uint32(shared + start) + uint32(exchange_offset))

    def make_send(first):
        @cuda.jit(device=True, forceinline=True)
        def send(me, shared, parity, s):
            ptx.unroll_loops()
            part = uint32(me.warp % uint32(parts))
            for j in range(first, frags):
                fragment = find_fragment(part, j)
                number = uint32(part + uint32(parts - 1) - fragment) % uint32(parts)  # another one for each sender
                target = place_of(me, shared, parity, uint32(me.warp - part + fragment), number)
                for f in range(key_frags):
                    at = num_scores * j + 4 * f
                    ptx.store_shared_v4_f32(target + uint32(f * FRAG_BYTES), (s[at], s[at + 1], s[at + 2], s[at + 3]))

        return send

    @cuda.jit(device=True, forceinline=True)
    def add(me, shared, parity, own):
        ptx.unroll_loops()
        if parts > 1:
            source = place_of(me, shared, parity, me.warp, uint32(0))
            for n in range(parts - 1):
                for f in range(key_frags):
                    x = ptx.load_shared_v4_f32(source + uint32((n * key_frags + f) * FRAG_BYTES))
                    for i in range(4):
                        own[4 * f + i] = libdevice.fadd_rn(own[4 * f + i], x[i])

    return make_send(1), make_send(0), add
