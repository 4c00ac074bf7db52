"""Quality of translations: BLEU and chrF with signatures, length ratio, repetition, and whether systems differ."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

RESAMPLES = 1000
SEED = 12345


@dataclass(frozen=True)
class Quality:
    """Corpus scores of detokenised text.

    bleu and chrf (chrF2) in 0..100; length_ratio: hypothesis words over reference words; repetition: share of words
    that equal the word before them.
    """

    bleu: float
    chrf: float
    length_ratio: float
    repetition: float
    bleu_signature: str
    chrf_signature: str

    def as_dict(self) -> dict[str, float | str]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """A system against a baseline in one metric.

    delta: system minus baseline; p_value: how often chance alone gives as large a difference, in 0..1; the intervals
    hold 95% of the resampled scores (centre, half width), delta_interval 95% of the resampled differences (low, high).
    """

    metric: str
    delta: float
    p_value: float
    system_interval: tuple[float, float]
    baseline_interval: tuple[float, float]
    delta_interval: tuple[float, float]
    signature: str

    def as_dict(self) -> dict[str, float | str | tuple[float, float]]:
        """For JSON."""
        return asdict(self)


def quality(hypotheses: Sequence[str], references: Sequence[str]) -> Quality:
    """Score line-aligned hypotheses against one reference each. Source: Post, 2018; Popovic, 2015."""
    bleu, chrf = BLEU(), CHRF()
    bleu_score = bleu.corpus_score(list(hypotheses), [list(references)])
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)])
    said = sum(len(line.split()) for line in hypotheses)
    wanted = sum(len(line.split()) for line in references)
    return Quality(
        bleu_score.score,
        chrf_score.score,
        said / wanted if wanted else 0.0,
        repetition(hypotheses),
        str(bleu.get_signature()),
        str(chrf.get_signature()),
    )


def repetition(lines: Sequence[str]) -> float:
    """The share of words that repeat the word before them in the same line."""
    words = [line.split() for line in lines]
    pairs = sum(max(0, len(line) - 1) for line in words)
    equal = sum(a == b for line in words for a, b in pairwise(line))
    return equal / pairs if pairs else 0.0


def paired_bootstrap(
    system: Sequence[str], baseline: Sequence[str], references: Sequence[str], *, resamples: int = RESAMPLES
) -> list[Difference]:
    """Whether two systems differ on the same lines: BLEU and chrF of resampled test sets, with a fixed seed.

    Raises `ValueError` where the three differ in length. Source: Koehn, 2004; implementation of sacreBLEU (Post, 2018).
    """
    if not len(system) == len(baseline) == len(references):
        raise ValueError(f"{len(system)} and {len(baseline)} translations for {len(references)} references")
    named: list[tuple[str, Sequence[str]]] = [("baseline", list(baseline)), ("system", list(system))]
    metrics = {"BLEU": BLEU(references=[list(references)]), "chrF": CHRF(references=[list(references)])}
    with _fixed_seed():
        signatures, scores = PairedTest(named, metrics, None, test_type="bs", n_samples=resamples)()
    intervals = (_interval(metric, system, baseline, resamples) for metric in metrics.values())
    return [
        _difference(name, scores[name], interval, str(signature))
        for (name, signature), interval in zip(signatures.items(), intervals, strict=True)
    ]


def _interval(
    metric: BLEU | CHRF, system: Sequence[str], baseline: Sequence[str], resamples: int
) -> tuple[float, float]:
    """What 95% of the differences lie in when the lines are drawn anew; the draws are those of the test itself."""
    n = len(system)
    if not n:
        return (0.0, 0.0)
    drawn = np.random.default_rng(SEED).choice(n, size=(resamples, n), replace=True)
    counts = np.stack([np.bincount(lines, minlength=n) for lines in drawn]).astype(np.float64)

    def scores(lines: Sequence[str]) -> np.ndarray:
        # The statistics of a text are the sums of those of its lines: no line is read again.
        sums = counts @ np.array(metric._extract_corpus_statistics(list(lines), None), dtype=np.float64)
        return np.array([metric._compute_score_from_stats(list(row)).score for row in sums])

    low, high = np.percentile(scores(system) - scores(baseline), (2.5, 97.5))
    return (float(low), float(high))


def _difference(metric: str, results: Sequence[Any], interval: tuple[float, float], signature: str) -> Difference:
    """From sacreBLEU's results of baseline and system, in this order."""
    baseline, system = results
    delta = float(system.score - baseline.score)
    return Difference(
        metric,
        delta,
        # sacreBLEU gives the smallest p to equal scores, if no resample differs: "not attributed to chance".
        float(system.p_value) if delta else 1.0,
        (float(system.mean), float(system.ci)),
        (float(baseline.mean), float(baseline.ci)),
        interval,
        signature,
    )


@contextmanager
def _fixed_seed() -> Iterator[None]:
    """sacreBLEU takes the seed of its resampling from the environment alone."""
    name = "SACREBLEU_SEED"
    before = os.environ.get(name)
    os.environ[name] = str(SEED)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
