"""Scores against definitions written out here, and against sacreBLEU's own command line."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU

from hasten.training.metrics import SEED, Quality, paired_bootstrap, quality, repetition

REFERENCES = ["the cat sat on the mat today", "a dog barked at the moon all night", "we went home early in the rain"]
CLOSE = ["the cat sat on the mat today", "a dog barked at a moon all night", "we went home early in rain"]
POOR = ["cat the mat mat", "dog dog moon the night", "early we in rain"]

words = st.lists(st.sampled_from(["a", "b", "c."]), max_size=6).map(" ".join)


def repetition_by_hand(lines: list[str]) -> float:
    equal = total = 0
    for line in lines:
        row = line.split()
        for i in range(1, len(row)):
            total += 1
            if row[i] == row[i - 1]:
                equal += 1
    return equal / total if total else 0.0


def bleu_by_hand(hypotheses: list[str], references: list[str]) -> float:
    """Papineni et al., 2002, for text that the tokenisation leaves as it is and four orders that all match."""
    said, wanted = (sum(len(line.split()) for line in lines) for lines in (hypotheses, references))
    precisions = []
    for order in range(1, 5):
        matched = total = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            ours, theirs = ngrams(hypothesis.split(), order), ngrams(reference.split(), order)
            matched += sum((ours & theirs).values())
            total += sum(ours.values())
        precisions.append(matched / total)
    brevity = min(1.0, math.exp(1 - wanted / said))
    return 100 * brevity * math.prod(precisions) ** 0.25


def chrf_by_hand(hypotheses: list[str], references: list[str]) -> float:
    """Popovic, 2015: F2 of the mean precision and recall over characters' 1- to 6-grams, spaces left out."""
    precisions, recalls = [], []
    for order in range(1, 7):
        matched = said = wanted = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            ours, theirs = (ngrams(list(line.replace(" ", "")), order) for line in (hypothesis, reference))
            matched += sum((ours & theirs).values())
            said += sum(ours.values())
            wanted += sum(theirs.values())
        precisions.append(matched / said)
        recalls.append(matched / wanted)
    precision, recall = sum(precisions) / 6, sum(recalls) / 6
    return 100 * 5 * precision * recall / (4 * precision + recall)


def ngrams(items: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(items[i : i + order]) for i in range(len(items) - order + 1))


@given(st.lists(words, max_size=5))
def test_repetition_is_the_share_of_words_that_equal_the_one_before(lines: list[str]):
    assert repetition(lines) == pytest.approx(repetition_by_hand(lines))


def test_repetition_does_not_reach_over_the_end_of_a_line():
    assert repetition(["a", "a", "a b", "b"]) == 0


@pytest.mark.parametrize("lines", [[], [""], ["word"], ["", "  "]])
def test_text_without_two_words_repeats_nothing(lines: list[str]):
    assert repetition(lines) == 0


def test_bleu_and_chrf_are_their_definitions():
    scores = quality(CLOSE, REFERENCES)
    assert scores.bleu == pytest.approx(bleu_by_hand(CLOSE, REFERENCES))
    assert scores.chrf == pytest.approx(chrf_by_hand(CLOSE, REFERENCES))


