"""The one decoding loop: start, named edits, stop; every edit yields a frame."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hasten.data.tokenizer import PAD
from hasten.decoding.frame import Frame
from hasten.errors import NOT_FINITE, UserError
from hasten.models.base import Canvas, Drafting, GenerationModel, Memory, encoded


def refine(
    model: GenerationModel,
    source: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    candidates: int = 1,
    lists: Sequence[Int[Tensor, "_"]] | None = None,
) -> Iterator[Frame]:
    """Decode a padded batch; frames cover the rows still in work, finished rows leave the batch.

    source (B, S) ids with EOS; mask (B, S) True on real tokens. The last frame of a row has `done` set. Of a source
    decoded in several ways, row r, frames have the rows r * candidates and those after it. `lists` has for every
    row the ids that its output is limited to. Raises `UserError` where the model's scores are not
    numbers, or where it cannot begin in several ways or takes no lists.
    """
    with torch.inference_mode():
        memory, canvas = _begin(model, encoded(model, source, mask, lists), candidates)
        rows = torch.arange(len(canvas.done), device=source.device)
        iteration = 0
        while len(rows):
            before = canvas
            for number, edit in enumerate(model.edits):
                canvas = edit.apply(canvas, memory, iteration)
                if canvas.scores.isnan().any():
                    raise UserError(NOT_FINITE)
                if number + 1 < len(model.edits):
                    yield Frame(iteration, edit.kind, rows, canvas.tokens, canvas.scores, torch.zeros_like(canvas.done))
            done = model.stopped(before, canvas, memory, iteration)
            yield Frame(iteration, model.edits[-1].kind, rows, canvas.tokens, canvas.scores, done)
            if done.any():
                left = (~done).nonzero()[:, 0]
                rows, memory, canvas = rows[left], memory.select(left), canvas.select(left)
            iteration += 1


def _begin(model: GenerationModel, memory: Memory, candidates: int) -> tuple[Memory, Canvas]:
    if candidates == 1:
        return memory, model.start(memory)
    if not isinstance(model, Drafting):
        raise UserError(f"{type(model).__name__} models begin in one way only; candidates must be 1")
    rows = torch.arange(len(memory.mask), device=memory.mask.device).repeat_interleave(candidates)
    return memory.select(rows), model.starts(memory, candidates)


@dataclass(frozen=True)
class Decoded:
    """The final state of one row: ids (without padding), a log probability for each, and the iterations it took."""

    tokens: list[int]
    scores: list[float]
    iterations: int


def final(frames: Iterable[Frame], n_rows: int) -> list[Decoded]:
    """The last frame of every row, in row order."""
    results: list[Decoded | None] = [None] * n_rows
    for frame in frames:
        if not frame.done.any():
            continue
        finished = frame.done.nonzero()[:, 0].tolist()
        for i, row in zip(finished, frame.rows[frame.done].tolist(), strict=True):
            length = int((frame.tokens[i] != PAD).sum())
            tokens, scores = frame.tokens[i, :length].tolist(), frame.scores[i, :length].tolist()
            results[row] = Decoded(tokens, scores, frame.iteration + 1)
    return [result for result in results if result is not None]
