"""Numbers of the named barriers of a block with roles; walk_roles.py says who waits at them.  0 is syncthreads.

Each counts all threads of the block, also those that have nothing to say: with a barrier of some threads among them
compute-sanitizer's racecheck loses track of the others.  (A barrier of one warp by itself, added to a kernel of which
it reports nothing, and which it cannot make wrong, made it report 13,885 races of P.)
"""

READY, DONE = 1, 3  # P is there; P is read: each two, by the parity of a publication
QFREE = 5  # the queries have left the ring
QUERIES = 6  # query_barriers from here on, each once a segment: warps that share fragments read each other's queries
