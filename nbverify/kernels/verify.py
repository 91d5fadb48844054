"""The fast kernel: tree-verify attention on tensor cores, by inline PTX from Python.

The maths, the work and the merge are those of simt.py, which is the place to start reading; here a tile of keys flows
through the block like this (names as in kernels/tiles.py):

    kv_ring.py   pool rows --cp.async--> ring in shared memory, some tiles ahead
    queries.py   query rows, once a segment, on their way to registers or to a place of their own in shared memory
    scores.py    S = Q K^T by mma: keys by ldmatrix, queries from where they are
    weights.py   scale, mask, score_mod, lazy running maximum; P = 2^(s - m) in 16 bits
    values.py    O += P V by mma, accumulators in registers
    outputs.py   at the end of a segment: merge the teams, write results, or partial states for reduce/

How the warps share this work is the walk over a segment: walk_teams.py (every warp does all of it, head dims up to 256)
or walk_roles.py (score warps and value warps, MLA).  Each states its hand-over protocol in its head.

Arguments  one named tuple, ``args``; contract.py is its table (shapes, dtypes, strides).
Launch     grid = co-resident blocks, fixed when the plan is made; threads and shared memory: kernels/tiles.py.
Numerics   products exact, sums of mma in float32, P rounded to the 16-bit type, l of the unrounded weights.
"""

from numba import cuda, int32, uint8, uint32

from nbverify.kernels import ptx, step_schedule, walk_roles, walk_teams
from nbverify.kernels.kv_ring import make_ring
from nbverify.kernels.schedule import make_schedule
from nbverify.kernels.threads import find_place, uniform
from nbverify.kernels.tiles import LINE_BYTES
from nbverify.reduce import grid_sync, two_launch
from nbverify.reduce.merge import make_merge


def make_bodies(spec, geometry):
    """The kernel bodies of a spec, in launch order: one for grid_sync, two for two_launch."""
    schedule = make_schedule(spec, geometry)
    prepares = schedule.prepare, schedule.prepare
    if spec.schedule == "step":
        prepares = tuple(step_schedule.make_prepare(geometry, with_segment=is_split) for is_split in (True, False))
        schedule = schedule._replace(share=step_schedule.make_share(geometry))
    split_phase = make_split_phase(spec, geometry, schedule)
    join = grid_sync if spec.reduction == "grid_sync" else two_launch
    return join.make_bodies(prepares, split_phase, make_merge(spec, geometry, schedule), geometry)


def make_split_phase(spec, geometry, schedule):
    """Phase 1: walk this block's share of the keys; write results, or partial states."""
    share = schedule.share
    ring = make_ring(spec, geometry)
    walk = walk_roles if geometry.has_roles else walk_teams
    init_ring, walk_share = ring.init, walk.make_walk(spec, geometry, schedule, ring)

    @cuda.jit(device=True)
    def split_phase(args, table):
        me = find_place()
        window = int32(ptx.shared_address(cuda.shared.array(0, uint8, LINE_BYTES), 0))  # rows.py relies on it
        shared = uint32(uniform(window))
        init_ring(shared)  # published by the barrier that publishes the first segment
        position, share_end = share(args, table)
        walk_share(me, args, shared, table, uniform(position), uniform(share_end))  # an idle block has nothing to walk

    return split_phase
