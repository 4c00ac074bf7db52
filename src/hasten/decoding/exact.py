"""What a model says greedily, in fewer passes: drafts of another model, checked many tokens at once."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.data.batch import pad
from hasten.data.tokenizer import BOS, EOS
from hasten.decoding.beam import StepModel
from hasten.decoding.canvas import select
from hasten.decoding.frame import Frame
from hasten.errors import NOT_FINITE, UserError
from hasten.models.base import Memory

NEARLY_TIED = 1e-3
"""Of two log probabilities this close, the one pass and single steps may prefer different ones: steps decide."""
SEARCHED = 8
"""How far from where a draft should go on a word is looked for in it, to either side."""


@runtime_checkable
class VerifyingModel(StepModel, Protocol):
    """A model that reads many tokens in one pass and can take back those that were wrong."""

    def encode(self, source: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Memory:
        """What is known of the source."""
        ...

    def chunk_log_probs(
        self, tokens: Int[Tensor, "B n"], places: Int[Tensor, "B"], state: Any
    ) -> tuple[Float[Tensor, "B n V"], Any]:
        """Log probabilities after each of n new tokens, the first of each row standing at `places`."""
        ...

    def check_rewinds(self) -> None:
        """`UserError` where it cannot take back tokens."""
        ...

    def rewind(self, state: Any, dropped: Int[Tensor, "B"]) -> Any:
        """The state without the last tokens, so many of each row."""
        ...


def exact(
    model: VerifyingModel,
    source: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    drafts: Sequence[Sequence[int]],
) -> Iterator[Frame]:
    """Greedy decoding of a padded batch; a frame after every pass, in which a row gains one token or more.

    Each pass reads the last token of a row and the rest of its draft (ids without end symbol; any number, any ids of
    the vocabulary). They are kept as far as the model would have said them itself, and it adds the token that it says
    next. So tokens are those of single steps, whatever the draft; a good one saves passes. After a token that the draft
    has elsewhere, it goes on from there (`found`); after one that it lacks, a pass reads nothing of it.

    One pass and single steps round differently. Where the two best log probabilities are less than `NEARLY_TIED`
    apart, the token is decided by single steps of this row alone, from its beginning (or its last such place) on.
    Scores are those of the pass. Finished rows leave the batch.

    Raises `UserError` for scores of NaN, and for models whose decoders cannot take back tokens.
    Source: Stern, Shazeer, Uszkoreit, 2018 (blockwise parallel decoding), for checking many tokens in one pass.
    """
    model.check_rewinds()
    with torch.inference_mode():
        memory = model.encode(source, mask)
        limits = model.limit(memory).tolist()
        rows = [_Row(model, source[i, mask[i]], limit, drafts[i], i) for i, limit in enumerate(limits)]
        state, iteration = model.begin(memory), 0
        while rows:
            guesses = [row.guess() for row in rows]
            tokens, _ = pad([[row.last, *guess] for row, guess in zip(rows, guesses, strict=True)])
            places = torch.tensor([len(row.said) for row in rows])
            log_probs, state = model.chunk_log_probs(tokens.to(source.device), places.to(source.device), state)
            best, ids = log_probs.topk(2)
            if best[..., 0].isnan().any():  # the largest of numbers and NaN is NaN
                raise UserError(NOT_FINITE)
            told = zip(rows, guesses, best.tolist(), ids[..., 0].tolist(), strict=True)
            kept = [row.take(guess, scores, words) for row, guess, scores, words in told]
            done = [row.done for row in rows]
            yield _frame(iteration, rows, source.device)
            left = [i for i, row in enumerate(rows) if not row.done]
            rows = [rows[i] for i in left]
            if rows:
                state = model.rewind(state, tokens.shape[1] - torch.tensor(kept, device=source.device))
                state = select(state, torch.tensor(left, device=source.device)) if any(done) else state
            iteration += 1


def found(draft: Sequence[int], place: int, word: int) -> int | None:
    """The place of `word` in a draft that is nearest to `place`, of two the later; None: none is near."""
    near = range(max(0, place - SEARCHED), min(len(draft), place + SEARCHED + 1))
    places = [i for i in near if draft[i] == word]
    return min(places, key=lambda i: (abs(i - place), -i), default=None)


class _Row:
    """One source: what is said so far; the draft should go on at `place`, and does unless `lost`."""

    def __init__(self, model: VerifyingModel, source: Tensor, limit: int, draft: Sequence[int], number: int):
        self.number, self.limit, self.draft = number, limit, draft
        self.said: list[int] = []
        self.scores: list[float] = []
        self.place, self.lost, self.done = 0, False, False
        self.steps = _Steps(model, source)

    @property
    def last(self) -> int:
        """The last token, which the state does not know yet."""
        return self.said[-1] if self.said else BOS

    def guess(self) -> Sequence[int]:
        """What is checked next; none of it is beyond the limit."""
        room = 0 if self.lost else self.limit - len(self.said) - 1
        return self.draft[self.place : self.place + room]

    def take(self, guess: Sequence[int], best: list[list[float]], words: list[int]) -> int:
        """Say what the model says as long as the draft agrees, and its next token; how many tokens read stay read."""
        for read, ((score, second), word) in enumerate(zip(best, words, strict=True), 1):
            if score - second < NEARLY_TIED:
                word = self.steps.next(self.said)
            self.said.append(word)
            self.scores.append(score)
            self.done = word == EOS or len(self.said) == self.limit
            if not self.done and read <= len(guess) and word == guess[read - 1]:
                self.place += 1
                continue
            place = found(self.draft, self.place, word)
            self.place, self.lost = (self.place if place is None else place) + 1, place is None
            return read
        raise AssertionError("a row has one more output than guesses")


class _Steps:
    """One row decoded alone by single steps, as far as near ties ask for it."""

    def __init__(self, model: VerifyingModel, source: Int[Tensor, "S"]):
        self.model, self.source = model, source
        self.state: Any = None
        self.read = 0

    def next(self, said: Sequence[int]) -> int:
        """The most probable token after what is said, of equal ones the first."""
        if not self.read:
            alone = self.source[None]
            self.state = self.model.begin(self.model.encode(alone, torch.ones_like(alone, dtype=torch.bool)))
        log_probs = None
        for position, word in enumerate([BOS, *said][self.read :], self.read):
            last = torch.tensor([word], device=self.source.device)
            log_probs, self.state = self.model.next_log_probs(last, position, self.state)
        self.read = len(said) + 1
        assert log_probs is not None
        return int(log_probs.max(-1).indices)


def _frame(iteration: int, rows: Sequence[_Row], device: torch.device) -> Frame:
    tokens, real = pad([row.said for row in rows])
    scores = torch.zeros(tokens.shape).masked_scatter(real, torch.tensor([s for row in rows for s in row.scores]))
    numbers, done = torch.tensor([row.number for row in rows]), torch.tensor([row.done for row in rows])
    return Frame(iteration, "append", *(part.to(device) for part in (numbers, tokens, scores, done)))
