"""What a teacher reads, counted piece by piece in plain loops; and attention made by hand."""

import pytest
import torch

from hasten.attention.base import Weights
from hasten.data.alignment import apportion
from hasten.data.batch import Batch, pair_batch
from hasten.data.tokenizer import BOS, EOS
from hasten.errors import UserError
from hasten.models import Autoregressive
from hasten.training.teacher_alignment import attention_fertilities, check_teacher, source_weights

PAIRS = [([10, 11, 12], [20, 21]), ([13], [22, 23, 24, 25]), ([14, 15], [26]), ([16, 17, 18, 19], [27, 28, 29])]


@pytest.fixture
def teacher(tiny_spec) -> Autoregressive:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = tiny_spec("autoregressive", decoder_layers=3).model.build(60)
    with torch.no_grad():  # fresh weights read everything nearly alike
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.eval()


def read_alone(model: Autoregressive, source: list[int], target: list[int], layer: int) -> list[float]:
    """One pair, without padding: of the rows BOS, y_1 ... those that predict a piece, heads and rows one by one."""
    ids, inputs = torch.tensor([[*source, EOS]]), [BOS, *target]
    batch = Batch(ids, ids > 0, torch.tensor([target]), torch.tensor([target]) > 0)
    seen = []
    model.attentions(batch, lambda name, at, operator, _: seen.append((name, at, operator.dense()[0].detach())))
    (weights,) = [weights for name, at, weights in seen if (name, at) == ("cross", layer)]
    n_heads, n_rows, n_keys = weights.shape
    assert (n_rows, n_keys) == (len(inputs), len(source) + 1)
    received = [0.0] * n_keys
    for row, piece in enumerate([*target, EOS]):
        for key in range(n_keys):
            for head in range(n_heads):
                received[key] += float(weights[head, row, key]) / n_heads if piece != EOS else 0.0
    return received


@pytest.mark.parametrize("layer", [None, 1, 2, 3])
@pytest.mark.parametrize("batch_tokens", [1, 12, 4096])
def test_labels_are_what_each_position_receives_made_whole(teacher, layer: int | None, batch_tokens: int):
    found = attention_fertilities(teacher, PAIRS, batch_tokens, layer)
    expected = [read_alone(teacher, *pair, (layer or 3) - 1) for pair in PAIRS]
    assert found == [apportion(own, len(target)) for own, (_, target) in zip(expected, PAIRS, strict=True)]
    together = source_weights(teacher, pair_batch(PAIRS), layer)
    for row, own in zip(together, expected, strict=True):
        torch.testing.assert_close(row[: len(own)], torch.tensor(own))
        assert not row[len(own) :].any(), "padding receives nothing"


def test_layers_read_differently_here(teacher):
    labels = [attention_fertilities(teacher, PAIRS, layer=layer) for layer in (1, 2, 3)]
    assert labels[0] != labels[2] != labels[1], "or the test above would tell nothing of layers"


class _ByHand(Autoregressive):
    """Reports two layers of given attention; the first is another's business."""

    def attentions(self, batch, observe):
        real = torch.ones(1, 4, dtype=torch.bool)
        # Heads side by side; rows predict y_1, y_2, y_3 and the end; keys are two pieces and the end.
        one = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
        other = [[1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
        for layer, heads in enumerate(([other, other], [one, other])):
            observe("decoder", layer, Weights(torch.zeros(1, 2, 4, 4)), real)
            observe("cross", layer, Weights(torch.tensor([heads])), real)


def test_the_row_that_predicts_the_end_counts_for_nothing(tiny_spec):
    model = _ByHand(tiny_spec("autoregressive", decoder_layers=2).model, 60).eval()
    pair = ([10, 11], [20, 21, 22])
    assert source_weights(model, pair_batch([pair])).tolist() == [[1.75, 0.0, 1.25]]
    assert attention_fertilities(model, [pair]) == [[2, 0, 1]], "11 is read only where the end is predicted"
    assert source_weights(model, pair_batch([pair]), layer=1).tolist() == [[1.5, 0.0, 1.5]]


def test_who_cannot_teach_is_told(teacher, tiny_spec):
    ctc = tiny_spec("ctc").model.build(60).eval()
    with pytest.raises(UserError, match=r"^mine is a CTC model, which does not write piece by piece"):
        check_teacher(ctc, "mine")
    with pytest.raises(UserError, match="the teacher has no decoder layer 4; give one from 1 to 3"):
        attention_fertilities(teacher, PAIRS, layer=4)
    with pytest.raises(UserError, match="in training mode"):
        attention_fertilities(teacher.train(), PAIRS)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_weights_that_are_no_shares_are_refused(tiny_spec, bad: float, monkeypatch):
    model = _ByHand(tiny_spec("autoregressive", decoder_layers=2).model, 60).eval()
    monkeypatch.setattr(Weights, "dense", lambda self: torch.full((1, 2, 4, 3), bad))
    with pytest.raises(UserError, match="negative or not finite"):
        attention_fertilities(model, [([10, 11], [20, 21, 22])])


def test_reading_touches_no_random_numbers_and_no_gradients(teacher):
    before = torch.random.get_rng_state()
    attention_fertilities(teacher, PAIRS)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in teacher.parameters())