def test_scores_are_those_of_the_sacrebleu_command(tmp_path: Path):
    # real punctuation, so that the tokenisation counts
    references = ["Öffnen Sie die Datei „a.txt“, bitte.", "Es kostet 3,50 Euro (netto)."]
    hypotheses = ["Öffnen Sie bitte die Datei „a.txt“.", "Es kostet 3.50 Euro (netto)."]
    for name, lines in (("ref", references), ("hyp", hypotheses)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "hyp", "-m", "bleu", "chrf", "-b", "-w", "6"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    scores = quality(hypotheses, references)
    assert [scores.bleu, scores.chrf] == pytest.approx(json.loads(shown), abs=1e-5)


def test_signatures_name_tokenisation_and_version():
    scores = quality(CLOSE, REFERENCES)
    assert scores.bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert scores.chrf_signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")


def test_a_perfect_translation_has_perfect_scores():
    assert quality(REFERENCES, REFERENCES).as_dict() | {"bleu_signature": "", "chrf_signature": ""} == {
        "bleu": pytest.approx(100), "chrf": pytest.approx(100), "length_ratio": 1, "repetition": 0,
        "bleu_signature": "", "chrf_signature": "",
    }  # fmt: skip


def test_length_ratio_counts_words_of_the_whole_text():
    assert quality(["a b c", ""], ["a", "b"]).length_ratio == 3 / 2


def test_saying_nothing_scores_zero_without_an_error():
    scores = quality(["", ""], ["a b", "c d"])
    assert (scores.bleu, scores.chrf, scores.length_ratio, scores.repetition) == (0, 0, 0, 0)


def test_quality_is_plain_data():
    assert set(quality(CLOSE, REFERENCES).as_dict()) == set(Quality.__dataclass_fields__)


def bootstrap_by_hand(
    system: list[str], baseline: list[str], references: list[str], resamples: int
) -> tuple[float, list[float]]:
    """Koehn, 2004, as sacreBLEU reads it: scores of resampled test sets, each computed from its sentences anew.

    The p value, and the differences in order.
    """
    drawn = np.random.default_rng(SEED).choice(len(references), size=(resamples, len(references)), replace=True)

    def score(lines: list[str], rows) -> float:
        return BLEU().corpus_score([lines[i] for i in rows], [[references[i] for i in rows]]).score

    signed = [score(system, rows) - score(baseline, rows) for rows in drawn]
    differences = np.abs(signed)
    everything = range(len(references))
    real = abs(score(system, everything) - score(baseline, everything))
    return (np.sum(differences - differences.mean() > real) + 1) / (resamples + 1), sorted(signed)


def test_the_bootstrap_equals_scoring_every_resample_from_its_text():
    system, baseline = CLOSE * 4 + POOR, CLOSE * 2 + POOR * 3
    references = REFERENCES * 5
    found = paired_bootstrap(system, baseline, references, resamples=60)[0]
    p_value, differences = bootstrap_by_hand(system, baseline, references, 60)
    assert found.p_value == pytest.approx(p_value)
    low, high = found.delta_interval
    assert differences[1] <= low <= differences[2], "a fortieth of 60 is 1.5"
    assert differences[-3] <= high <= differences[-2]
    assert low < high
    assert found.delta == pytest.approx(quality(system, references).bleu - quality(baseline, references).bleu)


def test_a_system_does_not_differ_from_itself():
    for difference in paired_bootstrap(CLOSE * 5, CLOSE * 5, REFERENCES * 5, resamples=50):
        assert (difference.delta, difference.p_value, difference.delta_interval) == (0, 1, (0, 0))


def test_a_clearly_better_system_is_better_beyond_chance():
    better = paired_bootstrap(CLOSE * 20, POOR * 20, REFERENCES * 20)
    worse = paired_bootstrap(POOR * 20, CLOSE * 20, REFERENCES * 20)
    assert [difference.metric for difference in better] == ["BLEU", "chrF2"]
    for up, down in zip(better, worse, strict=True):
        assert up.delta == -down.delta > 0
        assert up.p_value == down.p_value < 0.01
        assert up.system_interval == down.baseline_interval
        assert up.delta_interval == pytest.approx([-bound for bound in reversed(down.delta_interval)])
        assert 0 < up.delta_interval[0] <= up.delta <= up.delta_interval[1]
        assert "|bs:1000|seed:12345|" in up.signature


def test_the_bootstrap_has_a_seed_of_its_own_and_leaves_the_users(monkeypatch: pytest.MonkeyPatch):
    arguments = (CLOSE * 2 + POOR, POOR * 2 + CLOSE, REFERENCES * 3)
    expected = paired_bootstrap(*arguments, resamples=40)
    monkeypatch.setenv("SACREBLEU_SEED", "77")
    assert paired_bootstrap(*arguments, resamples=40) == expected
    assert os.environ["SACREBLEU_SEED"] == "77"


def test_the_bootstrap_refuses_lines_that_do_not_belong_together():
    with pytest.raises(ValueError, match="2 and 3 translations for 3 references"):
        paired_bootstrap(CLOSE[:2], POOR, REFERENCES)
