"""From a spec to what the loop needs: tokenizer, encoded pairs that can be learned, counts of those that cannot."""

import os
from collections import Counter
from pathlib import Path

import torch

from hasten.data.batch import Pair
from hasten.data.corpus import Corpus, decode_lines
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.pretrained import resolve
from hasten.spec import DataSpec, RunSpec, TokenizerSpec
from hasten.training.checkpoint import TOKENIZER
from hasten.training.loop import Task


def check(spec: RunSpec) -> None:
    """Find the mistakes that need no data before minutes go into data: `UserError` names the first."""
    for name in (spec.tokenizer.from_model, spec.training.init_from):
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
    """Encoded training pairs and validation lines, with the number of pairs left out for each reason."""
    source, target = corpus.pairs("train")
    if spec.data.distilled is not None:
        target = read_distilled(spec.data, len(source))
    learnable = spec.model.learnable
    pairs: list[Pair] = []
    counts: Counter[str] = Counter()
    for s, t in zip(source, target, strict=True):
        pair = (tokenizer.encode(s), tokenizer.encode(t))
        if not pair[0] or not pair[1]:
            counts["empty"] += 1
        elif max(map(len, pair)) > spec.data.max_tokens:
            counts["longer than data.max_tokens"] += 1
        elif not learnable(*pair):
            counts["impossible for this model"] += 1
        else:
            pairs.append(pair)
    counts["kept"] = len(pairs)
    valid = corpus.pairs("valid") if "valid" in corpus.splits else ([], [])
    return Task(pairs, *valid), counts


def read_distilled(spec: DataSpec, n_lines: int) -> list[str]:
    """The lines of `data.distilled`, as many as there are training sources."""
    assert spec.distilled is not None
    return read_targets(spec.distilled, f"data.distilled {spec.distilled}", spec.path, n_lines)


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
