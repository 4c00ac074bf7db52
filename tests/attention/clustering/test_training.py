"""Clustering in training: checkpointed and compiled steps, processes side by side, states, weights kept or not."""

import io
import itertools

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from attention.clustering.placed import build, tokens
from hasten.attention import (
    LSHSpec,
    Mask,
    RoutingSpec,
    after_update,
    attention_losses,
    multi_head,
)
from hasten.attention.clustering import gathered
from hasten.attention.clustering.gathered import TileOperator

SPECS = [
    LSHSpec(chunk=8, rounds=3, buckets=8, redraw_every=2),
    LSHSpec(chunk=5, rounds=2, buckets=4, strict=True, redraw_every=2),
    RoutingSpec(clusters=5, commitment=0.1, decay=0.5),
    RoutingSpec(clusters=4, window=3, shared_qk=False, commitment=0.1, decay=0.5),
    RoutingSpec(clusters=3, window=7, strict=True, commitment=0.1, decay=0.5),
]
each = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind} {spec.strict}")


def layer(spec: LSHSpec | RoutingSpec, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return multi_head(12, 2, spec).double().train()


def objective(model: nn.Module, x: Tensor, *, replay: bool) -> Tensor:
    """A loss of the output, and the losses that attention adds to it."""

    def attended(x: Tensor) -> Tensor:
        return model(x, mask=Mask(causal=True))

    with attention_losses() as losses:
        out = torch.utils.checkpoint.checkpoint(attended, x, use_reentrant=False) if replay else attended(x)
        total = out.square().mean()
    return total + sum(term.weight * term.sum / term.count for term in losses)


def sentence(n: int = 30, seed: int = 0) -> Tensor:
    return torch.randn(2, n, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@each
def test_a_checkpointed_step_of_a_layer_is_that_step(spec: LSHSpec | RoutingSpec):
    trained = []
    for replay in (False, True):
        model = layer(spec)
        optimiser = torch.optim.SGD(model.parameters(), 0.5)
        for step in range(3):
            optimiser.zero_grad()
            loss = objective(model, sentence(seed=step), replay=replay)
            loss.backward()
            optimiser.step()
            after_update(model)
        trained.append((loss.detach(), *model.state_dict().values()))
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS[2:], ids=lambda spec: f"{spec.kind} {spec.strict}")
def test_the_losses_of_attention_reach_the_projections(spec: RoutingSpec):
    with_loss, without = layer(spec), layer(RoutingSpec(**{**vars(spec), "commitment": 0.0}))
    for model in (with_loss, without):
        objective(model, sentence(), replay=False).backward()
    assert not torch.allclose(*(next(model.parameters()).grad for model in (with_loss, without)))


@each
def test_two_processes_with_data_of_their_own_have_the_same_buffers(
    spec: LSHSpec | RoutingSpec, monkeypatch: pytest.MonkeyPatch
):
    first, second = build(spec).train(), build(spec).train()
    for update in range(3):
        for attention, seed in ((first, 0), (second, 100)):
            x = tokens(20, seed=seed + update)
            attention.operator(x, x + 1, Mask())
        mine, theirs = (
            [x.clone() for name, x in a.named_buffers() if name.endswith((".sums", ".counts"))] for a in (first, second)
        )
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            for attention, others in ((first, theirs), (second, mine)):
                other = iter(others)
                patch.setattr(torch.distributed, "all_reduce", lambda x, other=other: x.add_(next(other)))
                after_update(attention)
    for name, buffer in first.named_buffers():
        torch.testing.assert_close(buffer, second.get_buffer(name), msg=name)
    fresh = build(spec).state_dict()
    assert any(not torch.equal(buffer, first.state_dict()[name]) for name, buffer in fresh.items())


@each
def test_evaluation_repeats_itself_and_changes_nothing(spec: LSHSpec | RoutingSpec):
    attention, x = build(spec).eval(), tokens(40).requires_grad_()
    before = {name: buffer.clone() for name, buffer in attention.named_buffers()}
    once = attention.operator(x, x, Mask(causal=True)).apply(x)
    after_update(attention)
    assert torch.equal(attention.operator(x, x, Mask(causal=True)).apply(x), once)
    assert all(torch.equal(attention.get_buffer(name), buffer) for name, buffer in before.items())


@each
def test_what_was_saved_in_training_goes_on_as_if_it_had_not_been(spec: LSHSpec | RoutingSpec):
    def train(attention: nn.Module, steps: range) -> None:
        for step in steps:
            x = tokens(20, seed=step)
            attention.train().operator(x, x - 1, Mask())
            after_update(attention)

    attention, resumed, saved = build(spec), build(spec), io.BytesIO()
    train(attention, range(3))
    torch.save(attention.state_dict(), saved)
    resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    for one in (attention, resumed):
        train(one, range(3, 7))
    x = tokens(30)
    dense = [one.eval().operator(x, x, Mask()).dense() for one in (attention, resumed)]
    assert torch.equal(*dense)
    assert not torch.equal(build(spec).eval().operator(x, x, Mask()).dense(), dense[0])


@each
def test_a_layer_is_built_without_memory_and_filled_later(spec: LSHSpec | RoutingSpec):
    state = torch.get_rng_state()
    with torch.device("meta"):
        empty = multi_head(12, 2, spec)
    assert all(x.is_meta for x in itertools.chain(empty.parameters(), empty.buffers()))
    assert torch.equal(torch.get_rng_state(), state)
    full = layer(spec).eval()
    filled = empty.to_empty(device="cpu").double().eval()
    filled.load_state_dict(full.state_dict())
    x = sentence()
    assert torch.equal(*(model(x, mask=Mask(causal=True)) for model in (full, filled)))


@pytest.mark.parametrize("room", [0, 1, 3])
@each
def test_gradients_are_the_same_whether_weights_are_kept_or_computed_again(
    spec: LSHSpec | RoutingSpec, room: int, monkeypatch: pytest.MonkeyPatch
):
    x = tokens(60).requires_grad_()
    v = tokens(60, seed=1).requires_grad_()
    monkeypatch.setattr(gathered, "GROUP", 1)
    gradients = []
    for share in (room, 1000):
        monkeypatch.setattr(gathered, "KEPT", share / 3)
        operator = build(spec).eval().operator(x, x * 2, Mask(causal=True))
        assert isinstance(operator, TileOperator)
        gradients.append(torch.autograd.grad(operator.apply(v).square().sum(), (x, v)))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    assert gradients[0][0].any()


# Gathering losses breaks the graph between an operator's making and its use; torch looks at what passes from one part
# to the other.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("spec", SPECS[2::2], ids=lambda spec: f"{spec.kind} {spec.strict}")
def test_a_compiled_step_in_training_is_the_step(spec: LSHSpec | RoutingSpec):
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        model = layer(spec)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        value = objective(called, sentence(), replay=False)
        value.backward()
        after_update(model)
        results.append([value.detach(), *(p.grad for p in model.parameters()), *model.buffers()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
