"""Encoder and decoder stacks: one spec per layer, padding, and steps."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import FullAttention, FullSpec
from hasten.errors import UserError
from hasten.nn.layers import FeedForward
from hasten.nn.mechanisms import per_layer
from hasten.nn.stack import Decoder, Encoder

SHAPE = (8, 2, 16, 0.1)
MASK = torch.tensor([[True] * 6, [True, True, True, False, False, False]])


def randomise(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


def encoder(n_layers: int = 2) -> Encoder:
    torch.manual_seed(0)
    stack = Encoder(n_layers, *SHAPE, (FullSpec(),)).double().eval()
    randomise(stack)
    return stack


def decoder(n_layers: int = 2) -> Decoder:
    torch.manual_seed(1)
    stack = Decoder(n_layers, *SHAPE, (FullSpec(),), (FullSpec(),)).double().eval()
    randomise(stack)
    return stack


def states(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# One spec per layer


def test_one_spec_stands_for_all_layers_and_several_for_one_each():
    assert per_layer(["a"], 3, "x") == ["a", "a", "a"]
    assert per_layer(["a", "b", "c"], 3, "x") == ["a", "b", "c"]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_any_other_number_of_specs_is_an_error_that_says_what_to_give(count: int):
    with pytest.raises(UserError, match=f"encoder attention has {count} entries; give 1 for all layers or 3"):
        Encoder(3, *SHAPE, (FullSpec(),) * count)


def test_layers_get_their_own_spec_and_share_nothing():
    specs = (FullSpec(dropout=0.1), FullSpec(dropout=0.2), FullSpec(dropout=0.3))
    stack = Decoder(3, *SHAPE, specs, (FullSpec(),))
    assert [layer.self_attention.attention.dropout for layer in stack.layers] == [0.1, 0.2, 0.3]
    assert len({id(layer.cross_attention.attention) for layer in stack.layers}) == 3
    assert len({parameter.data_ptr() for parameter in stack.parameters()}) == len(list(stack.parameters()))


@dataclass(frozen=True, kw_only=True)
class LackingSpec(FullSpec):
    """Full attention that claims less."""

    lacks: tuple[tuple[str, object], ...]

    def build(self) -> FullAttention:
        attention = super().build()
        attention.traits = dataclasses.replace(attention.traits, **dict(self.lacks))
        return attention


FULL = (FullSpec(), FullSpec())


@pytest.mark.parametrize("lacks", [("key_padding", False)])
def test_an_encoder_refuses_a_mechanism_without_padding(lacks: tuple[str, object]):
    with pytest.raises(UserError, match=r"encoder attention, layer 2: full attention .* padded"):
        Encoder(2, *SHAPE, (FullSpec(), LackingSpec(lacks=(lacks,))))


@pytest.mark.parametrize("lacks", [("causal", None), ("causal", "value"), ("step", False)], ids=str)
def test_a_decoder_refuses_a_mechanism_that_cannot_decode(lacks: tuple[str, object]):
    with pytest.raises(UserError, match=r"decoder attention, layer 1: full attention .* strictly causal"):
        Decoder(2, *SHAPE, (LackingSpec(lacks=(lacks,)), FullSpec()), FULL)


@pytest.mark.parametrize("lacks", [("cross", False), ("key_padding", False)], ids=str)
def test_a_decoder_refuses_a_mechanism_that_cannot_read_a_memory(lacks: tuple[str, object]):
    with pytest.raises(UserError, match=r"cross attention, layer 2: full attention"):
        Decoder(2, *SHAPE, FULL, (FullSpec(), LackingSpec(lacks=(lacks,))))


# The encoder


def test_an_encoder_of_one_head_and_torchs_names_equals_torchs_layer():
    stack = encoder(1)
    torch.manual_seed(0)
    other = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, dropout=0.0).double().eval()
    names = {
        "self_attn.": "self_attention.",
        "linear1.": "feed_forward.inner.",
        "linear2.": "feed_forward.outer.",
        "norm1.": "self_norm.",
        "norm2.": "feed_forward_norm.",
    }
    own = stack.layers[0].state_dict()
    renamed = {
        key: own[key.replace(theirs, mine)]
        for theirs, mine in names.items()
        for key in other.state_dict()
        if theirs in key
    }
    other.load_state_dict(renamed)
    x = states(2, 6).requires_grad_()
    out, expected = stack(x, MASK), stack.norm(other(x, src_key_padding_mask=~MASK))
    torch.testing.assert_close(out[MASK], expected[MASK])
    cotangent = states(2, 6, 3) * MASK[..., None]
    torch.testing.assert_close(torch.autograd.grad(out, x, cotangent), torch.autograd.grad(expected, x, cotangent))


@pytest.mark.parametrize("junk", [0.0, 1e10, math.nan])
def test_padding_of_the_source_changes_nothing(junk: float):
    stack = encoder()
    x = states(2, 6)
    padded = x.masked_fill(~MASK[..., None], junk)
    out = stack(padded, MASK)
    torch.testing.assert_close(out[0:1], stack(x[0:1], MASK[0:1]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(out[1:2, :3], stack(x[1:2, :3], MASK[1:2, :3]), rtol=1e-10, atol=1e-10)


def test_a_fully_padded_source_is_finite():
    x = states(1, 4).requires_grad_()
    out = encoder()(x, torch.zeros(1, 4, dtype=torch.bool))
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


# The decoder


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 3], [2, 5], [7]], ids=str)
def test_steps_of_any_size_equal_the_whole_sequence(chunks: list[int]):
    stack, x, memory = decoder(), states(2, 7).requires_grad_(), states(2, 6, 1).requires_grad_()
    whole = stack(x, memory, MASK)
    outs, state = [], stack.begin(memory, MASK)
    for part in x.split(chunks, dim=1):
        out, state = stack.step(part, state)
        outs.append(out)
    stepped = torch.cat(outs, dim=1)
    torch.testing.assert_close(stepped, whole, rtol=1e-10, atol=1e-10)
    cotangent = states(2, 7, 5)
    expected = torch.autograd.grad(whole, (x, memory), cotangent)
    actual = torch.autograd.grad(stepped, (x, memory), cotangent)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_the_state_of_a_decoder_follows_its_rows():
    stack, x, memory, rows = decoder(), states(2, 5), states(2, 6, 1), torch.tensor([1, 0, 1])
    fresh = stack.begin(memory, MASK)
    _, state = stack.step(x[:, :3], fresh)
    out, _ = stack.step(x[rows, 3:], tuple(layer.select(rows) for layer in state))
    torch.testing.assert_close(out, stack(x, memory, MASK)[rows, 3:], rtol=1e-10, atol=1e-10)
    out, _ = stack.step(x[rows], tuple(layer.select(rows) for layer in fresh))
    torch.testing.assert_close(out, stack(x, memory, MASK)[rows], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", ["weights", "context", "output"])
def test_what_is_taken_back_was_never_there(shared: Literal["weights", "context", "output"]):
    torch.manual_seed(1)
    plans = {"sharing": (1, 1, 3), "cross_sharing": (1, 2, 2), "shared_of_cross": shared}
    stack = Decoder(3, *SHAPE, (FullSpec(),), (FullSpec(),), **plans).double().eval()
    randomise(stack)
    x, memory = states(2, 6), states(2, 6, 1)
    whole, state, places = stack(x, memory, MASK), stack.begin(memory, MASK), [0, 0]
    for n, back in ((4, [3, 1]), (3, [1, 2]), (2, [0, 0])):
        rows = [x[b, place : place + n] for b, place in enumerate(places)]
        out, state = stack.step(torch.stack(rows), state)
        expected = torch.stack([whole[b, place : place + n] for b, place in enumerate(places)])
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        state = stack.rewind(state, torch.tensor(back))
        places = [place + n - b for place, b in zip(places, back, strict=True)]


@pytest.mark.parametrize("junk", [0.0, 1e10, math.nan])
def test_padding_of_source_and_target_changes_nothing_in_a_decoder(junk: float):
    stack, x, memory = decoder(), states(2, 5), states(2, 6, 1)
    lengths = torch.tensor([[True] * 5, [True, True, False, False, False]])
    # On the target side padding is finite: it is embedded like any token and read by no real position.
    padded = stack(x.masked_fill(~lengths[..., None], 7.0), memory.masked_fill(~MASK[..., None], junk), MASK)
    torch.testing.assert_close(padded[0:1], stack(x[0:1], memory[0:1], MASK[0:1]), rtol=1e-10, atol=1e-10)
    alone = stack(x[1:2, :2], memory[1:2, :3], MASK[1:2, :3])
    torch.testing.assert_close(padded[1:2, :2], alone, rtol=1e-10, atol=1e-10)


def test_a_later_target_position_changes_nothing_earlier():
    stack, x, memory = decoder(), states(2, 6), states(2, 6, 1)
    before = stack(x, memory, MASK)
    for t in range(6):
        changed = x.clone()
        changed[:, t:] += 1 + states(2, 6 - t, 9)
        after = stack(changed, memory, MASK)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(after[:, t], before[:, t])


# Both


def test_every_parameter_learns():
    x, memory = states(2, 5), states(2, 6, 1)
    enc, dec = encoder(), decoder()
    (dec(x, enc(memory, MASK), MASK) * states(2, 5, 2)).sum().backward()
    # A key's bias adds the same to all scores of a query, which softmax ignores: it is there for nn.MultiheadAttention.
    for stack in (enc, dec):
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in stack.parameters())


def test_a_feed_forward_network_is_what_its_docstring_says():
    torch.manual_seed(0)
    network = FeedForward(8, 16, 0.5).double().eval()
    x = states(2, 3)
    hidden = (x @ network.inner.weight.T + network.inner.bias).clamp(min=0)
    torch.testing.assert_close(network(x), hidden @ network.outer.weight.T + network.outer.bias)


def test_training_drops_and_is_repeatable_under_a_seed():
    stack, x = encoder().train(), states(2, 6)
    torch.manual_seed(5)
    first = stack(x, MASK)
    assert not torch.equal(stack(x, MASK), first)
    torch.manual_seed(5)
    assert torch.equal(stack(x, MASK), first)
    state = torch.get_rng_state()
    stack.eval()(x, MASK)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("unchecked")
def test_an_encoder_compiles_into_one_graph_in_training():
    torch.manual_seed(0)
    stack, x = Encoder(1, 8, 2, 16, 0.0, (FullSpec(),)).double(), states(2, 6).requires_grad_()
    torch.compiler.reset()
    out, expected = torch.compile(stack, fullgraph=True, backend="aot_eager")(x, MASK), stack(x, MASK)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weights = states(2, 6, 3)
    torch.testing.assert_close(torch.autograd.grad(out, x, weights), torch.autograd.grad(expected, x, weights))
