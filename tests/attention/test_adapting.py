"""What changes in training other than by gradients changes after updates, and only then."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hasten.attention import LSHSpec, PerformerSpec, RFASpec, RoutingSpec, SinkhornSpec, after_update, multi_head
from hasten.attention.adapting import Drawn, numbers

CHANGING = [
    LSHSpec(chunk=2, redraw_every=1),
    RoutingSpec(clusters=2, decay=0.5),
    RoutingSpec(clusters=2, decay=0.5, shared_qk=False),
    SinkhornSpec(block=2),
    RFASpec(redraw_every=1),
    PerformerSpec(features=8, redraw_every=1),
]
each = pytest.mark.parametrize("spec", CHANGING, ids=lambda spec: spec.kind)


def layer(spec) -> nn.Module:
    torch.manual_seed(0)
    return multi_head(8, 2, spec).double().train()


def tokens(length: int = 9) -> Tensor:
    return torch.randn(3, length, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def settled(module: nn.Module) -> dict[str, Tensor]:
    """The state without what is gathered for the next update, which no call reads."""
    return {name: x for name, x in state(module).items() if not name.endswith((".sums", ".counts"))}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@each
def test_a_call_moves_nothing_that_is_saved_and_an_update_does(spec):
    module = layer(spec)
    before, out = settled(module), module(tokens())
    assert same(settled(module), before)
    assert torch.equal(module(tokens()), out), "one step, one draw"
    after_update(module)
    assert not same(settled(module), before)


@each
def test_evaluation_moves_nothing(spec):
    module = layer(spec).eval()
    before, out = state(module), module(tokens())
    after_update(module)
    assert same(state(module), before)
    assert torch.equal(module(tokens()), out)


@each
def test_what_is_saved_goes_on_as_if_nothing_had_happened(spec):
    module = layer(spec)
    for _ in range(3):
        module(tokens())
        after_update(module)
    again = multi_head(8, 2, spec).double().train()
    again.load_state_dict(state(module))
    for _ in range(2):
        assert torch.equal(again(tokens()), module(tokens()))
        after_update(again)
        after_update(module)
    assert same(state(again), state(module))


@each
def test_processes_with_the_same_weights_stay_equal(spec):
    one, other = layer(spec), layer(spec)
    for _ in range(3):
        one(tokens())
        other(tokens())
        torch.manual_seed(torch.seed())  # the global numbers have no part in it
        after_update(one)
        after_update(other)
    assert same(state(one), state(other))


@each
def test_recomputed_activations_have_the_same_gradients(spec):
    plain, saving = layer(spec), layer(spec)
    for module, run in ((plain, plain), (saving, lambda x: checkpoint(saving, x, use_reentrant=False))):
        run(tokens().requires_grad_()).square().sum().backward()
        after_update(module)
    gradients = [[p.grad for p in module.parameters()] for module in (plain, saving)]
    assert gradients[0]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state(plain), state(saving), rtol=1e-12, atol=1e-12)


@each
def test_a_copy_is_made_at_any_time(spec):
    module = layer(spec)
    module(tokens()).sum().backward()
    assert same(state(copy.deepcopy(module)), state(module))


class Constant(Drawn):
    def __init__(self, seed: int, redraw_every: int):
        super().__init__(seed, redraw_every)
        self.register_buffer("value", torch.empty(3))
        self.draw(numbers(seed, 0))

    def draw(self, generator: torch.Generator) -> None:
        self.value.copy_(torch.rand(3, generator=generator, device="cpu"))


def test_a_schedule_counts_updates_in_training():
    module, drawn = Constant(5, 3), []
    for _ in range(9):
        after_update(module)
        drawn.append(tuple(module.value.tolist()))
    assert [drawn[i] == drawn[i - 1] for i in range(1, 9)] == [True, False, True, True, False, True, True, False]
    assert int(module.draws) == 3
    module.eval()
    after_update(module)
    assert int(module.updates) == 9


def test_without_a_schedule_only_redraw_draws():
    module = Constant(5, 0)
    before = module.value.clone()
    after_update(module)
    assert torch.equal(module.value, before)
    module.redraw()
    assert not torch.equal(module.value, before)


def test_draws_of_all_seeds_are_different():
    drawn = {tuple(torch.rand(2, generator=numbers(seed, draw)).tolist()) for seed in range(40) for draw in range(40)}
    assert len(drawn) == 1600
