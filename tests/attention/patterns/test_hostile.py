"""Calls that nobody means to make: empty tensors, wrong shapes, absurd settings. A right result or a clear error."""

import time

import pytest
import torch
from torch import Tensor

from hasten.attention import FullAttention, Mask
from hasten.attention.heads import HeadsAttention
from hasten.attention.patterns import Local, PatternAttention, RandomBlocks, Scene, parse
from hasten.attention.patterns.longformer import LongformerSpec
from hasten.attention.second_projections import multi_head
from hasten.errors import UserError

SHAPES = [
    "Local(2)",
    "Blocks(4, 1)",
    "Strided(3)",
    "Summary(4, 1)",
    "Global(first=3, last=3)",
    "RandomBlocks(2, block=4)",
    "Local(1) | Marked()",
    "External(2) | Local(1)",
]
MANY = "External(2) | Local(1) | Strided(3) | Marked() | RandomBlocks(1, block=3)"


def made(text: str) -> PatternAttention:
    return PatternAttention(parse(text)).eval()


@pytest.mark.parametrize("text", SHAPES)
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "width"),
    [(0, 2, 5, 5, 3), (2, 0, 5, 5, 3), (2, 2, 0, 5, 3), (2, 2, 3, 0, 3), (2, 2, 0, 0, 3), (2, 2, 5, 5, 0)],
)
def test_of_nothing_comes_nothing(text: str, batch: int, heads: int, queries: int, keys: int, width: int):
    attention = made(text)
    q, k, v = (torch.randn(batch, heads, n, d, requires_grad=True) for n, d in ((queries, 4), (keys, 4), (keys, width)))
    for mask in (Mask(), Mask(keys=torch.ones(batch, keys, dtype=torch.bool))):
        operator = attention.operator(q, k, mask)
        out = operator.apply(v)
        assert torch.equal(out, torch.zeros(batch, heads, queries, width))
        assert operator.dense().shape == (batch, heads, queries, keys)
        out.sum().backward()
        for x in (q, k, v):
            assert x.grad is not None
            assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0)])
def test_layers_take_empty_batches(batch: int, length: int):
    groups = HeadsAttention([(1, made("Local(1)")), (1, made("Marked()"))])
    second = LongformerSpec(window=1, first=1, marked=True).build()
    for attention in (groups, second):
        layer = multi_head(8, 2, attention)
        assert layer(torch.randn(batch, length, 8)).shape == (batch, length, 8)


def tensors(**changed: Tensor) -> dict[str, Tensor]:
    return {name: torch.randn(2, 2, 10, 4) for name in "qkv"} | changed


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("text", ["Local(2)", "RandomBlocks(1, block=2)", "Local(1) | Strided(3)", MANY])
@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"v": torch.randn(2, 2, 11, 4)}, "values are"),
        ({"v": torch.randn(2, 2, 9, 4)}, "values are"),
        ({"v": torch.randn(1, 2, 10, 4)}, "values are"),
        ({"v": torch.randn(2, 1, 10, 4)}, "values are"),
        ({"v": torch.randn(4, 2, 10, 4)}, "values are"),
        ({"k": torch.randn(4, 1, 10, 4), "v": torch.randn(4, 1, 10, 4)}, "keys are"),
        ({"k": torch.randn(2, 1, 10, 4), "v": torch.randn(2, 1, 10, 4)}, "keys are"),
        ({"k": torch.randn(2, 2, 10, 3)}, "keys are"),
        ({"q": torch.randn(2, 10, 4)}, "queries are"),
        ({"q": torch.randn(10, 4)}, "queries are"),
        ({"q": torch.randn(2, 2, 10, 0), "k": torch.randn(2, 2, 10, 0)}, "queries are"),
        ({name: torch.ones(2, 2, 10, 4, dtype=torch.int64) for name in "qkv"}, "int64"),
        ({name: torch.ones(2, 2, 10, 4, dtype=torch.complex64) for name in "qkv"}, "complex64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(text: str, changed: dict[str, Tensor], match: str):
    x = tensors(**changed)
    with pytest.raises(UserError, match=match):
        made(text).operator(x["q"], x["k"], Mask()).apply(x["v"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["keys", "marked"])
@pytest.mark.parametrize("shape", [(1, 10), (2, 11), (2, 9), (3, 10), (10,), (2, 1, 1, 10)])
def test_masks_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...]):
    x, given = tensors(), torch.zeros(shape, dtype=torch.bool)
    mask = Mask(keys=given) if name == "keys" else Mask(marked=given)
    with pytest.raises(UserError, match=rf"Mask: {name} is .* give \(2, 10\)"):
        made("Local(2) | Marked()").operator(x["q"], x["k"], mask)
    layer = multi_head(8, 2, LongformerSpec(window=1, marked=True).build())
    with pytest.raises(UserError, match=rf"Mask: {name} is"):
        layer(torch.randn(2, 10, 8), mask)


