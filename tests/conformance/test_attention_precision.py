"""Half precision, compilation, export."""

import pytest
import torch
from torch import Tensor, nn

from conformance.mechanisms import Case, assert_equal, each, each_code, each_mask, gradients, inputs, make_mask, those
from hasten.attention import Attention, Mask

# Precision, compilation, export


@pytest.mark.parametrize("n_queries", [7, 1])
@each_mask
def test_large_scores_in_half_precision_stay_accurate(case: Case, mask: str, n_queries: int):
    attention = case.build()
    if n_queries == 1 and not (attention.traits.cross or attention.traits.suffix):
        pytest.skip("not claimed")
    given = make_mask(mask, n_queries, 7)
    # Rounded first, so that the only difference is in the computation.
    q, k, v = (x.detach().bfloat16().float() for x in inputs(n_queries, 7))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        half = attention.operator((10 * q).bfloat16(), (10 * k).bfloat16(), given).apply(v.bfloat16())
    exact = attention.operator((10 * q).bfloat16().float(), (10 * k).bfloat16().float(), given).apply(v)
    assert_equal(half.float(), exact, 2e-2)


@each_mask
def test_training_in_half_precision_is_finite_and_accurate_at_ordinary_scores(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)
    for scale in (1.0, 10.0):
        exact = tuple(x.detach().bfloat16().float().requires_grad_() for x in inputs())
        half = tuple(x.detach().bfloat16().requires_grad_() for x in exact)
        with torch.autocast("cpu", torch.bfloat16):
            out = attention.operator(scale * half[0], scale * half[1], given).apply(half[2])
        expected = attention.operator(scale * exact[0], scale * exact[1], given).apply(exact[2])
        moved, wanted = gradients(out.float(), half), gradients(expected, exact)
        assert all(x.isfinite().all() for x in (out, *moved))
        if scale == 1.0:
            assert_equal(out.float(), expected, 3e-2)
            assert_equal([x.float() for x in moved], list(wanted), 5e-2)


class Call(nn.Module):
    """A mechanism as a module over tensors."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention
        self.causal, self.padded = attention.traits.causal is not None, attention.traits.key_padding

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        mask = Mask(causal=self.causal, keys=keys if self.padded else None)
        return self.attention.operator(q, k, mask).apply(v)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@each
def test_a_backward_pass_may_stand_within_autocast(case: Case, causal: bool):
    attention = case.build().float()
    q, k, v = (x.detach().float().requires_grad_() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        operator = attention.operator(q, k, Mask(causal=causal and case.traits.causal is not None))
        operator.apply(v).float().square().sum().backward()
    assert v.grad is not None
    assert v.grad.isfinite().all()


@pytest.mark.usefixtures("unchecked")
@each_code
def test_it_compiles_into_one_graph_for_all_lengths(case: Case):
    compare_compiled(case, "eager")


@pytest.mark.usefixtures("unchecked")
@those(lambda case: case.name in ("full", "average", "performer", "efficient", "compressed, averaged", "heads"))
def test_its_backward_pass_is_traced_too(case: Case):
    # Only some: with lengths that are symbols this takes a minute and more where there are many operations.
    compare_compiled(case, "aot_eager")


def compare_compiled(case: Case, backend: str) -> None:
    call = Call(case.build())
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for length in (7, 5):
        qkv = inputs(length)
        keys = torch.arange(length) < torch.tensor([[length], [3]])
        out, expected = compiled(*qkv, keys), call(*qkv, keys)
        assert_equal(out, expected)
        assert_equal(gradients(out, qkv, retain=False), gradients(expected, qkv))


@pytest.mark.usefixtures("unchecked")
@each_code
def test_it_exports_with_a_dynamic_length(case: Case):
    call, qkv = Call(case.build()), tuple(x.detach() for x in inputs())
    # One below the limit: there torch sees a slice that is no slice.
    length = torch.export.Dim("length", min=2, max=(case.traits.max_length or 4097) - 1)
    shapes = ({2: length}, {2: length}, {2: length}, {1: length})
    exported = torch.export.export(call, (*qkv, torch.ones(2, 7, dtype=torch.bool)), dynamic_shapes=shapes).module()
    for n in (7, 11, 2):
        qkv = tuple(x.detach() for x in inputs(n))
        keys = torch.arange(n) < torch.tensor([[n], [2]])
        assert_equal(exported(*qkv, keys), call(*qkv, keys))
