"""What is decoded at once: rows of similar length."""

from collections.abc import Sequence


def group_by_tokens(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in groups of similar length whose padded size (rows x longest) stays within `batch_tokens`.

    A single item longer than `batch_tokens` forms a group of its own. Ties keep the order of the input.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
