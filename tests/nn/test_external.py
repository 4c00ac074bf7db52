"""Learnt tokens before the sequence: an encoder with them is its layers over the longer sequence."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.attention import BigBirdSpec, FullSpec, LocalSpec, LongformerSpec, Mask, PatternSpec
from hasten.errors import UserError
from hasten.nn.external import ExternalTokens, NoTokens
from hasten.nn.stack import Decoder, Encoder

SHAPE = (8, 2, 16, 0.1)
MASK = torch.tensor([[True] * 9, [False, True, True, True, False, True, True, False, False]])
MARKED = torch.tensor([[0, 0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0, 1, 0, 0]]).bool()
BIGBIRD = BigBirdSpec(block=2, random=1, external=3)
PATTERN = PatternSpec(pattern="External(2) | Local(1) | Marked()")
each = pytest.mark.parametrize(("spec", "tokens"), [(BIGBIRD, 3), (PATTERN, 2)], ids=["bigbird", "pattern"])


def encoder(*specs) -> Encoder:
    torch.manual_seed(0)
    stack = Encoder(2, *SHAPE, specs).double().eval()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stack


def states(seed: int = 0) -> Tensor:
    return torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_equal(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@each
def test_an_encoder_is_its_layers_over_the_tokens_and_the_sequence(spec, tokens: int):
    stack, x = encoder(spec), states().requires_grad_()
    marked = MARKED if spec is PATTERN else None
    longer = torch.cat((stack.external.states.expand(2, -1, -1), x), 1)
    mask = Mask(keys=torch.cat((torch.ones(2, tokens, dtype=torch.bool), MASK), 1))
    if marked is not None:
        mask = dataclasses.replace(mask, marked=torch.cat((torch.zeros(2, tokens, dtype=torch.bool), marked), 1))
    for layer in stack.layers:
        longer = layer(longer, mask)[0]
    out, expected = stack(x, MASK, marked), stack.norm(longer[:, tokens:])
    assert_equal(out[MASK], expected[MASK])
    wrt = [x, *stack.parameters()]
    found, wanted = (torch.autograd.grad(y[MASK].square().sum(), wrt) for y in (out, expected))
    assert_equal(found, wanted, 1e-9)
    assert all(gradient.any() for gradient in wanted)


@each
@pytest.mark.parametrize("junk", [math.nan, 1e10])
def test_padding_and_the_rest_of_the_batch_change_nothing(spec, tokens: int, junk: float):
    stack, x = encoder(spec), states()
    together = stack(x.masked_fill(~MASK[..., None], junk), MASK)
    for b in range(2):
        alone = stack(x[b : b + 1, MASK[b]], torch.ones(1, int(MASK[b].sum()), dtype=torch.bool))
        assert_equal(together[b : b + 1, MASK[b]], alone)


def test_far_tokens_know_of_each_other_through_the_learnt_ones():
    reached = []
    for spec in (PatternSpec(pattern="External(1) | Local(0)"), LocalSpec(left=0)):
        stack, x = encoder(spec), states().requires_grad_()
        reached.append(torch.autograd.grad(stack(x, MASK)[0, 8].square().sum(), x)[0][0, 0].any().item())
    assert reached == [True, False]


def test_a_batch_without_padding_stays_without():
    stack, everything = encoder(BIGBIRD), torch.ones(2, 9, dtype=torch.bool)
    assert stack.external.put(states(), Mask())[1].keys is None
    assert_equal(stack(states(), everything)[:1], stack(states(), MASK)[:1])


def test_tokens_start_like_embedded_ones_and_are_counted():
    torch.manual_seed(0)
    tokens = ExternalTokens(16, 256)
    assert tokens.states.std().item() == pytest.approx(1, abs=0.05)
    assert sum(parameter.numel() for parameter in tokens.parameters()) == 16 * 256


def test_an_encoder_without_them_is_what_it_was():
    stack = encoder(FullSpec())
    assert isinstance(stack.external, NoTokens)
    assert not [name for name in stack.state_dict() if "external" in name]


def test_layers_that_want_different_numbers_are_named():
    with pytest.raises(
        UserError, match=r"encoder attention: .* same in all layers; wanted are 3 by layer 1; 0 by layer 2"
    ):
        encoder(BIGBIRD, FullSpec())
    assert len(encoder(BIGBIRD, PatternSpec(pattern="External(3) | Local(2)")).external.states) == 3


def test_a_decoder_has_no_place_for_them():
    with pytest.raises(UserError, match=r"decoder attention, layer 1: bigbird .* 3 learnt tokens .* only an encoder"):
        Decoder(2, *SHAPE, (BIGBIRD,), (FullSpec(),))
    with pytest.raises(UserError, match=r"cross attention, layer 2: bigbird .* 3 learnt tokens .* only an encoder"):
        Decoder(2, *SHAPE, (FullSpec(),), (FullSpec(), BIGBIRD))


def test_marks_reach_mechanisms_that_take_them_and_no_others():
    stack, x = encoder(LongformerSpec(window=1, marked=True)), states()
    assert not torch.allclose(stack(x, MASK, MARKED)[MASK], stack(x, MASK)[MASK])
    with pytest.raises(UserError, match="marked tokens"):
        encoder(FullSpec())(x, MASK, MARKED)


@pytest.mark.usefixtures("unchecked")
def test_it_exports_with_a_dynamic_length():
    stack, length = encoder(BIGBIRD), torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(stack, (states(), MASK), dynamic_shapes=({1: length}, {1: length})).module()
    for x, mask in ((states(), MASK), (F.pad(states(), (0, 0, 0, 4)), F.pad(MASK, (0, 4)))):
        assert_equal(exported(x, mask)[mask], stack(x, mask)[mask])
