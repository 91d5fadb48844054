"""Trees to buffers: what a verify kernel, and the acceptance after it, read about the draft trees of a batch.

For request b with n = num_nodes[b] nodes and a prefix of c = prefix_lens[b] keys:

    depth(i)       = 0 if parents[i] < 0 else depth(parents[i]) + 1
    sees(i)        = {i} + sees(parents[i])                   the node and its ancestors: row i of the mask
    qo_indptr[b]   = sum over r < b of rows(r)                rows = n, or N with ``padded``
    mask_indptr[b] = sum over r < b of elements(r)            rows * (c + rows)        FULL, bytes
                                                              rows * rows              TREE, bytes
                                                              rows * ceil(rows / 32)   PACKED, 32-bit words

Arguments (B = requests, N = max_nodes)
    parents                [B, N]   int32  read   -1: the root, which is node 0.  Means nothing from num_nodes on
    num_nodes              [B]      int32  read   0: no request
    prefix_lens            [B]      index  read
    custom_mask            [*]      uint8  write  PACKED: uint32; absent for NONE and CAUSAL, as is mask_indptr
    mask_indptr            [B + 1]  int64  write
    qo_indptr              [B + 1]  index  write
    positions              [*]      int64  write  c + depth; c in the rows of hidden nodes
    depths                 [B, N]   int32  write  0 where there is no node
    retrieve_index         [B, N]   int64  write  the node's row, or -1.  May be absent, as may the next two
    retrieve_next_token    [B, N]   int64  write  the child with the lowest number, or -1
    retrieve_next_sibling  [B, N]   int64  write  the next higher number with the same parent, or -1
    flags                  [B]      int32  write  0, or the TreeFault with the highest number
    max_nodes, max_kv_len, blocks_per_request     int64

A node is hidden if it is padding or if its request is flagged: its mask row is 0, its depth 0, and it has no child and
no sibling.  Lengths out of range are clamped as the verify kernel does, so that a flagged request has a block of the
size that is read, and the starts of the others do not depend on what its tree looks like.  A write past the end of
``custom_mask`` or ``positions`` is left out.

Launch      grid = B * blocks_per_request blocks of ``threads`` threads, 12 N bytes of dynamic shared memory.
            No block waits for another: each adds up the lengths of the requests before its own, and looks at the
            whole tree of its own.  Then a warp takes a row, and the warps of a request's blocks its rows in turn.
Depths      by pointer jumping in shared memory.  A word holds a node's ancestor and the number of steps up to it; a
            round appends the word of that ancestor.  After k rounds a word spans 2^k steps, so a word that has not
            ended when 2^k >= n is on a cycle or below one.  Two copies, so that no thread reads what another writes.
Rows        a lane holds the 32 columns of one word of the row.  The warp walks up from its node, all lanes in step, and
            each keeps the ancestors that fall into its word.  This comes after the check, so it ends.  A walk is good
            for 1024 columns; a wider row takes ``walks`` of them, one after the other.
Traffic     what is written, once; parents and lengths once for every block of a request, from L2.
"""

from numba import cuda, int32, int64, uint8, uint32

from nbverify.kernels import ptx
from nbverify.kernels.geometry import FULL_WARP, WARP
from nbverify.kernels.indices import load_index
from nbverify.spec import Mask
from nbverify.tree.kernels.memory import store_index

STEPS_SHIFT = 16
ANCESTOR = 0xFFFF
ENDED = ANCESTOR  # in place of an ancestor: the steps went past the root
NO_PARENT = -2  # that of a column without a node: nobody's
WORDS_PER_WALK = WARP  # of a mask row: one a lane


@cuda.jit(device=True)
def warp_sum(value):
    """Of an int64, in all lanes."""
    ptx.keep_loops()
    for step in range(5):
        value += cuda.shfl_xor_sync(uint32(FULL_WARP), value, 1 << step)
    return value


def make_measure(*, padded, bad_num_nodes, bad_prefix_len):
    """``measure(args, request)`` -> (nodes, rows, prefix length, fault), within bounds whatever the buffers hold."""

    @cuda.jit(device=True)
    def measure(args, request):
        nodes, fault = int64(args.num_nodes[request]), int32(0)
        if nodes < 0 or nodes > args.max_nodes:
            nodes, fault = int64(0), int32(bad_num_nodes)
        rows = nodes
        if padded:
            rows = int64(args.max_nodes)
        given = load_index(args.prefix_lens, args.prefix_lens_words, request)
        prefix_len = min(max(given, int64(0)), int64(args.max_kv_len - rows))
        if nodes > 0 and prefix_len != given:
            fault = int32(bad_prefix_len)
        return nodes, rows, prefix_len, fault

    return measure


def make_elements(mask):
    """``elements(rows, prefix_len)``: of a request's block in custom_mask.  64-bit: FULL blocks pass 2^31."""
    is_full, is_packed = mask is Mask.FULL, mask is Mask.PACKED

    @cuda.jit(device=True)
    def elements(rows, prefix_len):
        if is_full:
            return rows * (prefix_len + rows)
        if is_packed:
            return rows * ((rows + 31) >> 5)
        return rows * rows

    return elements


