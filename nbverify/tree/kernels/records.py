"""What the plans and the kernels of compaction and of the next step's indices both know.  No numba here.

A kernel says by one int32 a request whether the request's data was usable.  The first fault in the order of the
numbers is the one that is told.
"""

from enum import IntEnum

COMPACT_THREADS = 128  # a unit column each; at least as many as rows of a path
INDICES_THREADS = 128
ENTRIES_PER_THREAD = 8  # of kv_indices, loaded at once: enough loads in flight to stream


class CompactFlag(IntEnum):
    """What compaction has to say about a request."""

    OK = 0
    BAD_WINDOW = 1  # num_nodes or qo_indptr: the window is not inside out_cache_loc, or has too few rows
    BAD_LENGTH = 2  # accept_lens: not 1 to num_nodes, or more than the plan's depth has
    BAD_SLOT = 3  # out_cache_loc: a slot of the window that a plane does not have
    BAD_NODE = 4  # accept_nodes: not a node of the tree
    DUPLICATE_NODE = 5  # accept_nodes: a node twice on the path
    BAD_PREFIX = 6  # prefix_lens or req_pool_indices: no room for the path there


class IndexFlag(IntEnum):
    """What the next step's indices have to say about a request."""

    OK = 0
    BAD_ROW = 1  # req_pool_indices: no row of req_to_token; its length is taken as 0
    BAD_LENGTH = 2  # prefix_lens: negative, or more than a row has; its length is taken as 0
    CUT = 3  # kv_indices is full: the request's list ends early, or is empty


# A record describes up to COMPACT_THREADS neighbouring units of the rows of one plane, int64 each.  A unit is the 16, 4
# or 1 bytes that a thread moves at once.  Byte 0 of unit u of the row of slot s is at
#     BASE + s // PAGE_SIZE * PAGE_STRIDE + s % PAGE_SIZE * SLOT_STRIDE + u // HEAD_UNITS * HEAD_STRIDE
#          + u % HEAD_UNITS * UNIT_BYTES
(
    BASE,
    PAGE_SIZE,
    PAGE_STRIDE,
    SLOT_STRIDE,
    HEAD_STRIDE,
    HEAD_UNITS,
    UNIT_BYTES,
    FIRST_UNIT,
    END_UNIT,  # one past the last unit of the row
    RECORD_FIELDS,
) = range(10)
