"""Split a corpus by document and keep near-duplicates of training sentences out of the held-out splits."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hasten.data.corpus import Pair

WORD = re.compile(r"\w+")
HELD_OUT = ("valid", "test")
LARGEST_DOCUMENT = 0.1
"""A document above this share of a held-out split stays in training, unless half of all documents are as large."""

LONG_ENOUGH = 5
"""Trigrams from which a sentence is too specific to stand in another by chance."""


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
    groups: dict[str, list[Pair]],
    sizes: Sizes,
    seed: int,
    overlap: float = 0.7,
    outside: Sequence[str] = (),
    one_target: bool = True,
) -> Splits:
    """Split groups of pairs (one group a source) into train, valid, test and, for `outside` groups, test-ood.

    A document goes to one split as a whole, chosen by a hash of its key and the seed, in proportion to the sizes of the
    groups. A source string found in several splits stays in one, in train before the others; with `one_target` it keeps
    only its most frequent translation there, as it always does outside train. Held-out pairs close to a training pair
    go (`near_duplicates`); as their share is only known afterwards, the choice is made twice, then with scaled sizes.
    """
    inside = {name: pairs for name, pairs in groups.items() if name not in outside}
    foreign = [pair for name in groups if name in outside for pair in groups[name]]
    wanted = sizes
    for last in (False, True):
        by_split = _by_split(inside, foreign, choose_documents(inside, wanted, seed))
        splits, elsewhere = _unique_sources(by_split, one_target)
        removed = _remove_near_duplicates(splits, overlap)
        if not last:
            found = Sizes(*(len(splits[name]) for name in HELD_OUT))
            wanted = Sizes(_scaled(sizes.valid, found.valid), _scaled(sizes.test, found.test))
    return Splits(splits, {name: {"source elsewhere": elsewhere[name], **removed[name]} for name in removed})


def _scaled(wanted: int, found: int) -> int:
    """The size to ask for so that about `wanted` pairs stay, at most twice as many."""
    return min(2 * wanted, wanted * wanted // found) if found else wanted


def choose_documents(groups: dict[str, list[Pair]], sizes: Sizes, seed: int) -> dict[str, str]:
    """Name the split of every document that leaves training.

    Each group fills its proportional share of a split with documents in the order of their hash, skipping those that no
    longer fit; what the groups could not fill is then filled from all documents in the same order.
    """
    weights = {name: _document_weights(pairs) for name, pairs in groups.items()}
    total = sum(sum(documents.values()) for documents in weights.values())
    order = {name: sorted(documents, key=lambda document: _hash(document, seed)) for name, documents in weights.items()}
    everything = {document: weight for documents in weights.values() for document, weight in documents.items()}
    typical = sorted(everything.values())[len(everything) // 2] if everything else 1
    overall = sorted(everything, key=lambda document: _hash(document, seed))
    chosen: dict[str, str] = {}
    for split, size in zip(HELD_OUT, sizes, strict=True):
        largest = max(typical, int(LARGEST_DOCUMENT * size))
        for name, documents in weights.items():
            quota = size * sum(documents.values()) / max(1, total)
            _fill(chosen, split, order[name], documents, quota, largest)
        filled = sum(everything[document] for document, where in chosen.items() if where == split)
        _fill(chosen, split, overall, everything, size - filled, largest)
    return chosen


def _document_weights(pairs: Iterable[Pair]) -> Counter[str]:
    """Distinct source strings of every document."""
    return Counter(document for document, _ in {(pair.document, pair.source): None for pair in pairs})


def _fill(
    chosen: dict[str, str], split: str, order: list[str], weights: dict[str, int], quota: float, largest: int
) -> None:
    for document in order:
        if document not in chosen and weights[document] <= min(largest, quota):
            chosen[document] = split
            quota -= weights[document]


def _hash(document: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{document}".encode()).hexdigest()


def _by_split(inside: dict[str, list[Pair]], foreign: Sequence[Pair], where: dict[str, str]) -> dict[str, list[Pair]]:
    by_split: dict[str, list[Pair]] = {name: [] for name in ("train", "valid", "test")}
    for pairs in inside.values():
        for pair in pairs:
            by_split[where.get(pair.document, "train")].append(pair)
    if foreign:
        by_split["test-ood"] = list(foreign)
    return by_split


def _unique_sources(by_split: dict[str, list[Pair]], one_target: bool) -> tuple[dict[str, list[Pair]], Counter[str]]:
    """Keep each source string only in the first of train, test, valid and test-ood that holds it.

    Also counts the source strings each split lost to an earlier one.
    """
    unique: dict[str, list[Pair]] = {}
    seen: set[str] = set()
    lost: Counter[str] = Counter()
    for name in ("train", "test", "valid", "test-ood"):
        pairs = by_split.get(name, [])
        lost[name] = len({pair.source for pair in pairs} & seen)
        choose = _most_frequent if one_target or name != "train" else _distinct
        unique[name] = choose(pair for pair in pairs if pair.source not in seen)
        seen.update(pair.source for pair in unique[name])
    return {name: unique[name] for name in by_split}, lost


def _distinct(pairs: Iterable[Pair]) -> list[Pair]:
    """The first of equal pairs, whatever their document."""
    first: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        first.setdefault((pair.source, pair.target), pair)
    return list(first.values())


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
    return {index for index, _ in _coverings(sentences, training, overlap)}


def covering_sentences(sentences: Sequence[str], training: Sequence[str], overlap: float = 0.7) -> set[int]:
    """Indices of the training sentences that make some sentence a near-duplicate.

    As in `near_duplicates`, but a sentence of fewer than `LONG_ENOUGH` trigrams must also hold `overlap` of those of
    the training sentence: a held-out "He said that" does not cost the training text every sentence with these words.
    """
    covering = set()
    for index, training_index in _coverings(sentences, training, overlap):
        own, other = trigrams(sentences[index]), trigrams(training[training_index])
        if len(own) >= LONG_ENOUGH or len(own & other) >= overlap * len(other):
            covering.add(training_index)
    return covering


def _coverings(sentences: Sequence[str], training: Iterable[str], overlap: float) -> Iterator[tuple[int, int]]:
    """Index pairs (sentence, training sentence that covers it), by an inverted index over the sentences."""
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    needed = []
    for index, sentence in enumerate(sentences):
        grams = trigrams(sentence)
        needed.append(overlap * len(grams))
        for gram in grams:
            holders[gram].append(index)
    for training_index, sentence in enumerate(training):
        shared: Counter[int] = Counter()
        for gram in trigrams(sentence):
            if gram in holders:
                shared.update(holders[gram])
        for index, count in shared.items():
            if count >= needed[index]:
                yield index, training_index


def trigrams(sentence: str) -> set[tuple[str, ...]]:
    """Casefolded word trigrams; a sentence under three words gives one tuple of all its words."""
    words = WORD.findall(sentence.casefold())
    if len(words) < 3:
        return {tuple(words)}
    return set(zip(words, words[1:], words[2:], strict=False))
