"""A trained model with its tokenizer: text in, text out."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hasten.data.batch import source_batch
from hasten.data.grouping import group_by_tokens
from hasten.data.parts import (
    FEWEST_SOURCE_TOKENS,
    Candidate,
    LineTooLong,
    OnLong,
    Part,
    checked,
    cut,
    of_lines,
    text_of,
)
from hasten.data.shortlist import Shortlist
from hasten.data.tokenizer import Tokenizer
from hasten.decoding.beam import Hypothesis, StepModel, beam_search, length_normalised
from hasten.decoding.exact import VerifyingModel, exact
from hasten.decoding.frame import Frame
from hasten.decoding.refine import Decoded, final, refine
from hasten.decoding.rerank import judge
from hasten.errors import UserError
from hasten.models.base import Drafting, GenerationModel, Memory, Scoring, encoded, listing
from hasten.nn.layout import lay_out
from hasten.pretrained import resolve
from hasten.runtime.settings import SETTINGS
from hasten.spec import RunSpec
from hasten.training import checkpoint

__all__ = ["Candidate", "Drafter", "LineTooLong", "NBestModel", "OnLong", "Translator", "drafter", "load"]


class Drafter(Protocol):
    """What proposes translations for others to check: a `Translator`, or one of `hasten.runtime`."""

    def translate(self, lines: Iterable[str], *, batch_tokens: int) -> list[str]:
        """One translation a line, in order."""
        ...


def drafter(name: str, device: str = "cpu") -> Drafter:
    """A model that drafts: one that `load` takes, or a directory of `hasten export --to onnx`.

    The latter has as many threads as PyTorch. Raises `UserError` as they do.
    """
    if os.path.isfile(os.path.join(name, SETTINGS)):  # unlike Path it takes any text for a name
        from hasten import runtime

        return runtime.load(name, threads=torch.get_num_threads())
    return load(name, device)


def load(
    name: str | Path, device: str = "cpu", *, decoding: Sequence[str] = (), shortlist: str | Path | None = None
) -> "Translator":
    """A translator from a bundled name, a run directory or a Hugging Face hub id; nothing in it is executed.

    decoding: changes to the model's own settings of decoding, for example ("iterations=4",), in TOML notation.
    shortlist: a table by `hasten shortlist`; each sentence is said in the pieces that it lists for it.
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
    longest = max(FEWEST_SOURCE_TOKENS, spec.data.max_tokens)
    table = None if shortlist is None else Shortlist.load(shortlist).check(tokenizer, str(shortlist))
    return Translator(lay_out(model), tokenizer, spec, directory, longest, table)


@runtime_checkable
class NBestModel(Protocol):
    """A model with a beam search of its own."""

    def candidates(self, memory: Memory, *, beam: int, n_best: int) -> list[list[Hypothesis]]:
        """The best outputs of every row, best first."""
        ...


