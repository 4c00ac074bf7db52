"""What the laws of attention are checked on. A mechanism conforms when its lines in CASES pass them all.

Every law is checked against `Attention.reference`, the plain dense definition, or against the law itself. What a
mechanism cannot do, its traits say: there it must refuse.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import (
    Attention,
    AverageSpec,
    BigBirdSpec,
    BlocksSpec,
    CompressedSpec,
    EfficientSpec,
    FullSpec,
    HeadGroup,
    HeadsSpec,
    LinearSpec,
    LinformerSpec,
    LocalSpec,
    LongformerSpec,
    LSHSpec,
    Mask,
    MechanismSpec,
    NystromSpec,
    Operator,
    PatternAttention,
    PatternSpec,
    PerformerSpec,
    Place,
    RFASpec,
    RoutingSpec,
    SinkhornSpec,
    SparseTransformerSpec,
    SSRUSpec,
    SynthesizerSpec,
    Traits,
)
from hasten.attention.base import Weights
from hasten.attention.patterns import parse

SIDES = ("right", "left", "interior")


@dataclass(frozen=True, kw_only=True)
class TableSpec(MechanismSpec):
    """A mechanism that can do nothing but mix positions by a learnt table: the suite's refusals are tested on it."""

    kind: Literal["table"] = "table"

    def build(self) -> "Table":
        return Table(12)


