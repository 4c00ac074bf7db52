"""Quality of translations: BLEU and chrF with signatures, length ratio, repetition, and whether systems differ."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

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
    hold 95% of the resampled scores (centre, half width).
    """

    metric: str
    delta: float
    p_value: float
    system_interval: tuple[float, float]
    baseline_interval: tuple[float, float]
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
    return [_difference(name, scores[name], str(signature)) for name, signature in signatures.items()]


def _difference(metric: str, results: Sequence[Any], signature: str) -> Difference:
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
