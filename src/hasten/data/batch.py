"""Padded batches of tensors, and the batches of an epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.data.grouping import group_by_tokens
from hasten.data.tokenizer import EOS, PAD

Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Batch:
    """Pairs of one step. `source` (B, S) ends in EOS; `target` (B, U) carries no begin or end symbol.

    The masks have the shapes of the ids and are True on real tokens; padding is on the right. `fertilities` (B, S),
    where there are labels: how many target tokens come from each source token and from its end symbol; 0 on padding.
    """

    source: Tensor
    source_mask: Tensor
    target: Tensor
    target_mask: Tensor
    fertilities: Tensor | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`."""
        there = {name: t.to(device, non_blocking=True) for name, t in vars(self).items() if t is not None}
        return Batch(**there)


def pad(rows: Sequence[Sequence[int]], filler: int = PAD) -> tuple[Tensor, Tensor]:
    """Ids (B, longest) padded with `filler` on the right, and their mask (True on real tokens)."""
    longest = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), longest), filler, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return ids, torch.arange(longest) < lengths[:, None]


def source_batch(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Source ids as every encoder sees them: EOS appended, padded. The only place where EOS is added to a source."""
    return pad([[*row, EOS] for row in rows])


def pair_batch(pairs: Sequence[Pair], fertilities: Sequence[Sequence[int]] | None = None) -> Batch:
    """One padded batch of (source ids, target ids), with a label for each pair where there are any."""
    source, target = source_batch([source for source, _ in pairs]), pad([target for _, target in pairs])
    if fertilities is None:
        return Batch(*source, *target)
    labels, labelled = pad(fertilities, filler=0)
    assert torch.equal(labelled, source[1]), "a label a source token, and one for its end"
    return Batch(*source, *target, labels)


def epoch_batches(pairs: Sequence[Pair], batch_tokens: int, generator: torch.Generator) -> list[list[int]]:
    """Batches of one epoch as lists of indices: shuffled pairs, bucketed by both lengths, in random order."""
    order = torch.randperm(len(pairs), generator=generator).tolist()
    # Sorting is stable: the shuffle decides among pairs of equal lengths.
    order.sort(key=lambda i: _shorter_side(*pairs[i]))
    lengths = [max(map(len, pairs[i])) + 1 for i in order]
    groups = group_by_tokens(lengths, batch_tokens)
    shuffled = torch.randperm(len(groups), generator=generator).tolist()
    return [[order[i] for i in groups[g]] for g in shuffled]


def _shorter_side(source: list[int], target: list[int]) -> int:
    """Brings pairs of one longer side together by their shorter side; to and fro, so that buckets meet where alike."""
    difference = len(target) - len(source)
    return difference if max(len(source), len(target)) % 2 else -difference


def endless_batches(pairs: Sequence[Pair], batch_tokens: int, seed: int, skip: int = 0) -> Iterator[list[int]]:
    """Batches of indices, epoch after epoch; a pure function of `seed`, so `skip` resumes anywhere."""
    epoch = 0
    while True:
        batches = epoch_batches(pairs, batch_tokens, torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        yield from batches[skip:]
        skip = max(0, skip - len(batches))
        epoch += 1
