"""Split a corpus by document and keep near-duplicates of training sentences out of the held-out splits."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hasten.data.corpus import Pair

WORD = re.compile(r"\w+")
HELD_OUT = ("valid", "test")
LARGEST_DOCUMENT = 0.1
"""A document above this share of a held-out split's size stays in training, so that no one document rules the split."""


class Sizes(NamedTuple):
    """Pairs wanted in the held-out splits."""

    valid: int
    test: int


@dataclass
class Splits:
    """The finished splits, and how many pairs each rule took out of the held-out ones."""

    pairs: dict[str, list[Pair]]
    removed: dict[str, dict[str, int]] = field(default_factory=dict)


def split_corpus(
    groups: dict[str, list[Pair]], sizes: Sizes, seed: int, overlap: float = 0.7, outside: Sequence[str] = ()
) -> Splits:
    """Split groups of pairs (one group a source) into train, valid, test and, for `outside` groups, test-ood.

    A document goes to one split as a whole, chosen by a hash of its key and the seed, in proportion to the sizes of the
    groups. An English string found in several documents is kept once: in train when one of them is there, with its most
    frequent translation in that split. Held-out pairs close to a training pair go (`near_duplicates`); as that share is
    only known afterwards, the choice is made a second time with the sizes scaled by it.
    """
    inside = {name: pairs for name, pairs in groups.items() if name not in outside}
    foreign = [pair for name in groups if name in outside for pair in groups[name]]
    wanted = sizes
    for last in (False, True):
        where = choose_documents(inside, wanted, seed)
        splits, elsewhere = _unique_sources([pair for pairs in inside.values() for pair in pairs], foreign, where)
        removed = _remove_near_duplicates(splits, overlap)
        if not last:
            wanted = Sizes(
                *(_scaled(size, len(splits.get(name, ()))) for name, size in zip(HELD_OUT, sizes, strict=True))
            )
    return Splits(splits, {name: {"source elsewhere": elsewhere[name], **removed[name]} for name in removed})


