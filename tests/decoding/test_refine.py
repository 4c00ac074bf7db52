import pytest
import torch
from torch import Tensor, nn

from hasten.data.tokenizer import BLANK, PAD
from hasten.decoding.frame import Frame
from hasten.decoding.refine import Decoded, final, refine
from hasten.models.base import Canvas, Edit, GenerationModel, Memory

PIECES = ["<pad>", "", "", "", "", "<blank>", "", "a", "b", "c"]


class Counter(GenerationModel):
    """Row b appends its source's tokens one by one, then doubles the last score; it stops after the last token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 1)
        self.edits = (Edit("append", self._append), Edit("fill", self._fill))

    def encode(self, source: Tensor, mask: Tensor) -> Memory:
        return Memory(source[..., None].float(), mask)

    def loss(self, batch, generator):
        raise NotImplementedError

    def start(self, memory: Memory) -> Canvas:
        rows = len(memory.mask)
        return Canvas(torch.empty(rows, 0, dtype=torch.int64), torch.empty(rows, 0), torch.zeros(rows) > 0)

    def _append(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        token = memory.states[:, iteration].long()
        score = torch.full(token.shape, -1.0 - iteration)
        return Canvas(torch.cat((canvas.tokens, token), 1), torch.cat((canvas.scores, score), 1), canvas.done)

    def _fill(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        scores = canvas.scores.clone()
        scores[:, -1] *= 2
        return Canvas(canvas.tokens, scores, canvas.done)

    def stopped(self, before: Canvas, after: Canvas, memory: Memory, iteration: int) -> Tensor:
        assert before.tokens.shape[1] == iteration, "the canvas before the iteration, not before its last edit"
        return iteration + 1 >= memory.lengths


@pytest.fixture
def frames() -> list[Frame]:
    from hasten.data.batch import pad

    return list(refine(Counter(), *pad([[7, 8], [9], [7, 7, 9]])))


def test_every_edit_of_every_iteration_yields_a_frame(frames: list[Frame]):
    assert [(frame.iteration, frame.kind) for frame in frames] == [(i, k) for i in range(3) for k in ("append", "fill")]


def test_finished_rows_leave_the_batch_and_keep_their_numbers(frames: list[Frame]):
    assert [frame.rows.tolist() for frame in frames[1::2]] == [[0, 1, 2], [0, 2], [2]]
    assert [frame.done.tolist() for frame in frames[1::2]] == [[False, True, False], [True, False], [True]]


def test_only_the_last_edit_of_an_iteration_ends_a_row(frames: list[Frame]):
    assert not any(frame.done.any() for frame in frames[::2])


def test_the_last_frame_of_every_row_is_kept_in_row_order(frames: list[Frame]):
    expected = [([7, 8], [-2.0, -4.0], 2), ([9], [-2.0], 1), ([7, 7, 9], [-2.0, -4.0, -6.0], 3)]
    assert final(frames, 3) == [Decoded(*row) for row in expected]


def test_nothing_to_decode_yields_no_frame():
    empty = torch.empty(0, 4, dtype=torch.int64)
    assert list(refine(Counter(), empty, empty > 0)) == []
    assert final([], 0) == []


def test_padding_is_no_part_of_a_result():
    tokens = torch.tensor([[7, PAD, PAD], [7, 8, 9]])
    frame = Frame(0, "collapse", torch.tensor([1, 0]), tokens, torch.ones(2, 3), torch.ones(2) > 0)
    assert final([frame], 2) == [Decoded([7, 8, 9], [1.0] * 3, 1), Decoded([7], [1.0], 1)]


def test_a_frame_is_written_row_by_row():
    tokens = torch.tensor([[7, 8, PAD], [9, BLANK, 7]])
    frame = Frame(2, "fill", torch.tensor([0, 4]), tokens, torch.full((2, 3), -0.5), torch.tensor([True, False]))
    shared = {"iteration": 2, "kind": "fill"}
    first = {"part": 0, **shared, "pieces": ["a", "b"], "scores": [-0.5] * 2, "done": True}
    other = {"part": 4, **shared, "pieces": ["c", "<blank>", "a"], "scores": [-0.5] * 3, "done": False}
    assert list(frame.records(PIECES)) == [{**first, "unsure": []}, {**other, "unsure": []}]
    assert list(frame.records(PIECES, 0.61)) == [{**first, "unsure": [0, 1]}, {**other, "unsure": [0, 1, 2]}]
    assert list(frame.records(PIECES, 0.60)) == [{**first, "unsure": []}, {**other, "unsure": []}]


def test_decoding_keeps_no_graph():
    from hasten.data.batch import pad

    assert all(not frame.scores.requires_grad for frame in refine(Counter(), *pad([[7, 8]])))