@dataclass(frozen=True)
class Translator:
    """Translates lines; the result of a line depends on that line alone, whatever it is batched with.

    Lines of more than `max_source_tokens` pieces are long: they are split (after sentences, else after clauses, else
    between words, else anywhere) and the translations of the parts are joined by a space, or they are refused.

    With a `shortlist` an output has only pieces of its part's own list, and log probabilities and scores are over that
    list, as if all other pieces were impossible. Another model's scores of it (`rescorer`) are over all pieces.
    """

    model: GenerationModel
    tokenizer: Tokenizer
    spec: RunSpec | None = None
    directory: Path | None = None
    max_source_tokens: int = 256
    shortlist: Shortlist | None = None

    def __post_init__(self) -> None:
        if self.shortlist is not None:
            listing(self.model)
            self.shortlist.check(self.tokenizer, "the shortlist")
        if self.max_source_tokens < FEWEST_SOURCE_TOKENS:
            raise UserError(f"max_source_tokens is {self.max_source_tokens}, allowed {FEWEST_SOURCE_TOKENS} or more")

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
        draft: "Drafter | None" = None,
        batch_tokens: int = 4096,
        on_long: OnLong = "split",
    ) -> list[str]:
        """One translation a line, in order, without line breaks; lines without text stay empty.

        `beam` 1 takes the model's own decoding loop, more search for a more probable output: a beam of outputs begun,
        or so many outputs side by side (lengths, fertilities). A `rescorer` chooses among those by its own mean log
        probability of a token, in one pass (noisy parallel decoding). A `draft` proposes outputs that this model checks
        many tokens at once: the translations are those it gives without, in fewer passes (`hasten.decoding.exact`).
        `batch_tokens` bounds the padded source tokens
        times beam that are decoded at once; it changes speed and memory, not the result.
        """
        found = self.candidates(
            lines, beam=beam, rescorer=rescorer, draft=draft, batch_tokens=batch_tokens, on_long=on_long
        )
        return [best[0].text for best in found]

    def candidates(
        self,
        lines: Iterable[str],
        *,
        beam: int = 1,
        n_best: int = 1,
        rescorer: "Translator | None" = None,
        draft: "Drafter | None" = None,
        batch_tokens: int = 4096,
        on_long: OnLong = "split",
    ) -> list[list[Candidate]]:
        """The `n_best` translations of every line, best first; fewer where fewer are possible or texts coincide.

        Raises `UserError` for n_best > beam, for numbers out of range, for lines that are no strings, for models that
        give one output only where beam > 1, for a rescorer that gives no probabilities, for a draft with a beam or for
        a model that cannot check it, and with on_long "error" `LineTooLong` before anything is decoded.
        """
        if not 1 <= n_best <= beam:
            raise UserError(f"n_best is {n_best} and beam {beam}; need 1 <= n_best <= beam")
        if batch_tokens < 1:
            raise UserError(f"batch_tokens is {batch_tokens}, allowed 1 or more")
        if rescorer is not None:
            rescorer._scoring()
        if draft is not None:
            self._verifying(beam)
        lines = checked(lines)
        parts = self._parts(lines, on_long)
        decoded: list[list[Candidate]] = [[] for _ in parts]
        wanted = n_best if rescorer is None else beam
        drafts = None if draft is None else self._drafted(draft, parts, batch_tokens)
        for group in group_by_tokens([len(part.ids) + 1 for part in parts], max(1, batch_tokens // beam)):
            own = [parts[i] for i in group]
            if drafts is None:
                searched = self._search(own, beam, wanted)
            else:
                frames = exact(self._verifying(beam), *self._batch(own), [drafts[i] for i in group])
                searched = [[_greedy(row)] for row in final(frames, len(group))]
            for i, hypotheses in zip(group, searched, strict=True):
                decoded[i] = self._candidates(hypotheses)
        if rescorer is not None:
            decoded = rescorer._rescored([self.tokenizer.decode(part.ids) for part in parts], decoded, batch_tokens)
        return of_lines(len(lines), parts, decoded, n_best)

    def score(self, sources: Iterable[str], targets: Iterable[str], *, batch_tokens: int = 4096) -> list[float]:
        """Of every target the mean log probability of a token given its source, the end symbol counted.

        Texts are scored as they are, however long. Raises `UserError` for models that do not give it in one pass (one-
        pass models marginalise over alignments), and where there are not as many targets as sources.
        """
        texts = checked(sources), checked(targets)
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
        own = self.tokenizer
        sides = (
            [own.encode(text.strip()) for text in sources],
            [own.encode_target(text.strip()) for text in targets],
        )
        pairs = list(zip(*sides, strict=True))
        longest, allowed = max((max(map(len, pair)) for pair in pairs), default=0), self.model.longest
        if allowed is not None and longest > allowed:
            raise UserError(
                f"a text of {longest} pieces; the model that is to score it takes {allowed}: shorten the text, or let "
                "a model score whose attention has no max_length"
            )
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

    def _verifying(self, beam: int) -> VerifyingModel:
        """The model, where it can check drafts."""
        if beam > 1:
            raise UserError(f"beam is {beam}; a draft is checked against the one output without a beam, so leave it 1")
        if not isinstance(self.model, VerifyingModel):
            raise UserError(f"{type(self.model).__name__} models check no drafts; an autoregressive model does")
        if self.shortlist is not None:
            raise UserError(
                "a model with a shortlist checks no drafts, since it would not say what it says by itself; "
                "give the shortlist to the draft"
            )
        self.model.check_rewinds()
        return self.model

    def _drafted(self, draft: "Drafter", parts: Sequence[Part], batch_tokens: int) -> list[list[int]]:
        """What another model, of any tokenizer, says for every part, in ids of this one."""
        texts = [self.tokenizer.decode(part.ids) for part in parts]
        return [self.tokenizer.encode_target(text) for text in draft.translate(texts, batch_tokens=batch_tokens)]

    def trace(self, line: str, *, draft: "Drafter | None" = None) -> list[Frame]:
        """Every frame of decoding one line (without a beam); `rows` of a frame numbers the parts of a long line."""
        parts = self._parts(checked([line]), "split")
        if not parts:
            return []
        if draft is None:
            return list(refine(self.model, *self._batch(parts), lists=self._lists(parts)))
        return list(exact(self._verifying(1), *self._batch(parts), self._drafted(draft, parts, 4096)))

    def read(self, frames: Iterable[Frame]) -> str:
        """The translation that the frames of `trace` end in."""
        rows = list(frames)
        n_parts = max((int(frame.rows.max()) + 1 for frame in rows), default=0)
        found = [self._candidates([_greedy(decoded)])[0] for decoded in final(rows, n_parts)]
        return " ".join(part.text for part in found if part.text)

    def _parts(self, lines: Sequence[str], on_long: OnLong) -> list[Part]:
        """The ids to decode: none for a line without text, several for a long one."""
        if self.model.training:
            raise UserError("the model is in training mode, where dropout is at work; call model.eval() first")
        return cut(lines, self.tokenizer, self.max_source_tokens, on_long)

    def _batch(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        source, mask = source_batch([part.ids for part in parts])
        return source.to(self.device), mask.to(self.device)

    def _lists(self, parts: Sequence[Part]) -> list[Tensor] | None:
        """What each part is said in; None: in any piece."""
        return None if self.shortlist is None else [torch.from_numpy(self.shortlist.ids(part.ids)) for part in parts]

    def _search(self, parts: Sequence[Part], beam: int, n_best: int) -> list[list[Hypothesis]]:
        source, mask = self._batch(parts)
        lists = self._lists(parts)
        if beam == 1:
            frames = refine(self.model, source, mask, lists=lists)
            return [[_greedy(decoded)] for decoded in final(frames, len(source))]
        if isinstance(self.model, Drafting):
            return self._side_by_side(source, mask, beam, n_best)
        with torch.inference_mode():
            memory = encoded(self.model, source, mask, lists)
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
            text = text_of(self.tokenizer, self.model.output_ids(tokens))
            found.setdefault(text, Candidate(text, score, log_prob))
        return list(found.values())


def _greedy(decoded: Decoded) -> Hypothesis:
    log_prob = sum(decoded.scores, 0.0)
    return Hypothesis(decoded.tokens, log_prob, length_normalised(log_prob, len(decoded.tokens)))
