"""The tree step around a verify: drafts to trees, trees to buffers, acceptance, compaction.

Each part is a numpy function that defines it, and a plan that does the same on a device, in static buffers and without
the host; :class:`VerifyStep` is all of them in one CUDA graph.  docs/tree.md has the whole.
"""

from nbverify.tree.accept import AcceptPlan, accept_greedy, accept_sampled
from nbverify.tree.build import BuildPlan, build_from_children, build_tree, build_trees, tree_from_parents
from nbverify.tree.compact import CompactPlan, compact
from nbverify.tree.indices import IndicesPlan, prefix_indices
from nbverify.tree.masks import MaskPlan, tree_buffers
from nbverify.tree.planes import Plane
from nbverify.tree.step import VerifyStep
from nbverify.tree.trees import Tree, TreeBatch, check_parents

__all__ = [
    "AcceptPlan",
    "BuildPlan",
    "CompactPlan",
    "IndicesPlan",
    "MaskPlan",
    "Plane",
    "Tree",
    "TreeBatch",
    "VerifyStep",
    "accept_greedy",
    "accept_sampled",
    "build_from_children",
    "build_tree",
    "build_trees",
    "check_parents",
    "compact",
    "prefix_indices",
    "tree_buffers",
    "tree_from_parents",
]
