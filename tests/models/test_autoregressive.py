import math

import pytest
import torch
from torch import Tensor

from hasten.data.batch import pad, pair_batch
from hasten.data.tokenizer import BOS, EOS, PAD, SPECIAL_IDS
from hasten.decoding.canvas import select
from hasten.errors import UserError
from hasten.models import AutoregressiveSpec
from hasten.models.base import Memory

DEPTHS = [(2, 2), (2, 1), (3, 1), (1, 2)]
SOURCES = [[10, 11, 12, EOS], [13, EOS], [14, 15, 16, 17, 18, 19, EOS]]
TARGETS = [[20, 21, 22], [23, 23, 23], [24, 25, 26]]


@pytest.fixture(params=DEPTHS, ids=lambda depths: f"{depths[0]}-{depths[1]}")
def model(request: pytest.FixtureRequest):
    encoder_layers, decoder_layers = request.param
    with torch.random.fork_rng():
        torch.manual_seed(1)
        spec = AutoregressiveSpec(d_model=32, d_ff=64, encoder_layers=encoder_layers, decoder_layers=decoder_layers)
        return spec.build(40).eval()


def teacher_forced(model, memory: Memory, targets: list[list[int]]) -> Tensor:
    """Log probabilities (B, U + 1, V) after BOS, y_1, .., y_U, by one pass over the whole target."""
    inputs, _ = pad([[BOS, *target] for target in targets])
    return model.logits(model.decoder(model.embed(inputs), memory.states, memory.mask)).log_softmax(-1)


def stepped(model, memory: Memory, targets: list[list[int]]) -> Tensor:
    """The same, token by token."""
    state, outputs = model.begin(memory), []
    for position, last in enumerate(torch.tensor([[BOS, *target] for target in targets]).T):
        log_probs, state = model.next_log_probs(last, position, state)
        outputs.append(log_probs)
    return torch.stack(outputs, 1)


@torch.inference_mode()
def test_decoding_step_by_step_equals_reading_the_whole_target(model):
    memory = model.encode(*pad(SOURCES))
    expected = teacher_forced(model, memory, TARGETS) + model.banned
    torch.testing.assert_close(stepped(model, memory, TARGETS), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_state_can_be_reordered_repeated_and_dropped(model):
    memory = model.encode(*pad(SOURCES))
    _, state = model.next_log_probs(torch.tensor([BOS] * 3), 0, model.begin(memory))
    _, state = model.next_log_probs(torch.tensor([20, 23, 24]), 1, state)
    rows = torch.tensor([2, 2, 0])
    found, _ = model.next_log_probs(torch.tensor([25, 30, 21]), 2, select(state, rows))
    expected = teacher_forced(model, memory.select(rows), [[24, 25], [24, 30], [20, 21]])[:, 2] + model.banned
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_target_reads_nothing_later(model):
    memory = model.encode(*pad(SOURCES))
    changed = teacher_forced(model, memory, [[20, 21, 30], [23, 23, 31], [24, 25, 32]])
    torch.testing.assert_close(changed[:, :3], teacher_forced(model, memory, TARGETS)[:, :3], rtol=0, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_sum_over_sentences_tokens_and_the_end(smoothing: float):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        spec = AutoregressiveSpec(d_model=32, d_ff=64, encoder_layers=1, decoder_layers=1, label_smoothing=smoothing)
        model = spec.build(40).eval()
    pairs = [([10, 11], [20, 21, 22]), ([12], []), ([13, 14, 15], [23])]
    total, count = 0.0, 0
    for source, target in pairs:
        memory = model.encode(*pad([[*source, EOS]]))
        log_probs = teacher_forced(model, memory, [target])[0].detach()
        for said, right in zip(log_probs, [*target, EOS], strict=True):
            total += (1 - smoothing) * -float(said[right]) + smoothing * -float(said.mean())
            count += 1
    term = model.loss(pair_batch(pairs), torch.Generator())["tokens"]
    assert int(term.count) == count == 7
    assert term.sum.item() == pytest.approx(total, rel=1e-5)


@torch.inference_mode()
def test_symbols_that_are_no_text_are_impossible_and_the_end_is_not(model):
    memory = model.encode(*pad(SOURCES))
    log_probs, _ = model.next_log_probs(torch.tensor([BOS] * 3), 0, model.begin(memory))
    assert (log_probs[:, [i for i in SPECIAL_IDS if i != EOS]] == -math.inf).all()
    assert log_probs[:, EOS].isfinite().all()
    assert log_probs[:, max(SPECIAL_IDS) + 1 :].isfinite().all()


@torch.inference_mode()
def test_the_longest_output_depends_on_the_row_alone(model):
    together = model.limit(model.encode(*pad(SOURCES)))
    alone = [int(model.limit(model.encode(*pad([row])))) for row in SOURCES]
    assert together.tolist() == alone


def test_the_end_symbol_and_what_follows_are_no_output(model):
    assert model.output_ids([20, 21, EOS]) == [20, 21]
    assert model.output_ids([20, 21]) == [20, 21]
    assert model.output_ids([EOS, PAD]) == []


def test_specs_that_describe_no_model_are_refused():
    with pytest.raises(UserError, match="d_model 30"):
        AutoregressiveSpec(d_model=30).build(40)
    with pytest.raises(UserError, match="2 entries"):
        AutoregressiveSpec(d_model=32, encoder_attention=AutoregressiveSpec().encoder_attention * 2).build(40)