class Table(Attention):
    """softmax(table), whatever the inputs (random Synthesizer)."""

    traits = Traits(
        causal=None,
        cross=False,
        step=False,
        normalised=True,
        key_padding=False,
        dropout=False,
        needs=frozenset(),
        max_length=12,
    )

    def __init__(self, length: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, length, dtype=torch.float64))

    def operator(self, q: Tensor, k: Tensor, mask: Mask) -> Operator:
        self.check(q, k, mask)
        return Weights(self.reference(q, k, mask))

    def reference(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        length = k.shape[2]
        return self.table[:length, :length].softmax(-1).to(q).expand(*q.shape[:2], length, length)


@dataclass(frozen=True)
class Case:
    """A mechanism and the limits of its laws: where positions have a meaning, and where padding equals dropping.

    equivariant: order means nothing. sides: where padding may stand. prefix: what a prefix reads is what it reads
    within the whole. itself: every query reads at least itself.
    large: it can be measured at thousands of tokens; with windows of a few tokens that says nothing.
    twin: another case runs the same code with other numbers; compiling and exporting, which take long, are checked
    there.
    """

    name: str
    spec: Any
    equivariant: bool = False
    sides: tuple[str, ...] = SIDES
    prefix: bool = True
    itself: bool = True
    large: bool = True
    twin: bool = False

    def build(self, *, n_heads: int = 2, d_head: int = 4, **changes: Any) -> Attention:
        torch.manual_seed(0)
        spec = dataclasses.replace(self.spec, **changes)
        return spec.at(Place(n_heads=n_heads, d_head=d_head)).build().eval()

    @property
    def traits(self) -> Traits:
        return self.build().traits


@dataclass(frozen=True, kw_only=True)
class TiledSpec(PatternSpec):
    """A pattern computed in very small tiles, so that short sequences have several."""

    def build(self) -> PatternAttention:
        return PatternAttention(parse(self.pattern), dropout=self.dropout, seed=self.seed, rows=3)


def pattern(text: str, *, prefix: bool = True, itself: bool = True, twin: bool = True) -> Case:
    return Case(text, TiledSpec(pattern=text), prefix=prefix, itself=itself, large=False, twin=twin)


CASES = (
    Case("full", FullSpec(), equivariant=True),
    Case("table", TableSpec()),
    pattern("Local(2, 1)"),
    pattern("Local(1, dilation=2)"),
    pattern("Blocks(3, back=1)"),
    pattern("Strided(3)"),
    pattern("Local(1) | Strided(3)"),
    pattern("Blocks(4) | Summary(4, 1)", twin=False),
    pattern("Summary(3, 2)", itself=False),
    pattern("Local(1) | Global(first=2)"),
    pattern("Local(1) | Global(first=1, last=2)"),
    pattern("Local(1) | Global(first=1, rows=False)"),
    pattern("Global(first=2, rows=False)", itself=False),
    pattern("Local(1) | Marked()", twin=False),
    pattern("Local(0) | RandomBlocks(1, block=2)", prefix=False),
    pattern("External(2) | Local(1)", twin=False),
    pattern("(Local(2) | Strided(2)) & Blocks(5, back=1, ahead=1)"),
    pattern("Everything()"),
    Case("pattern", PatternSpec(pattern="Local(2) | Global(first=1)")),
    Case("local", LocalSpec(left=2)),
    Case("blocks", BlocksSpec(block=3), large=False),
    Case("sparse transformer", SparseTransformerSpec(stride=3), large=False),
    Case(
        "sparse transformer, fixed",
        SparseTransformerSpec(pattern="fixed", stride=3, summary=1, combine="layers"),
        large=False,
        twin=True,
    ),
    Case("sparse transformer, heads", SparseTransformerSpec(stride=2, combine="heads"), large=False),
    Case("longformer", LongformerSpec(window=1, first=2)),
    Case("longformer, marked", LongformerSpec(window=1, marked=True), twin=True),
    Case(
        "longformer, dilated, one set",
        LongformerSpec(window=1, dilation=2, marked=True, second_projections=False),
        twin=True,
    ),
    Case("bigbird", BigBirdSpec(block=2, random=1), large=False, twin=True),
    Case("bigbird, external", BigBirdSpec(block=2, random=1, external=2), large=False),
    Case("bigbird, causal", BigBirdSpec(block=2, random=1, last=False), prefix=False, large=False, twin=True),
    Case(
        "heads",
        HeadsSpec(groups=(HeadGroup(heads=1, attention=LocalSpec(left=1)), HeadGroup(heads=1, attention=FullSpec()))),
    ),
    # A token reads itself only where nobody else may be read.
    Case("lsh", LSHSpec(chunk=2, rounds=2, buckets=4), itself=False),
    Case(
        "lsh, across buckets",
        LSHSpec(chunk=2, rounds=1, buckets=4, attend_across_buckets=True),
        itself=False,
    ),
    Case("lsh, shorter than a chunk", LSHSpec(rounds=1), itself=False, twin=True),
    Case("lsh, strict", LSHSpec(chunk=3, rounds=2, buckets=2, strict=True), itself=False),
    Case("routing", RoutingSpec(clusters=3), equivariant=True, twin=True),
    Case("routing, keys of their own", RoutingSpec(clusters=4, window=3, shared_qk=False), equivariant=True),
    Case("routing, strict", RoutingSpec(clusters=2, window=3, strict=True)),
    *(
        # Places are counted in the tensor, so padding may only stand where it moves none.
        Case(
            f"synthesizer {' + '.join(parts)}{', frozen' * frozen}",
            SynthesizerSpec(parts=parts, max_length=12, factor=5, rank=3, frozen=frozen),
            sides=("right",),
            twin=twin,
        )
        for parts, frozen, twin in (
            (("dense",), False, True),
            (("factorised_dense",), False, True),
            (("random",), False, False),
            (("random",), True, True),
            (("factorised_random",), False, True),
            (("factorised_random", "dot_product"), False, False),
            (("dense", "factorised_dense", "random", "dot_product"), True, False),
        )
    ),
    # Causally a group is read when it is complete; alone, a prefix also reads its last, incomplete group.
    Case("compressed", CompressedSpec(), prefix=False, itself=False, twin=True),
    Case("compressed, averaged", CompressedSpec(values="average", stride=2, kernel=3), prefix=False, itself=False),
    Case("compressed and local", CompressedSpec(values="average", local=4), twin=True),
    Case("compressed and local, overlapping", CompressedSpec(stride=2, kernel=4, local=3)),
    Case("linear", LinearSpec(), equivariant=True),
    Case("linear, relu", LinearSpec(feature="relu"), equivariant=True, twin=True),
    Case("efficient", EfficientSpec(), equivariant=True),
    Case("performer", PerformerSpec(features=24), equivariant=True),
    Case("performer, one feature", PerformerSpec(features=1), equivariant=True, twin=True),
    Case(
        "performer, symmetric, regularised",
        PerformerSpec(features=19, symmetric=True, regularised=True),
        equivariant=True,
    ),
    Case("rfa", RFASpec(features=16), equivariant=True),
    Case("rfa, sharp", RFASpec(features=64, sigma=1.5, seed=1), equivariant=True, twin=True),
    Case("rfa, gate", RFASpec(features=16, gate=True)),
    Case("linformer", LinformerSpec(max_length=12, rank=4), twin=True),
    Case("linformer, by head", LinformerSpec(max_length=12, rank=5, sharing="none")),
    Case("linformer, layerwise", LinformerSpec(max_length=12, rank=12, sharing="layerwise"), twin=True),
    Case("linformer, means", LinformerSpec(max_length=12, rank=5, projection="mean")),
    Case("linformer, convolutions", LinformerSpec(max_length=13, rank=4, projection="convolution")),
    # Causally rows of the sorting are normalised over earlier blocks; a prefix alone is sorted in both directions.
    Case("sinkhorn", SinkhornSpec(block=3, iterations=3), prefix=False),
    Case("sinkhorn, one block", SinkhornSpec(block=16, iterations=1), twin=True),
    Case("sinkhorn, cold", SinkhornSpec(block=2, tau=0.1, iterations=2), prefix=False, twin=True),
    Case(
        "sinkhorn, learnt",
        SinkhornSpec(block=3, iterations=3, max_blocks=4),
        prefix=False,
    ),
    Case("sinkhorn, cut", SinkhornSpec(block=2, cut=2, iterations=3)),
    Case("nystrom", NystromSpec(landmarks=3), twin=True),
    Case("nystrom, a landmark a token", NystromSpec(landmarks=16, iterations=3), twin=True),
    Case("nystrom with a convolution", NystromSpec(landmarks=4, residual=3)),
    # The layer's gates and network stand around the operator, which is the same.
    Case("average", AverageSpec(gate=False), equivariant=True),
    Case("average, gate", AverageSpec(), equivariant=True, twin=True),
    Case("ssru", SSRUSpec(), itself=False),
)

# Which masks a mechanism takes, and the masks, by name. Rows without any key are among them.
SUPPORT: dict[str, Callable[[Traits], bool]] = {
    "no mask": lambda traits: True,
    "causal": lambda traits: traits.causal is not None,
    "padded keys": lambda traits: traits.key_padding,
    "causal, padded keys": lambda traits: traits.causal is not None and traits.key_padding,
    "pattern": lambda traits: traits.allowed,
    "marked": lambda traits: traits.marked,
    "marked, causal, padded keys": lambda traits: traits.marked and traits.causal is not None and traits.key_padding,
    "all three": lambda traits: traits.allowed and traits.causal is not None and traits.key_padding,
}


def make_mask(name: str, n_queries: int, n_keys: int) -> Mask:
    """For a batch of two: one row has padding on both sides, one in the middle; patterns have empty rows."""
    keys = torch.ones(2, n_keys, dtype=torch.bool)
    keys[0, 0] = keys[0, -1] = keys[1, n_keys // 2] = False
    allowed = torch.rand(2, 2, n_queries, n_keys, generator=torch.Generator().manual_seed(5)) < 0.6
    allowed[0, 0, n_queries // 2] = allowed[1, 1, 0] = False
    marked = torch.zeros(2, n_keys, dtype=torch.bool)
    marked[0, n_keys // 3] = marked[1, -1] = marked[1, 0] = True
    return Mask(
        marked=marked if "marked" in name else None,
        causal="causal" in name or name == "all three",
        keys=keys if "keys" in name or name == "all three" else None,
        allowed=allowed if name in ("pattern", "all three") else None,
    )


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Case) else str(value)


def those(claim: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if claim(case)], ids=name_of)


each = those()
each_code = those(lambda case: not case.twin)
each_mask = pytest.mark.parametrize(
    ("case", "mask"),
    [(case, name) for case in CASES for name, takes in SUPPORT.items() if takes(case.traits)],
    ids=name_of,
)


def inputs(
    n_queries: int = 7, n_keys: int | None = None, *, batch: int = 2, width: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of two heads in float64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (n_queries, n_keys or n_queries, n_keys or n_queries)
    q, k, v = (torch.randn(batch, 2, n, width, generator=generator, dtype=torch.float64) for n in lengths)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def gradients(out: Tensor, wrt: tuple[Tensor, ...], *, retain: bool = True) -> tuple[Tensor, ...]:
    """Gradients of a random linear function of `out`; zero where there is no path."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    if not out.requires_grad:
        return tuple(torch.zeros_like(x) for x in wrt)
    return torch.autograd.grad(out, wrt, cotangent, retain_graph=retain, allow_unused=True, materialize_grads=True)


def assert_equal(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
