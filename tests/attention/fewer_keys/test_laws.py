"""What all mechanisms with fewer keys obey where the conformance suite does not reach: any shape, padding, weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.mechanisms import assert_equal, gradients
from hasten.attention import (
    Attention,
    CompressedSpec,
    LinformerSpec,
    Mask,
    MechanismSpec,
    NystromSpec,
    Place,
    SinkhornSpec,
)

LONGEST = 17
SPECS: dict[str, MechanismSpec] = {
    "compressed": CompressedSpec(),
    "compressed, by head, over channels": CompressedSpec(stride=2, kernel=3, per_head=True, over_channels=True),
    "compressed, averaged, local": CompressedSpec(values="average", stride=2, kernel=4, local=3),
    "linformer": LinformerSpec(max_length=LONGEST, rank=4),
    "linformer, by head": LinformerSpec(max_length=LONGEST, rank=6, sharing="none"),
    "linformer, means": LinformerSpec(max_length=LONGEST, rank=5, projection="mean"),
    "linformer, convolutions": LinformerSpec(max_length=LONGEST, rank=5, projection="convolution", sharing="none"),
    "sinkhorn": SinkhornSpec(block=3, iterations=4),
    "sinkhorn, learnt": SinkhornSpec(block=2, iterations=4, max_blocks=9),
    "sinkhorn, cut": SinkhornSpec(block=3, cut=2, iterations=4),
    "nystrom": NystromSpec(landmarks=4),
    "nystrom with a convolution": NystromSpec(landmarks=3, residual=5),
}
each = pytest.mark.parametrize("name", SPECS)


def build(spec: MechanismSpec, n_heads: int, width: int) -> Attention:
    """With parameters in float64, away from where they start."""
    attention = spec.at(Place(n_heads=n_heads, d_head=width)).build().double().eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return attention


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@st.composite
def calls(draws: st.DrawFn, causal: bool, cross: bool) -> tuple[tuple[Tensor, ...], Mask]:
    """Queries, keys, values of any shape; keys may be padded anywhere, all of them too."""
    batch, heads, width = draws(st.integers(1, 3)), draws(st.integers(1, 3)), draws(st.integers(1, 5))
    n_keys = draws(st.integers(1, LONGEST))
    n_queries = draws(st.integers(1, 6)) if cross else n_keys
    row = st.lists(st.booleans(), min_size=n_keys, max_size=n_keys)
    keys = draws(st.none() | st.lists(row, min_size=batch, max_size=batch).map(torch.tensor))
    seed = draws(st.integers(0, 1000))
    qkv = tuple(draw((batch, heads, n, width), 3 * seed + i) for i, n in enumerate((n_queries, n_keys, n_keys)))
    return qkv, Mask(causal=causal and draws(st.booleans()), keys=keys)


@each
@settings(max_examples=15)
@given(data=st.data())
def test_any_call_gives_the_definition_and_its_gradients(name: str, data: st.DataObject):
    traits = SPECS[name].at(Place(n_heads=1, d_head=1)).build().traits
    (q, k, v), mask = data.draw(calls(traits.causal is not None, traits.cross))
    attention = build(SPECS[name], q.shape[1], q.shape[3])
    out, expected = attention.operator(q, k, mask).apply(v), attention.reference(q, k, mask) @ v
    assert_equal(out, expected, 1e-8)
    wrt = (q, k, v, *attention.parameters())
    assert_equal(gradients(out, wrt), gradients(expected, wrt), 1e-6)


@each
@settings(max_examples=15)
@given(data=st.data())
def test_padding_anywhere_is_the_same_as_dropping(name: str, data: st.DataObject):
    (q, k, v), mask = data.draw(calls(causal=False, cross=False))
    attention = build(SPECS[name], q.shape[1], q.shape[3])
    keys = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if mask.keys is None else mask.keys
    garbage = [x.masked_fill(~keys[:, None, :, None], torch.nan) for x in (k, v)]
    out = attention.operator(q, garbage[0], Mask(keys=keys)).apply(garbage[1])
    assert out.isfinite().all()
    for b, keep in enumerate(keys):
        if keep.any():
            alone = attention.operator(*(x[b : b + 1, :, keep] for x in (q, k)), Mask()).apply(v[b : b + 1, :, keep])
            assert_equal(out[b : b + 1, :, keep], alone, 1e-8)


@each
def test_it_is_built_without_storage_and_filled_later(name: str):
    spec = SPECS[name].at(Place(n_heads=2, d_head=4))
    torch.manual_seed(0)
    real = spec.build()
    with torch.device("meta"):
        empty = spec.build()
    assert all(tensor.device.type == "meta" for tensor in empty.parameters())
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(real.state_dict())
    q, k, v = (draw((1, 2, 9, 4), i).float() for i in range(3))
    out, expected = (a.eval().operator(q, k, Mask()).apply(v) for a in (filled, real))
    assert torch.equal(out, expected)


@each
def test_a_row_of_one_token_gets_finite_gradients(name: str):
    """A single token, alone and beside padding."""
    attention = build(SPECS[name], 2, 4)
    for mask, length in ((Mask(), 1), (Mask(keys=torch.tensor([[False, True, False]])), 3)):
        qkv = q, k, v = tuple(draw((1, 2, length, 4), i) for i in range(3))
        out = attention.operator(q, k, mask).apply(v)
        assert out.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients(out, qkv))
