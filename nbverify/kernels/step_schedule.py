"""One schedule for all launches of a step: what every block of a launch works out first, worked out once and kept.

Who does what depends on the lengths alone, and the layers of a model verify the same lengths.  With
``spec.schedule == "step"`` a kernel of its own, as many blocks and threads, runs what schedule.py and segments.py do at
the start of a block, and leaves in the plan's workspace

    step_table      [2, B + 1]               int32, the work table
    step_segments   [grid, SEGMENT_FIELDS]   int64, each block's first segment

A launch then begins with one round of copies, all in flight at once, where it otherwise loads lengths, adds them up,
looks its segment up and loads that request's lengths, one after the other.  Later segments of a block are looked up as
ever, in the same table, by the same functions: so cuts, states and bits are those of ``schedule="launch"``.

Field STEP_START of a record is the block's first position on the line, and above it the number of requests, which a
launch compares with its own: a schedule of another batch size would have it read and write anywhere.  The host refuses
such a launch (plan.py); what a replayed graph can still do wrong stops here.
"""

from numba import cuda, int32, int64, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import SEGMENT_FIELDS, WARP
from nbverify.kernels.schedule import make_schedule
from nbverify.kernels.segments import RECORD_BYTES, SHARE_END, STEP_START, make_open_segment

CHUNK_BYTES, ENTRY_BYTES = 16, 4
RECORD_CHUNKS = RECORD_BYTES // CHUNK_BYTES
NOWHERE = -1  # a first position that no block has


def make_body(spec, geometry):
    """``schedule(args)``: the kernel that leaves the schedule of a step in the workspace."""
    schedule_of_launch = make_schedule(spec, geometry)
    prepare, share = schedule_of_launch.prepare, schedule_of_launch.share
    open_segment = make_open_segment(schedule_of_launch)
    threads = geometry.threads

    def schedule(args):
        table = cuda.shared.array(0, int32, 16)
        prepare(args, table)
        if cuda.blockIdx.x == 0:
            i = int32(cuda.threadIdx.x)
            while i < 2 * (args.num_requests + 1):
                args.step_table[uint32(i)] = table[uint32(i)]
                i = int32(i + threads)
        position, share_end = share(args, table)
        first = int64(cuda.blockIdx.x) * SEGMENT_FIELDS
        record = args.step_segments[first : first + SEGMENT_FIELDS]
        if cuda.threadIdx.x < WARP and position < share_end:
            open_segment(args, table, position, share_end, record)
        if cuda.threadIdx.x == 0:
            record[STEP_START] = int64(args.num_requests << 32) | int64(position)
            record[SHARE_END] = int64(share_end)

    return schedule


def make_prepare(geometry, *, with_segment):
    """``prepare(args, table)``: fetch the table, and the first segment to its place.  The whole block calls it."""
    threads, first_record = geometry.threads, geometry.segments_offset
    second_start = first_record + RECORD_BYTES + 8 * STEP_START

    @cuda.jit(device=True)
    def prepare(args, table):
        thread = int32(cuda.threadIdx.x)
        i = thread
        while i < 2 * (args.num_requests + 1):
            ptx.cp_async_4(ptx.shared_address(table, i), ptx.global_address(args.step_table, i))
            i = int32(i + threads)
        if with_segment:
            window = uint32(ptx.shared_address(cuda.shared.array(0, int32, 16), 0))
            if thread < RECORD_CHUNKS:
                at = thread * CHUNK_BYTES
                source = ptx.global_address(args.step_segments, int64(cuda.blockIdx.x) * SEGMENT_FIELDS + thread * 2)
                ptx.cp_async_16(window + uint32(first_record + at), source)
            elif thread == RECORD_CHUNKS:
                other = ptx.shared_int64(window + uint32(second_start), 1)
                other[0] = int64(NOWHERE)
        ptx.cp_async_commit()
        ptx.cp_async_wait(0)
        cuda.syncthreads()  # publishes both to the block

    return prepare


def make_share(geometry):
    """``share(args, table)`` -> (position, end) of this block on the line, from its first segment's record."""
    first_record = geometry.segments_offset

    @cuda.jit(device=True)
    def share(args, table):
        window = uint32(ptx.shared_address(cuda.shared.array(0, int32, 16), 0))
        record = ptx.shared_int64(window + uint32(first_record), SEGMENT_FIELDS)
        start = record[STEP_START]
        if start >> 32 != args.num_requests:
            ptx.trap()
        return int32(start), int32(record[SHARE_END])

    return share
