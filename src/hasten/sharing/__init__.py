"""Shared attention: how alike layers attend, and which layers are to use the attention of others.

Source: Xiao et al., 2019.
"""

from hasten.sharing.divergence import Similarity, head_divergences, js_divergence, measure
from hasten.sharing.policy import blocks, group_similarity, of_sizes, sizes, source_map
from hasten.sharing.record import Record, read, write

__all__ = [
    "Record",
    "Similarity",
    "blocks",
    "group_similarity",
    "head_divergences",
    "js_divergence",
    "measure",
    "of_sizes",
    "read",
    "sizes",
    "source_map",
    "write",
]
