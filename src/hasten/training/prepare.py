"""From a spec to what the loop needs: tokenizer, encoded pairs that can be learned, counts of those that cannot."""

import os
from collections import Counter
from pathlib import Path

import torch

from hasten.data.alignment import check_fertilities, read_fertilities
from hasten.data.batch import Pair
from hasten.data.corpus import Corpus, decode_lines
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.pretrained import resolve
from hasten.spec import DataSpec, RunSpec, TokenizerSpec
from hasten.training.checkpoint import TOKENIZER
from hasten.training.finetune import teacher_of
from hasten.training.loop import Task


def check(spec: RunSpec) -> None:
    """Find the mistakes that need no data before minutes go into data: `UserError` names the first."""
    _check_use_of_fertilities(spec)
    for name in (spec.tokenizer.from_model, spec.training.init_from, teacher_of(spec)):
        if name is not None:
            resolve(name)
    try:
        with torch.device("meta"):
            model = spec.model.build(spec.tokenizer.vocab_size)
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"[model] describes a model that cannot be built: {reason}") from error
    if model.longest is not None and model.longest < spec.data.max_tokens:
        raise UserError(
            f"attention with a max_length takes at most {max(0, model.longest)} tokens of a sentence in this model, "
            f"data.max_tokens is {spec.data.max_tokens}; raise max_length, set data.max_tokens="
            f"{max(1, model.longest)}, or choose a kind without a limit (full, local, performer, ...)"
        )
    _check_memory(sum(parameter.numel() for parameter in model.parameters()))


def check_places(data: DataSpec) -> None:
    """`UserError` where a run that is to go on would look for its text in the wrong place, from another directory."""
    for name in ("path", "distilled", "fertilities"):
        place = getattr(data, name)
        if place is not None and not Path(place).is_absolute() and not Path(place).exists():
            raise UserError(
                f"data.{name} {place} is not below {Path.cwd()}; go on from the directory where the run began, or give "
                f"data.{name}=PATH"
            )


def _check_use_of_fertilities(spec: RunSpec) -> None:
    """`UserError` where a model that learns from fertilities has none, or another one has."""
    kind, needed = spec.model.kind, getattr(spec.model, "needs_fertilities", False)
    if needed and spec.data.fertilities is None:
        raise UserError(f"a model of kind {kind!r} learns from data.fertilities; name a file that `hasten align` made")
    if spec.data.fertilities is not None and not needed:
        raise UserError(f"a model of kind {kind!r} has no use for data.fertilities; leave it out")


def _check_memory(n_parameters: int) -> None:
    """`UserError` where weights, gradients and the optimizer's two moments cannot fit this machine."""
    if not hasattr(os, "sysconf") or torch.cuda.is_available():
        return
    needed, there = 16 * n_parameters, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UserError(
            f"[model] has {n_parameters:,} parameters and needs {needed / 2**30:,.0f} GiB to train, "
            f"this machine has {there / 2**30:,.0f}; make d_model, d_ff, the layers or tokenizer.vocab_size smaller"
        )


def make_tokenizer(spec: TokenizerSpec, corpus: Corpus) -> Tokenizer:
    """The tokenizer of another model, or a new one learnt from both sides of the training text."""
    if spec.from_model is not None:
        return Tokenizer.load(resolve(spec.from_model) / TOKENIZER)
    source, target = corpus.pairs("train")
    return Tokenizer.train([*source, *target], spec.vocab_size, threads=2)


def make_task(spec: RunSpec, corpus: Corpus, tokenizer: Tokenizer) -> tuple[Task, Counter[str]]:
    """Encoded training pairs and validation lines, with the number of pairs left out for each reason.

    Labels are read for models that learn from them, and must fit the pairs that are kept.
    """
    _check_use_of_fertilities(spec)
    source, target = corpus.pairs("train")
    if spec.data.distilled is not None:
        target = read_distilled(spec.data, len(source))
    labels = None if spec.data.fertilities is None else read_fertilities(spec.data.fertilities, len(source))
    pairs: list[Pair] = []
    kept: list[list[int]] = []
    counts: Counter[str] = Counter()
    for number, (s, t) in enumerate(zip(source, target, strict=True)):
        pair = (tokenizer.encode(s), tokenizer.encode_target(t))
        reason = _reason_against(pair, spec)
        if labels is not None and not reason and not labels[number]:
            reason = "without fertilities"
        if reason:
            counts[reason] += 1
            continue
        pairs.append(pair)
        if labels is not None:
            place = f"data.fertilities {spec.data.fertilities}, line {number + 1}"
            check_fertilities(labels[number], len(pair[0]), len(pair[1]), place)
            kept.append(labels[number])
    counts["kept"] = len(pairs)
    valid = corpus.pairs("valid") if "valid" in corpus.splits else ([], [])
    return Task(pairs, *valid, None if labels is None else kept), counts


def _reason_against(pair: Pair, spec: RunSpec) -> str:
    """Why a pair is left out; nothing where it is not."""
    if not all(pair):
        return "empty"
    if max(map(len, pair)) > spec.data.max_tokens:
        return "longer than data.max_tokens"
    return "" if spec.model.learnable(*pair) else "impossible for this model"


def read_distilled(spec: DataSpec, n_lines: int) -> list[str]:
    """The lines of `data.distilled`, as many as there are training sources."""
    assert spec.distilled is not None
    return read_targets(spec.distilled, f"data.distilled {spec.distilled}", spec.path, n_lines)


def sides(corpus: Corpus, distilled: Path | None) -> tuple[list[str], list[str]]:
    """The training lines of both sides, those of `--distilled` in the place of the targets."""
    source, target = corpus.pairs("train")
    if distilled is not None:
        target = read_targets(distilled, f"--distilled {distilled}", corpus.directory, len(source))
    return source, target


def read_targets(path: str | Path, name: str, data: str | Path, n_lines: int) -> list[str]:
    """The lines of a distilled file, as many as the training sources of `data`; errors call it `name`."""
    try:
        lines = decode_lines(Path(path).read_bytes(), path)
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}; `hasten distill` makes it") from error
    if len(lines) != n_lines:
        raise UserError(
            f"{name} has {len(lines)} lines, the training split of {data} {n_lines}; "
            "line i must translate line i: let `hasten distill` finish, with that split's source as --src"
        )
    return lines
