"""A trained model with its tokenizer: text in, text out."""

import heapq
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hasten.data.batch import group_by_tokens, source_batch
from hasten.data.segment import segment
from hasten.data.tokenizer import Tokenizer
from hasten.decoding.beam import Hypothesis, StepModel, beam_search, length_normalised
from hasten.decoding.frame import Frame
from hasten.decoding.refine import Decoded, final, refine
from hasten.decoding.rerank import judge
from hasten.errors import UserError
from hasten.models.base import Drafting, GenerationModel, Memory, Scoring
from hasten.nn.layout import lay_out
from hasten.pretrained import resolve
from hasten.spec import RunSpec
from hasten.training import checkpoint

OnLong = Literal["split", "error"]
_FEWEST_SOURCE_TOKENS = 16  # so that every single character fits, spelt as bytes

_LINE_BREAKS = str.maketrans("\r\n", "  ")


def load(name: str | Path, device: str = "cpu", *, decoding: Sequence[str] = ()) -> "Translator":
    """A translator from a bundled name, a run directory or a Hugging Face hub id; nothing in it is executed.

    decoding: changes to the model's own settings of decoding, for example ("iterations=4",), in TOML notation.
    Weights are computed with in float32, whatever they are stored in. Lines longer than the pairs the model learnt from
    (`data.max_tokens` of its configuration) are long for it. Raises `UserError` where anything is missing or damaged.
    """
    directory = resolve(name)
    spec, tokenizer, model = checkpoint.read_run(directory, decoding)
    try:
        model = model.to(torch.device(device))
        model.embedding.weight[0, 0].item()  # some devices hold no numbers
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"device {device!r} cannot be used here (try cpu, cuda or mps): {reason}") from error
    return Translator(lay_out(model), tokenizer, spec, directory, max(_FEWEST_SOURCE_TOKENS, spec.data.max_tokens))


@dataclass(frozen=True)
class Candidate:
    """A possible translation.

    log_prob: log probability of the decisions that made it. For an autoregressive model log p(tokens | source), the end
    symbol included; for CTC by beam search the sum over all its paths, without a beam that of the best frames.
    score ranks the candidates of a line: the mean of log_prob over the tokens, for CTC by beam search log_prob itself.
    Where a rescorer judged, both are that model's.
    A line that was split has the sum of the log_probs and the mean of the scores of its parts.
    """

    text: str
    score: float
    log_prob: float


class LineTooLong(UserError):
    """A line has more pieces than the model takes; `index` counts the lines given from 0."""

    def __init__(self, index: int, n_tokens: int, allowed: int, *, first_line: int = 1):
        self.index, self.n_tokens, self.allowed = index, n_tokens, allowed
        advice = "shorten it or let it be split (on_long: split)"
        super().__init__(f"line {first_line + index} has {n_tokens} pieces, the model takes {allowed}; {advice}")

    def counted_from(self, first_line: int) -> "LineTooLong":
        """The same error where the first of the lines has this number."""
        return LineTooLong(self.index, self.n_tokens, self.allowed, first_line=first_line)


@runtime_checkable
class NBestModel(Protocol):
    """A model with a beam search of its own."""

    def candidates(self, memory: Memory, *, beam: int, n_best: int) -> list[list[Hypothesis]]:
        """The best outputs of every row, best first."""
        ...


class _Part(NamedTuple):
    """What is decoded at once: a line, or a part of a long one."""

    line: int
    ids: list[int]


