"""SSRU against its recurrence, written as a loop over positions and channels."""

import math

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import FullSpec, Mask, SSRUSpec, multi_head
from hasten.attention.ssru import SSRU, Cells, SSRULayer
from hasten.errors import UserError
from hasten.nn.stack import Decoder

D, H, N = 6, 3, 9
KEYS = torch.tensor([[True] * 9, [False, True, True, False, True, True, True, False, False]])


def layer(*, bias: bool = True) -> SSRULayer:
    torch.manual_seed(0)
    made = multi_head(D, H, SSRUSpec(), bias=bias).double()
    assert isinstance(made, SSRULayer)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.7)
    return made


def sequence(n: int = N, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, D, generator=generator, dtype=torch.float64, requires_grad=True)


def definition(m: SSRULayer, x: Tensor) -> Tensor:
    """The recurrence over all positions of x (n, D), in plain loops over positions and channels."""
    own = m.state_dict(keep_vars=True)
    forget, value = own["in_proj.weight"][:D], own["in_proj.weight"][D:]
    c, outs = [x.new_zeros(()) for _ in range(D)], []
    for row in x:
        for i in range(D):
            logit = forget[i] @ row + (own["forget_bias"][i] if "forget_bias" in own else 0.0)
            f = 1 / (1 + (-logit).exp())
            c[i] = f * c[i] + (1 - f) * (value[i] @ row)
        outs.append(torch.stack([entry.clamp(min=0) for entry in c]))
    return torch.stack(outs)


def gradients(out: Tensor, *wrt: Tensor) -> tuple[Tensor, ...]:
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return torch.autograd.grad(out, wrt, cotangent, retain_graph=True)


@pytest.mark.parametrize("bias", [True, False])
def test_the_causal_layer_equals_the_recurrence_and_so_do_its_gradients(bias):
    m, x = layer(bias=bias), sequence()
    out, expected = m(x, Mask(causal=True)), torch.stack([definition(m, row) for row in x])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    wrt = (x, *m.parameters())
    torch.testing.assert_close(gradients(out, *wrt), gradients(expected, *wrt), rtol=1e-8, atol=1e-10)
    assert len(list(m.parameters())) == 1 + bias


def test_without_a_causal_mask_every_token_reads_the_last_state():
    m, x = layer(), sequence()
    expected = torch.stack([definition(m, row)[-1:].expand(N, -1) for row in x])
    torch.testing.assert_close(m(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 65, 200])
def test_sequences_longer_than_a_chunk_equal_the_recurrence_too(length):
    m, x = layer(), sequence(length)
    torch.testing.assert_close(m(x, Mask(causal=True))[0], definition(m, x[0]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [9]], ids=str)
def test_steps_of_any_size_equal_the_whole_sequence(chunks):
    m, x = layer(), sequence()
    outs, state = [], None
    for part in x.split(chunks, 1):
        out, state = m.step(part, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), m(x, Mask(causal=True)), rtol=1e-10, atol=1e-12)
    assert isinstance(state.values, Cells)
    assert state.values.c.untyped_storage().nbytes() == 2 * D * 8


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_the_same_as_dropping(causal):
    m, x = layer(), sequence()
    for junk in (math.nan, 1e10):
        padded = x.detach().masked_fill(~KEYS[..., None], junk)
        out = m(padded, Mask(causal=causal, keys=KEYS))
        for row, real in enumerate(KEYS):
            alone = m(x[row : row + 1, real], Mask(causal=causal))[0]
            torch.testing.assert_close(out[row, real], alone, rtol=1e-10, atol=1e-12)


def test_states_follow_their_rows():
    m, x, rows = layer(), sequence(), torch.tensor([1, 0, 0, 1])
    _, state = m.step(x[:, :5], None)
    out, _ = m.step(x[rows, 5:], state.select(rows))
    torch.testing.assert_close(out, m(x[rows], Mask(causal=True))[:, 5:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shift", [-60.0, 60.0])
def test_gates_that_are_all_but_open_or_shut_lose_nothing(shift):
    logits = torch.full((1, 1, 300, 1), shift)
    v = torch.ones(1, 1, 300, 1)
    out = SSRU().operator(logits, logits, Mask(causal=True)).apply(v)
    expected = torch.ones_like(v) if shift < 0 else torch.zeros_like(v)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_a_decoder_of_it_steps_as_it_reads_and_its_weights_are_not_for_other_layers():
    torch.manual_seed(0)
    shape = (2, D, H, 12, 0.0, [SSRUSpec()], [FullSpec()])
    decoder = Decoder(*shape).double().eval()
    x, memory, mask = sequence().detach(), sequence(4, 1).detach(), torch.ones(2, 4, dtype=torch.bool)
    whole = decoder(x, memory, mask)
    state, outs = decoder.begin(memory, mask), []
    for part in x.split(1, 1):
        out, state = decoder.step(part, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-10, atol=1e-12)
    with pytest.raises(UserError, match="weight for each channel"):
        Decoder(*shape, sharing=[1, 1])


def test_a_memory_is_refused():
    m, x = layer(), sequence()
    with pytest.raises(UserError, match="SSRU is for self-attention"):
        m(x, Mask(), x)
    with pytest.raises(UserError, match="SSRU is for self-attention"):
        m.remember(x, KEYS)


def test_steps_are_taken_under_autocast_too():
    torch.manual_seed(0)
    layer, x = SSRULayer(8, 2, SSRU()), torch.randn(2, 7, 8)
    expected = layer.attend(x, Mask(causal=True)).output
    with torch.autocast("cpu", torch.bfloat16):
        first, state = layer.step(x[:, :3], None)
        second, _ = layer.step(x[:, 3:], state)
    torch.testing.assert_close(torch.cat((first, second), 1).float(), expected, atol=0.05, rtol=0.05)