@pytest.mark.usefixtures("unchecked")
def test_heads_that_do_not_fit_are_refused():
    groups = HeadsAttention([(1, made("Local(1)")), (2, FullAttention())])
    q = torch.randn(1, 3, 5, 2)
    with pytest.raises(UserError, match="values have 4 heads"):
        groups.operator(q, q, Mask()).apply(torch.randn(1, 4, 5, 2))
    full = HeadsAttention([(1, FullAttention()), (2, FullAttention())])
    with pytest.raises(UserError, match="allowed"):
        full.operator(q, q, Mask(allowed=torch.ones(1, 2, 5, 5, dtype=torch.bool)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("size", [2.5, "2", True, None])
def test_a_number_of_heads_is_a_whole_number(size: object):
    with pytest.raises(UserError, match="whole number"):
        HeadsAttention([(size, FullAttention())])  # type: ignore[list-item]


@pytest.mark.usefixtures("unchecked")
def test_a_group_of_heads_is_a_mechanism():
    with pytest.raises(TypeError, match="mechanism"):
        HeadsAttention([(2, "full")])  # type: ignore[list-item]


@pytest.mark.parametrize("dropout", [1.0, 1.5, -0.1, float("nan")])
def test_a_share_of_dropped_weights_is_less_than_one(dropout: float):
    with pytest.raises(UserError, match="dropout"):
        PatternAttention(Local(1), dropout=dropout)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_pattern_is_refused():
    with pytest.raises(TypeError, match="Pattern"):
        PatternAttention("Local(1)")  # type: ignore[arg-type]
    for wrong in (3, None, "Local(1)"):
        with pytest.raises(TypeError):
            Local(1) | wrong  # type: ignore[operator]
        with pytest.raises(TypeError):
            Local(1) & wrong  # type: ignore[operator]


def test_no_side_of_a_window_is_negative():
    for text in ("Local(4, -1)", "Local(4, right=-1)"):
        with pytest.raises(UserError, match="right is -1"):
            parse(text)


def test_a_value_given_twice_is_refused():
    with pytest.raises(UserError, match="left twice"):
        parse("Local(left=1, left=2)")


def test_a_number_too_large_is_told_how_large_it_may_be():
    with pytest.raises(UserError, match="from 0 to 2147483648"):
        parse("Local(4294967296)")


@pytest.mark.parametrize(
    "text",
    [
        "Local(2147483648, dilation=2147483648)",
        "Strided(2147483648)",
        "Blocks(2147483648, 2147483648, 5)",
        "Summary(2147483648, 2147483648)",
        "Global(first=2147483648)",
        "Global(first=1, last=2147483648)",
        "RandomBlocks(1, block=2147483648)",
        "RandomBlocks(2147483648, block=3)",
        "RandomBlocks(2147483648, block=3, past=True)",
        "RandomBlocks(1, block=3, near=2147483648)",
        "External(2147483648) | Local(1)",
    ],
)
def test_absurd_sizes_cost_no_more_than_the_sequence(text: str):
    attention = made(text)
    q, k, v = (torch.randn(2, 2, 10, 4, dtype=torch.float64) for _ in range(3))
    out = attention.operator(q, k, Mask()).apply(v)
    torch.testing.assert_close(out, attention.reference(q, k, Mask()) @ v)


def test_a_draw_does_not_depend_on_how_many_more_are_asked_for():
    few, many = (RandomBlocks(blocks, block=1).table(Scene(5, 3)) for blocks in (5, 9))
    assert torch.equal(few, many)


def test_a_product_of_unions_is_refused_before_it_is_multiplied_out():
    begin = time.perf_counter()
    with pytest.raises(UserError, match="multiplied out"):
        made(" & ".join(f"(Local({n}) | Strided({n + 1}))" for n in range(40)))
    assert time.perf_counter() - begin < 5


def test_the_same_restriction_twice_is_one():
    attention = made(" & ".join(["(Local(1) | Strided(3))"] * 40))
    q = torch.randn(1, 1, 12, 4, dtype=torch.float64)
    once = made("Local(1) | Strided(3)").operator(q, q, Mask()).dense()
    torch.testing.assert_close(attention.operator(q, q, Mask()).dense(), once)


def test_gradients_of_gradients_are_refused_not_wrong():
    q, k, v = (torch.randn(1, 1, 8, 3, requires_grad=True) for _ in range(3))
    out = made("Local(2) | Strided(3)").operator(q, k, Mask()).apply(v)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_the_definition_has_second_derivatives():
    q = torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True)
    attention = made("Local(1) | Strided(3)")
    assert torch.autograd.gradgradcheck(lambda q: attention.reference(q, q, Mask()) @ q, q)


@pytest.mark.parametrize("text", [*SHAPES, MANY])
def test_the_default_device_changes_nothing(text: str):
    attention, q = made(text), torch.randn(2, 2, 37, 4)
    marked = torch.arange(37)[None] % torch.tensor([[9], [5]]) == 0
    mask = Mask(marked=marked if attention.traits.marked else None, keys=torch.arange(37) < torch.tensor([[31], [37]]))
    with torch.device("meta"):
        out = attention.operator(q, q, mask).apply(q)
    torch.testing.assert_close(out, attention.reference(q, q, mask) @ q)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("marks", [False, True])
def test_batch_and_length_of_an_exported_layer_with_padding_and_marks_are_free(marks: bool):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = multi_head(8, 2, LongformerSpec(window=2, marked=True).build())

        def forward(self, x: Tensor, keys: Tensor, marked: Tensor) -> Tensor:
            return self.layer(x, Mask(keys=keys, marked=marked if marks else None))

    def call(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(batch, length, 8), torch.rand(batch, length) < 0.7, torch.rand(batch, length) < 0.2

    layer = Layer().eval()
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=999)}
    exported = torch.export.export(layer, call(3, 10), dynamic_shapes=(sizes, sizes, sizes)).module()
    for batch, length in ((2, 2), (5, 70)):
        x = call(batch, length)
        torch.testing.assert_close(exported(*x)[x[1]], layer(*x)[x[1]])