@dataclass(frozen=True)
class Translator:
    """Translates lines; the result of a line depends on that line alone, whatever it is batched with.

    Lines of more than `max_source_tokens` pieces are long: they are split (after sentences, else after clauses, else
    between words, else anywhere) and the translations of the parts are joined by a space, or they are refused.
    """

    model: GenerationModel
    tokenizer: Tokenizer
    spec: RunSpec | None = None
    directory: Path | None = None
    max_source_tokens: int = 256

    def __post_init__(self) -> None:
        if self.max_source_tokens < _FEWEST_SOURCE_TOKENS:
            raise UserError(f"max_source_tokens is {self.max_source_tokens}, allowed {_FEWEST_SOURCE_TOKENS} or more")

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.model.embedding.weight.device

    def translate(
        self,
        lines: Iterable[str],
        *,
        beam: int = 1,
        rescorer: "Translator | None" = None,
        batch_tokens: int = 4096,
        on_long: OnLong = "split",
    ) -> list[str]:
        """One translation a line, in order, without line breaks; lines without text stay empty.

        `beam` 1 takes the model's own decoding loop, more search for a more probable output: a beam of outputs begun,
        or so many outputs side by side (lengths, fertilities). A `rescorer` chooses among those by its own mean log
        probability of a token, in one pass (noisy parallel decoding). `batch_tokens` bounds the padded source tokens
        times beam that are decoded at once; it changes speed and memory, not the result.
        """
        found = self.candidates(lines, beam=beam, rescorer=rescorer, batch_tokens=batch_tokens, on_long=on_long)
        return [best[0].text for best in found]

    def candidates(
        self,
        lines: Iterable[str],
        *,
        beam: int = 1,
        n_best: int = 1,
        rescorer: "Translator | None" = None,
        batch_tokens: int = 4096,
        on_long: OnLong = "split",
    ) -> list[list[Candidate]]:
        """The `n_best` translations of every line, best first; fewer where fewer are possible or texts coincide.

        Raises `UserError` for n_best > beam, for numbers out of range, for lines that are no strings, for models that
        give one output only where beam > 1, for a rescorer that gives no probabilities, and with on_long "error"
        `LineTooLong` before anything is decoded.
        """
        if not 1 <= n_best <= beam:
            raise UserError(f"n_best is {n_best} and beam {beam}; need 1 <= n_best <= beam")
        if batch_tokens < 1:
            raise UserError(f"batch_tokens is {batch_tokens}, allowed 1 or more")
        if rescorer is not None:
            rescorer._scoring()
        lines = _checked(lines)
        parts = self._parts(lines, on_long)
        results = [[Candidate("", 0.0, 0.0)] for _ in lines]
        n_parts = [0] * len(lines)
        decoded: list[list[Candidate]] = [[] for _ in parts]
        wanted = n_best if rescorer is None else beam
        for group in group_by_tokens([len(part.ids) + 1 for part in parts], max(1, batch_tokens // beam)):
            source, mask = self._batch([parts[i] for i in group])
            for i, hypotheses in zip(group, self._search(source, mask, beam, wanted), strict=True):
                decoded[i] = self._candidates(hypotheses)
        if rescorer is not None:
            decoded = rescorer._rescored([self.tokenizer.decode(part.ids) for part in parts], decoded, batch_tokens)
        for part, found in zip(parts, decoded, strict=True):
            joined = _join(results[part.line], found[:n_best], n_best)
            results[part.line], n_parts[part.line] = joined, n_parts[part.line] + 1
        return [
            [Candidate(c.text, c.score / max(1, n), c.log_prob) for c in line]
            for line, n in zip(results, n_parts, strict=True)
        ]

    def score(self, sources: Iterable[str], targets: Iterable[str], *, batch_tokens: int = 4096) -> list[float]:
        """Of every target the mean log probability of a token given its source, the end symbol counted.

        Texts are scored as they are, however long. Raises `UserError` for models that do not give it in one pass (one-
        pass models marginalise over alignments), and where there are not as many targets as sources.
        """
        texts = _checked(sources), _checked(targets)
        if len(texts[0]) != len(texts[1]):
            raise UserError(f"{len(texts[0])} sources and {len(texts[1])} targets; give as many of each")
        return [mean for _, mean in self._judge(*texts, batch_tokens)]

    def _scoring(self) -> Scoring:
        if not isinstance(self.model, Scoring):
            raise UserError(
                f"{type(self.model).__name__} models give no probability of a given text in one pass; "
                "an autoregressive model does"
            )
        return self.model

    def _judge(self, sources: Sequence[str], targets: Sequence[str], batch_tokens: int) -> list[tuple[float, float]]:
        sides = ([self.tokenizer.encode(text.strip()) for text in texts] for texts in (sources, targets))
        pairs = list(zip(*sides, strict=True))
        return judge(self._scoring(), pairs, batch_tokens=batch_tokens, device=self.device)

    def _rescored(
        self, sources: Sequence[str], found: Sequence[Sequence[Candidate]], batch_tokens: int
    ) -> list[list[Candidate]]:
        """The candidates of every source by what this model thinks of them, best first."""
        repeated = [source for source, own in zip(sources, found, strict=True) for _ in own]
        judged = iter(self._judge(repeated, [c.text for own in found for c in own], batch_tokens))
        scored = [
            [Candidate(c.text, mean, total) for c, (total, mean) in zip(own, judged, strict=False)] for own in found
        ]
        return [sorted(own, key=lambda candidate: -candidate.score) for own in scored]

    def trace(self, line: str) -> list[Frame]:
        """Every frame of decoding one line (without a beam); `rows` of a frame numbers the parts of a long line."""
        parts = self._parts(_checked([line]), "split")
        return list(refine(self.model, *self._batch(parts))) if parts else []

    def read(self, frames: Iterable[Frame]) -> str:
        """The translation that the frames of `trace` end in."""
        rows = list(frames)
        n_parts = max((int(frame.rows.max()) + 1 for frame in rows), default=0)
        found = [self._candidates([_greedy(decoded)])[0] for decoded in final(rows, n_parts)]
        return " ".join(part.text for part in found if part.text)

    def _parts(self, lines: Sequence[str], on_long: OnLong) -> list[_Part]:
        """The ids to decode: none for a line without text, several for a long one."""
        if on_long not in ("split", "error"):
            raise UserError(f"on_long is {on_long!r}; allowed: split, error")
        if self.model.training:
            raise UserError("the model is in training mode, where dropout is at work; call model.eval() first")
        parts = []
        for i, line in enumerate(lines):
            ids = self.tokenizer.encode(line.strip())
            if ids and len(ids) <= self.max_source_tokens:
                parts.append(_Part(i, ids))
            elif ids and on_long == "error":
                raise LineTooLong(i, len(ids), self.max_source_tokens)
            elif ids:
                parts += [_Part(i, self.tokenizer.encode(text)) for text in segment(line, self._fits)]
        return parts

    def _fits(self, text: str) -> bool:
        return len(self.tokenizer.encode(text)) <= self.max_source_tokens

    def _batch(self, parts: Sequence[_Part]) -> tuple[Tensor, Tensor]:
        source, mask = source_batch([part.ids for part in parts])
        return source.to(self.device), mask.to(self.device)

    def _search(self, source: Tensor, mask: Tensor, beam: int, n_best: int) -> list[list[Hypothesis]]:
        if beam == 1:
            return [[_greedy(decoded)] for decoded in final(refine(self.model, source, mask), len(source))]
        if isinstance(self.model, Drafting):
            return self._side_by_side(source, mask, beam, n_best)
        with torch.inference_mode():
            memory = self.model.encode(source, mask)
            if isinstance(self.model, StepModel):
                return beam_search(self.model, memory, beam=beam, n_best=n_best)
            if isinstance(self.model, NBestModel):
                return self.model.candidates(memory, beam=beam, n_best=n_best)
        raise UserError(f"{type(self.model).__name__} models have no beam search; use beam 1")

    def _side_by_side(self, source: Tensor, mask: Tensor, beam: int, n_best: int) -> list[list[Hypothesis]]:
        """The best of `beam` outputs decoded at once; of equal ones the first begun."""
        rows = [_greedy(row) for row in final(refine(self.model, source, mask, beam), beam * len(source))]
        groups = (rows[i : i + beam] for i in range(0, len(rows), beam))
        return [sorted(group, key=lambda hypothesis: -hypothesis.score)[:n_best] for group in groups]

    def _candidates(self, hypotheses: Sequence[Hypothesis]) -> list[Candidate]:
        """Texts of hypotheses; of those that read the same the best one stays."""
        found: dict[str, Candidate] = {}
        for tokens, log_prob, score in hypotheses:
            text = self.tokenizer.decode(self.model.output_ids(tokens)).translate(_LINE_BREAKS).strip()
            found.setdefault(text, Candidate(text, score, log_prob))
        return list(found.values())


def _checked(lines: Iterable[str]) -> list[str]:
    """The lines as a list; `UserError` where they are something else."""
    if isinstance(lines, str | bytes | Mapping | Set) or not isinstance(lines, Iterable):
        kind = "one string" if isinstance(lines, str) else f"of type {type(lines).__name__}"
        raise UserError(f"lines is {kind}; give a list of lines: translate([text])")
    checked = list(lines)
    for i, line in enumerate(checked):
        if not isinstance(line, str):
            raise UserError(f"lines[{i}] is {line!r:.60}, of type {type(line).__name__}; every line must be a string")
    return checked


def _greedy(decoded: Decoded) -> Hypothesis:
    log_prob = sum(decoded.scores, 0.0)
    return Hypothesis(decoded.tokens, log_prob, length_normalised(log_prob, len(decoded.tokens)))


def _join(done: Sequence[Candidate], part: Sequence[Candidate], n_best: int) -> list[Candidate]:
    """The `n_best` combinations of a line so far with its next part, by the sum of the scores."""
    pairs = [
        Candidate(f"{a.text} {b.text}".strip(), a.score + b.score, a.log_prob + b.log_prob) for a in done for b in part
    ]
    return heapq.nlargest(n_best, pairs, key=lambda candidate: candidate.score)
