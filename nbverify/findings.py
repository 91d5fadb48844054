"""What the checks of a ``debug=True`` plan find: shared by the kernel that notes it and the plan that reports it.

The device buffer is int64 ``[checks, 3]``: how often a check failed, the smallest position at which it did (an index
into the buffer that the check is about), and the value that stands there.
"""

import numpy as np

(
    CHECK_KV_INDPTR,
    CHECK_KV_LEN,
    CHECK_QO_INDPTR,
    CHECK_QO_ORDER,
    CHECK_NODES,
    CHECK_KV_INDICES,
    CHECK_OUT_CACHE_LOC,
    CHECK_MASK_INDPTR,
    CHECK_SCHEDULE,
) = range(9)

# check -> (buffer that the position indexes, what was expected there, what the value is)
CHECKS: dict[int, tuple[str, str, str]] = {
    CHECK_KV_INDPTR: ("kv_indptr", "an entry range inside kv_indices", "value"),
    CHECK_KV_LEN: ("kv_indptr", "prefix + nodes <= max_kv_len={max_kv_len}", "prefix + nodes"),
    CHECK_QO_INDPTR: ("qo_indptr", "a row range inside q", "value"),
    CHECK_QO_ORDER: ("qo_indptr", "to go on where the requests before it ended", "value"),
    CHECK_NODES: ("qo_indptr", "at most max_nodes={max_nodes} nodes", "nodes"),
    CHECK_KV_INDICES: ("kv_indices", "a row of the pool", "slot"),
    CHECK_OUT_CACHE_LOC: ("out_cache_loc", "a row of the pool", "slot"),
    CHECK_MASK_INDPTR: ("mask_indptr", "a region inside custom_mask", "start"),
    CHECK_SCHEDULE: ("kv_indptr, qo_indptr", "the lengths that schedule() found", "tiles of keys for all rows"),
}

NOTHING_FOUND = np.tile(np.array([0, np.iinfo(np.int64).max, 0], np.int64), (len(CHECKS), 1))


def describe_findings(findings: np.ndarray, limits: dict[str, int]) -> list[str]:
    """A line for each kind of finding: buffer, position, what was expected and what came."""
    lines = []
    for check, (count, position, value) in enumerate(findings.tolist()):
        if count:
            buffer, expected, what = CHECKS[check]
            more = f" (and {count - 1} more)" if count > 1 else ""
            lines.append(f"{buffer}[{position}]: expected {expected.format(**limits)}, got {what} {value}{more}")
    return lines