@cuda.jit(device=True)
def seen_from(parents, row, word):
    """Bits of the columns of one word of a row, as int32, which is what shuffles take: the node and its ancestors."""
    ptx.keep_loops()
    bits = int32(0)
    ancestor = row
    while ancestor >= 0:
        if ancestor >> 5 == word:
            bits = int32(bits | int32(1 << (ancestor & 31)))
        ancestor = parents[ancestor]
    return bits


def make_write_mask_words(*, mask, fill_prefix):
    """``write_mask_words(args, start, row, rows, prefix_len, first_word, bits, is_node)``: those of one walk.

    ``bits`` is the lane's word: number ``first_word`` + lane of the row.
    """
    is_full, is_packed = mask is Mask.FULL, mask is Mask.PACKED

    @cuda.jit(device=True)
    def write_mask_words(args, start, row, rows, prefix_len, first_word, bits, is_node):
        ptx.keep_loops()
        lane = int32(cuda.laneid)
        size = int64(args.custom_mask.size)
        if is_packed:
            words_per_row = (rows + 31) >> 5
            word = int32(first_word + lane)
            at = int64(start + row * words_per_row + word)
            if word < words_per_row and at < size:
                args.custom_mask[at] = uint32(bits)
        else:
            first = int64(start + row * rows)
            if is_full:
                first = int64(start + row * (prefix_len + rows))
                if fill_prefix and first_word == 0:
                    column = int64(lane)
                    while column < prefix_len and first + column < size:
                        args.custom_mask[first + column] = uint8(is_node)
                        column += WARP
                first += prefix_len
            word, end = int32(first_word), min(rows, int64((first_word + WORDS_PER_WALK) << 5))
            while word << 5 < end:
                bits_of_word = cuda.shfl_sync(uint32(FULL_WARP), bits, int32(word - first_word))
                column = int64((word << 5) + lane)
                if column < rows and first + column < size:
                    args.custom_mask[first + column] = uint8((bits_of_word >> lane) & 1)
                word = int32(word + 1)

    return write_mask_words


@cuda.jit(device=True)
def first_child_and_next_sibling(parents, nodes, node):
    """Each the lowest number that fits, or -1.  The whole warp calls it: a lane looks at every 32nd node."""
    ptx.keep_loops()
    lane = int32(cuda.laneid)
    parent = parents[node]
    child, sibling = int32(-1), int32(-1)
    first = int32(0)
    while first < nodes:
        other = int32(first + lane)
        of_other = int32(NO_PARENT)
        if other < nodes:
            of_other = parents[other]
        children = cuda.ballot_sync(uint32(FULL_WARP), of_other == node)
        siblings = cuda.ballot_sync(uint32(FULL_WARP), of_other == parent and other > node)
        if child < 0 and children != 0:
            child = int32(first + cuda.ffs(children) - 1)
        if sibling < 0 and siblings != 0:
            sibling = int32(first + cuda.ffs(siblings) - 1)
        first = int32(first + WARP)
    return child, sibling


