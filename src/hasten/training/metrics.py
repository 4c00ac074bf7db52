"""Quality of translations: BLEU with its signature, chrF, length ratio, repetition."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF


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
