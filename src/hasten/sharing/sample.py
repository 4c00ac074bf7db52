"""Sentences on which layers are compared."""

from collections.abc import Iterator, Sequence

from hasten.data.batch import Batch, Pair, pair_batch
from hasten.data.grouping import group_by_tokens
from hasten.data.tokenizer import Tokenizer


def spread(sources: Sequence[str], targets: Sequence[str], wanted: int) -> list[tuple[str, str]]:
    """At most `wanted` pairs, evenly spread, so that every document has its share; those with an empty side not."""
    pairs = [pair for pair in zip(sources, targets, strict=True) if all(side.strip() for side in pair)]
    count = min(wanted, len(pairs))
    return [pairs[i * len(pairs) // count] for i in range(count)]


def encode(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, longest: int) -> list[Pair]:
    """The pairs as ids, without those where a side has none or more than `longest`."""
    encoded = [(tokenizer.encode(source), tokenizer.encode(target)) for source, target in pairs]
    return [pair for pair in encoded if all(0 < len(side) <= longest for side in pair)]


def in_batches(pairs: Sequence[Pair], batch_tokens: int) -> Iterator[Batch]:
    """Padded batches of pairs of similar length: rows times the longer side stay within `batch_tokens`."""
    for group in group_by_tokens([max(map(len, pair)) + 1 for pair in pairs], batch_tokens):
        yield pair_batch([pairs[i] for i in group])
