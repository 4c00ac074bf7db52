"""Models learn a real task, words to phonemes, through the path that users take.

Measured on an AMD EPYC without bfloat16 units, phoneme error rates after 200 updates: 0.369 autoregressive; 0.318
one-pass; 0.381 by the NAT, whose labels are what the autoregressive model reads, and 0.350 where that model chooses
among ten candidates; 0.508, 0.464 and 0.454 by Mask-Predict in 1, 4 and 10 passes; 0.430 by refinement, which learnt
in two passes. What they reach after longer training is in docs/pronunciation.md.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from hasten import spec as specs
from hasten.data.alignment import write_fertilities
from hasten.data.corpus import Corpus, write_corpus
from hasten.data.pronunciation import LANGUAGES, pronunciations
from hasten.data.tokenizer import Tokenizer
from hasten.decoding.masked import MaskedSpec
from hasten.fields import Spec
from hasten.models import GenerationModel
from hasten.models.refinement import RefinementDecoding
from hasten.training import loop, prepare
from hasten.training.teacher_alignment import attention_fertilities
from hasten.translator import Translator

pytestmark = pytest.mark.slow

HELD_OUT, LEARNT = 600, 12_000
SHAPES = {
    "autoregressive": {"decoder_layers": 2},
    "ctc": {"refiner_layers": 1, "upsample": 2},
    "nat": {"decoder_layers": 2, "label_smoothing": 0.0},
    "refinement": {"decoder_layers": 2, "label_smoothing": 0.0, "train_iterations": 2},
    "mask_predict": {"decoder_layers": 2, "label_smoothing": 0.0},
}


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    entries = iter(pronunciations())
    splits = {"valid": list(islice(entries, HELD_OUT)), "train": list(islice(entries, LEARNT))}
    return write_corpus(tmp_path_factory.mktemp("dictionary"), LANGUAGES, splits, {})


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Fewest insertions, deletions and substitutions. Source: Wagner and Fischer, 1974."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def few(task: loop.Task, n: int) -> loop.Task:
    """The first of the words that are held out."""
    return dataclasses.replace(task, valid_source=task.valid_source[:n], valid_target=task.valid_target[:n])


def error_rate(model: GenerationModel, tokenizer, task: loop.Task) -> float:
    return wrong_share(Translator(model, tokenizer).translate(task.valid_source), task)


def wrong_share(said: Sequence[str], task: loop.Task) -> float:
    wrong = sum(edits(a.split(), b.split()) for a, b in zip(said, task.valid_target, strict=True))
    return wrong / sum(len(line.split()) for line in task.valid_target)


def test_edits_are_counted_as_by_hand():
    assert [edits("kitten", "sitting"), edits("", "abc"), edits("abc", ""), edits("ab", "ab")] == [3, 3, 3, 0]


def test_no_word_is_both_learnt_and_asked(dictionary):
    assert not set(dictionary.documents("train")) & set(dictionary.documents("valid"))


def learn(
    kind: str, dictionary: Corpus, directory: Path, **data: str
) -> tuple[specs.RunSpec, GenerationModel, Tokenizer, loop.Task]:
    """A small model after so many steps, with what it was made from; untrained, it says next to nothing right."""
    shape = {"d_model": 64, "n_heads": 4, "d_ff": 256, "encoder_layers": 2, "dropout": 0.05}
    training = {"steps": 200, "batch_tokens": 1000, "learning_rate": 3e-3, "warmup": 30,
                "decay": 0.5, "save_every": 200, "average": 1, "validate_sentences": 0}  # fmt: skip
    spec = specs.parse(
        {
            "data": {"path": str(dictionary.directory), **data},
            "tokenizer": {"vocab_size": 375},
            "model": {"kind": kind, **shape, **SHAPES[kind]},
            "training": training,
        },
        "test",
    )
    tokenizer = prepare.make_tokenizer(spec.tokenizer, dictionary)
    task, counts = prepare.make_task(spec, dictionary, tokenizer)
    assert counts["kept"] > 0.99 * len(dictionary.pairs("train")[0])
    untrained = spec.model.build(tokenizer.vocab_size).eval()
    assert error_rate(untrained, tokenizer, few(task, 100)) > 0.8
    return spec, loop.train(spec, directory, tokenizer, task), tokenizer, task


@pytest.fixture(scope="module")
def teacher(dictionary: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Translator:
    """The autoregressive model, which others learn from."""
    spec, model, tokenizer, _ = learn("autoregressive", dictionary, tmp_path_factory.mktemp("teacher"))
    return Translator(model, tokenizer, spec)


def valid(dictionary: Corpus) -> loop.Task:
    return loop.Task([], *dictionary.pairs("valid"))


def test_an_autoregressive_model_learns_to_pronounce(teacher: Translator, dictionary: Corpus):
    reached = error_rate(teacher.model, teacher.tokenizer, valid(dictionary))
    print(f"autoregressive: phoneme error rate {reached:.3f}")
    assert reached <= 0.42


def test_a_one_pass_model_learns_to_pronounce(dictionary: Corpus, tmp_path: Path):
    _, learnt, tokenizer, task = learn("ctc", dictionary, tmp_path / "run")
    reached = error_rate(learnt, tokenizer, task)
    print(f"ctc: phoneme error rate {reached:.3f}")
    assert reached <= 0.36


def test_a_nat_learns_to_pronounce_and_its_teacher_finds_better_candidates(teacher, dictionary: Corpus, tmp_path: Path):
    spelt, said = dictionary.pairs("train")
    pairs = [(teacher.tokenizer.encode(a), teacher.tokenizer.encode(b)) for a, b in zip(spelt, said, strict=True)]
    labels = tmp_path / "fertilities"
    write_fertilities(labels, attention_fertilities(teacher.model, pairs))
    _, learnt, tokenizer, task = learn("nat", dictionary, tmp_path / "run", fertilities=str(labels))
    nat, words = Translator(learnt, tokenizer), task.valid_source
    outputs = [nat.translate(words), nat.translate(words, beam=10, rescorer=teacher)]
    # Empty texts, outputs of spaces alone, are scored, too.
    thought = [sum(teacher.score(words, output)) / len(words) for output in outputs]
    reached = [wrong_share(output, task) for output in outputs]
    print(f"nat: phoneme error rate {reached[0]:.3f}, of 10 candidates the teacher's choice {reached[1]:.3f}")
    print(f"nat: the teacher's mean log probability {thought[0]:.3f} and {thought[1]:.3f}")
    assert reached[0] <= 0.43
    assert reached[1] <= reached[0] - 0.015  # measured: 0.031 better
    assert thought[1] >= thought[0]


def by_passes(kind: str, dictionary: Corpus, directory: Path, decoding: Callable[[int], Spec]) -> dict[int, float]:
    """Error rates of a learnt model in 1, 4 and 10 passes, with the settings of decoding for so many."""
    spec, learnt, tokenizer, task = learn(kind, dictionary, directory)
    reached = {}
    for passes in (1, 4, 10):
        model = dataclasses.replace(spec.model, decoding=decoding(passes)).build(tokenizer.vocab_size).eval()
        model.load_state_dict(learnt.state_dict())
        reached[passes] = error_rate(model, tokenizer, task)
        print(f"{kind}, {passes} passes: phoneme error rate {reached[passes]:.3f}")
    return reached


def test_refinement_learns_to_pronounce_and_further_passes_spoil_nothing(dictionary, tmp_path: Path):
    # That further passes mend something takes longer to learn: see docs/pronunciation.md.
    settings = lambda passes: RefinementDecoding(iterations=passes, adaptive=False)  # noqa: E731
    reached = by_passes("refinement", dictionary, tmp_path / "run", settings)
    assert reached[1] <= 0.49
    assert reached[4] <= reached[1] + 0.01
    assert reached[10] <= reached[4] + 0.01


def test_mask_predict_learns_to_pronounce_and_says_it_better_in_more_passes(dictionary, tmp_path: Path):
    settings = lambda passes: MaskedSpec(iterations=passes)  # noqa: E731
    reached = by_passes("mask_predict", dictionary, tmp_path / "run", settings)
    assert reached[4] <= reached[1] - 0.011  # measured: 0.044 better
    assert reached[10] <= reached[4] + 0.002  # measured: 0.011 better
    assert reached[10] <= 0.5