def _scaled(wanted: int, found: int) -> int:
    return min(2 * wanted, wanted * wanted // found) if found else wanted


def choose_documents(groups: dict[str, list[Pair]], sizes: Sizes, seed: int) -> dict[str, str]:
    """Name the split of every document that leaves training.

    Each group fills its proportional share of a split with documents in the order of their hash, skipping those that no
    longer fit; what the groups could not fill is then filled from all documents in the same order.
    """
    weights = {name: Counter(pair.document for pair in _distinct(pairs)) for name, pairs in groups.items()}
    total = sum(sum(documents.values()) for documents in weights.values())
    order = {name: sorted(documents, key=lambda document: _hash(document, seed)) for name, documents in weights.items()}
    everything = {document: weight for documents in weights.values() for document, weight in documents.items()}
    overall = sorted(everything, key=lambda document: _hash(document, seed))
    chosen: dict[str, str] = {}
    for split, size in zip(HELD_OUT, sizes, strict=True):
        largest = max(1, int(LARGEST_DOCUMENT * size))
        for name, documents in weights.items():
            quota = size * sum(documents.values()) / max(1, total)
            _fill(chosen, split, order[name], documents, quota, largest)
        filled = sum(everything[document] for document, where in chosen.items() if where == split)
        _fill(chosen, split, overall, everything, size - filled, largest)
    return chosen


def _fill(
    chosen: dict[str, str], split: str, order: list[str], weights: dict[str, int], quota: float, largest: int
) -> None:
    for document in order:
        if document not in chosen and weights[document] <= min(largest, quota):
            chosen[document] = split
            quota -= weights[document]


def _distinct(pairs: Iterable[Pair]) -> set[Pair]:
    return {Pair(pair.source, "", pair.document) for pair in pairs}


def _hash(document: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{document}".encode()).hexdigest()


def _unique_sources(
    inside: Sequence[Pair], foreign: Sequence[Pair], where: dict[str, str]
) -> tuple[dict[str, list[Pair]], Counter[str]]:
    """One pair for each source string, in the first of train, test, valid, test-ood that holds it.

    Also counts the source strings each split lost to an earlier one.
    """
    by_split: dict[str, list[Pair]] = {name: [] for name in ("train", "test", "valid")}
    for pair in inside:
        by_split[where.get(pair.document, "train")].append(pair)
    if foreign:
        by_split["test-ood"] = list(foreign)
    seen: set[str] = set()
    lost: Counter[str] = Counter()
    for name, pairs in by_split.items():
        lost[name] = len({pair.source for pair in pairs} & seen)
        by_split[name] = _most_frequent(pair for pair in pairs if pair.source not in seen)
        seen.update(pair.source for pair in by_split[name])
    return {name: by_split[name] for name in ("train", "valid", "test", "test-ood") if name in by_split}, lost


def _most_frequent(pairs: Iterable[Pair]) -> list[Pair]:
    """For each source string the first pair with its most frequent target, in order of first appearance."""
    votes: dict[str, dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for pair in pairs:
        votes[pair.source][pair.target].append(pair)
    return [max(targets.values(), key=len)[0] for targets in votes.values()]


def _remove_near_duplicates(splits: dict[str, list[Pair]], overlap: float) -> dict[str, dict[str, int]]:
    """Filter test and test-ood against train, and valid against all three; counts for each split and rule."""
    removed = {}
    for name, against in (
        ("test-ood", ("train",)),
        ("test", ("train",)),
        ("valid", ("train", "test", "test-ood")),
    ):
        if name in splits:
            other = [pair for split in against for pair in splits.get(split, ())]
            splits[name], removed[name] = without_near_duplicates(splits[name], other, overlap)
    return removed


def without_near_duplicates(
    held_out: Sequence[Pair], training: Sequence[Pair], overlap: float = 0.7
) -> tuple[list[Pair], dict[str, int]]:
    """Drop held-out pairs that a training pair repeats on either side, with the count for each rule.

    First go equal strings, then near-duplicates (`near_duplicates`) by the source side, then by the target side.
    """
    kept = list(held_out)
    counts = {"before": len(kept)}
    for rule, side in (("same source", "source"), ("same target", "target")):
        known = {getattr(pair, side) for pair in training}
        kept, before = [pair for pair in kept if getattr(pair, side) not in known], len(kept)
        counts[rule] = before - len(kept)
    for rule, side in (("near source", "source"), ("near target", "target")):
        close = near_duplicates(
            [getattr(pair, side) for pair in kept], [getattr(pair, side) for pair in training], overlap
        )
        kept = [pair for index, pair in enumerate(kept) if index not in close]
        counts[rule] = len(close)
    return kept, counts


def near_duplicates(sentences: Sequence[str], training: Iterable[str], overlap: float = 0.7) -> set[int]:
    """Indices of sentences of which one single training sentence holds at least `overlap` of the word trigrams.

    With T(s) the set of casefolded word trigrams of s: |T(s) ∩ T(t)| >= overlap |T(s)| for some t. A sentence under
    three words is compared as a whole, by its casefolded words.
    """
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes = []
    for index, sentence in enumerate(sentences):
        grams = trigrams(sentence)
        sizes.append(len(grams))
        for gram in grams:
            holders[gram].append(index)
    close: set[int] = set()
    for sentence in training:
        shared: Counter[int] = Counter()
        for gram in trigrams(sentence):
            if gram in holders:
                shared.update(holders[gram])
        close.update(index for index, count in shared.items() if count >= overlap * sizes[index])
    return close


def trigrams(sentence: str) -> set[tuple[str, ...]]:
    """Casefolded word trigrams; a sentence under three words gives one tuple of all its words."""
    words = WORD.findall(sentence.casefold())
    if len(words) < 3:
        return {tuple(words)}
    return set(zip(words, words[1:], words[2:]))
