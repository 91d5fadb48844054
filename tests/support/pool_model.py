"""A plain Python model of a KV pool that a batch shares: who owns which slot, and what each request has accepted."""

import numpy as np


class PoolModel:
    """Requests start, draft, accept and end.  A token's KV is stood for by a number of its own, never used again."""

    def __init__(self, rng, *, requests, max_nodes, depth, max_prefix):
        self.rng, self.requests, self.max_nodes, self.depth = rng, requests, max_nodes, depth
        self.max_prefix = max_prefix
        self.num_slots = requests * (max_nodes + max_prefix) + 5
        self.free = [int(slot) for slot in rng.permutation(self.num_slots)]
        self.contents = [0] * self.num_slots
        self.owned = [[] for _ in range(requests)]
        self.histories = [[] for _ in range(requests)]  # the accepted tokens, in order
        self._windows = [[] for _ in range(requests)]
        self._next_value = 1

    def draft(self):
        """The arrays of a step, after the drafts' KV went to ``contents``.  Some requests have ended, some sit out."""
        rng = self.rng
        num_nodes, accept_lens = np.zeros((2, self.requests), np.int32)
        accept_nodes = np.full((self.requests, self.depth + 1), -1, np.int32)
        out_cache_loc, qo_indptr = np.full(self.requests * self.max_nodes, -1), [0]
        for b in range(self.requests):
            if len(self.owned[b]) + self.depth >= self.max_prefix or rng.random() < 0.05:
                self.free += self.owned[b]
                self.owned[b], self.histories[b] = [], []
            n = int(rng.integers(1, self.max_nodes + 1)) if rng.random() < 0.85 else 0
            rng.shuffle(self.free)
            self._windows[b] = [self.free.pop() for _ in range(n)]
            for slot in self._windows[b]:
                self.contents[slot], self._next_value = self._next_value, self._next_value + 1
            out_cache_loc[qo_indptr[-1] : qo_indptr[-1] + n] = self._windows[b]
            qo_indptr.append(qo_indptr[-1] + n)
            if n:
                m = int(rng.integers(1, min(n, self.depth + 1) + 1))
                num_nodes[b], accept_lens[b] = n, m
                accept_nodes[b, :m] = [0, *(1 + rng.permutation(n - 1)[: m - 1])]
        return {
            "out_cache_loc": out_cache_loc,
            "qo_indptr": np.array(qo_indptr),
            "accept_nodes": accept_nodes,
            "accept_lens": accept_lens,
            "num_nodes": num_nodes,
            "prefix_lens": np.array([len(history) for history in self.histories]),
            "req_pool_indices": np.arange(self.requests),
        }

    def accept(self, step, compaction, convention):
        """Accept the path; take the compaction's word for which slots are free, and for nothing else."""
        assert not compaction.flags.any()
        for b, window in enumerate(self._windows):
            before = [self.contents[slot] for slot in window]
            path = step["accept_nodes"][b, : step["accept_lens"][b]].tolist()
            self.histories[b] += [before[node] for node in path]
            if convention == "move":
                for i, node in enumerate(path):
                    self.contents[window[i]] = before[node]
            first = int(step["qo_indptr"][b])
            freed = compaction.freed_slots[first : first + int(compaction.freed_counts[b])].tolist()
            self.free += freed
            self.owned[b] += [slot for slot in window if slot not in freed]
            assert compaction.new_prefix_lens[b] == len(self.histories[b]) == len(self.owned[b])
        owners = self.free + [slot for slots in self.owned for slot in slots]
        assert sorted(owners) == list(range(self.num_slots)), "every slot has one owner"

    def check_prefix(self, b, slots):
        """``slots`` are what the next step reads as request ``b``'s prefix."""
        assert sorted(slots) == sorted(self.owned[b])
        assert [self.contents[slot] for slot in slots] == self.histories[b]
