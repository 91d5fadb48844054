"""Numbers of the named barriers of a block with roles; walk_roles.py says who waits at them.  0 is syncthreads.

Each counts all threads of the block.
"""

READY, DONE = 1, 3  # P is there; P is read: each two, by the parity of a publication
QFREE = 5  # the queries have left the ring
QUERIES = 6  # warps that share fragments read each other's queries