def make_body(*, mask, padded, fill_prefix, walks, threads, faults):
    """``masks(args)``.  ``faults`` are the TreeFault codes in ascending order."""
    cycle, orphan, parent_range, second_root, root, capacity, bad_prefix_len, bad_num_nodes = (int(f) for f in faults)
    has_mask = mask.reads_buffer
    warps = threads // WARP
    measure = make_measure(padded=padded, bad_num_nodes=bad_num_nodes, bad_prefix_len=bad_prefix_len)
    elements = make_elements(mask)
    write_mask_words = make_write_mask_words(mask=mask, fill_prefix=fill_prefix)

    @cuda.jit(device=True)
    def fault_of(node, parent, nodes, max_nodes):
        if node == 0:
            return int32(root) if parent != -1 else int32(0)
        if parent == -1:
            return int32(second_root)
        if parent < 0 or parent >= max_nodes:
            return int32(parent_range)
        return int32(orphan) if parent >= nodes else int32(0)

    @cuda.jit(device=True)
    def sum_of_earlier(args, request):
        """Rows and mask elements of the requests before this one, in all lanes of the warp that calls it."""
        ptx.keep_loops()
        rows_before, elements_before = int64(0), int64(0)
        earlier = int32(cuda.laneid)
        while earlier < request:
            _, rows, prefix_len, _ = measure(args, earlier)
            rows_before += rows
            if has_mask:
                elements_before += elements(rows, prefix_len)
            earlier = int32(earlier + WARP)
        return warp_sum(rows_before), warp_sum(elements_before)

    def masks(args):
        ptx.keep_loops()  # here and in what it calls: less code; as fast as unrolled
        parents = cuda.shared.array(0, int32)
        starts = cuda.shared.array(2, int64)
        worst = cuda.shared.array(1, int32)
        thread, lane = int32(cuda.threadIdx.x), int32(cuda.laneid)
        max_nodes, blocks_per_request = int32(args.max_nodes), int32(args.blocks_per_request)
        request = int32(cuda.blockIdx.x) // blocks_per_request
        block = int32(cuda.blockIdx.x) % blocks_per_request
        # Requested before the number of nodes is known: one trip to memory instead of two.
        first_of_request = int64(request) * max_nodes
        node = thread
        while node < max_nodes:
            parents[node] = args.parents[first_of_request + node]
            node = int32(node + threads)
        nodes_of_request, rows, prefix_len, fault = measure(args, request)
        nodes = int32(nodes_of_request)
        if thread == 0:
            worst[0] = 0
        if thread >= threads - WARP:  # the warp with the fewest nodes: its loads go out beside those of the others
            rows_before, elements_before = sum_of_earlier(args, request)
            if lane == 0:
                starts[0], starts[1] = rows_before, elements_before
        goes_on = int32(0)
        node = thread
        while node < nodes:
            parent = parents[node]  # written by this thread
            fault = max(fault, fault_of(node, parent, nodes, max_nodes))
            jump = int32(ENDED)
            if node > 0 and parent >= 0 and parent < nodes:
                jump = int32((1 << STEPS_SHIFT) | parent)
                goes_on = int32(1)
            parents[max_nodes + node] = jump
            node = int32(node + threads)
        unfinished = cuda.syncthreads_or(goes_on)  # publishes parents, jumps, starts and the 0
        if fault > 0:
            cuda.atomic.max(worst, 0, fault)

        old, new = max_nodes, int32(2 * max_nodes)  # where the two copies of the jumps start
        span = int32(1)  # steps that a jump covers, unless it has ended
        while unfinished != 0 and span < nodes:
            goes_on = int32(0)
            node = thread
            while node < nodes:
                jump = parents[old + node]
                ancestor = int32(jump & ANCESTOR)
                if ancestor != ENDED:
                    further = parents[old + ancestor]
                    steps = (jump >> STEPS_SHIFT) + (further >> STEPS_SHIFT)
                    jump = int32((steps << STEPS_SHIFT) | (further & ANCESTOR))
                    if further & ANCESTOR != ENDED:
                        goes_on = int32(1)
                parents[new + node] = jump
                node = int32(node + threads)
            old, new = new, old
            span = int32(2 * span)
            unfinished = cuda.syncthreads_or(goes_on)  # publishes the new jumps; nobody reads the old ones any more

        cuda.syncthreads()  # publishes the worst fault
        first_row, mask_start = starts[0], starts[1]
        flag = worst[0]
        if unfinished != 0:
            flag = max(flag, int32(cycle))
        num_elements = int64(0)
        if has_mask:
            num_elements = elements(rows, prefix_len)
        if nodes > 0:
            if first_row + rows > args.positions.size:
                flag = max(flag, int32(capacity))
            if has_mask:
                if mask_start + num_elements > args.custom_mask.size:
                    flag = max(flag, int32(capacity))

        if block == 0 and thread == 0:
            args.flags[request] = flag
            store_index(args.qo_indptr, args.qo_indptr_words, request, first_row)
            if has_mask:
                args.mask_indptr[request] = mask_start
            if request + 1 == args.flags.size:
                store_index(args.qo_indptr, args.qo_indptr_words, request + 1, first_row + rows)
                if has_mask:
                    args.mask_indptr[request + 1] = mask_start + num_elements

        row = int32(block * warps + thread // WARP)
        while row < max_nodes:
            is_node = flag == 0 and row < nodes
            depth, child, sibling = int32(0), int32(-1), int32(-1)
            if is_node:
                depth = int32(parents[old + row] >> STEPS_SHIFT)
                if args.retrieve_next_token.size > 0 or args.retrieve_next_sibling.size > 0:
                    child, sibling = first_child_and_next_sibling(parents, nodes, row)
            if lane == 0:
                at = first_of_request + row
                args.depths[at] = depth
                if row < rows and first_row + row < args.positions.size:
                    args.positions[first_row + row] = prefix_len + depth
                if args.retrieve_index.size > 0:
                    args.retrieve_index[at] = first_row + row if row < rows else int64(-1)
                if args.retrieve_next_token.size > 0:
                    args.retrieve_next_token[at] = child
                if args.retrieve_next_sibling.size > 0:
                    args.retrieve_next_sibling[at] = sibling
            if has_mask:
                if row < rows:
                    for walk in range(walks):  # one up to 1024 nodes: then there is no loop in the code
                        first_word = int32(walk * WORDS_PER_WALK)
                        bits = seen_from(parents, row, int32(first_word + lane)) if is_node else int32(0)
                        write_mask_words(args, mask_start, row, rows, prefix_len, first_word, bits, is_node)
            row = int32(row + blocks_per_request * warps)

    return masks
