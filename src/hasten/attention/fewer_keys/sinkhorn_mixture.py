"""The mixture of Sinkhorn attention with full attention."""

import dataclasses
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import Attention, Operator, State, StepOperator
from hasten.attention.full import FullAttention
from hasten.attention.masks import Mask


class SinkhornMixture(Attention):
    """The sum of what Sinkhorn attention and full attention read.

    The sorting adds to full attention rather than replacing it: cost and memory are those of both, quadratic in the
    length without a fused kernel. Rows sum to 2 where something may be read. After the mixture of Tay et al., 2020.
    """

    def __init__(self, sinkhorn: Attention):
        super().__init__()
        self.sinkhorn, self.full = sinkhorn, FullAttention()
        self.traits = dataclasses.replace(sinkhorn.traits, normalised=False)

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "Sum":
        """Both maps."""
        self.check(q, k, mask)
        return Sum(self.sinkhorn.operator(q, k, mask), self.full.operator(q, k, mask))

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The sum of both definitions."""
        return self.sinkhorn.reference(q, k, mask) + self.full.reference(q, k, mask)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Both steps; each keeps the keys in its own way."""
        if not self.traits.step:
            return super().step(q, k, keys)  # which names this mechanism
        assert keys is None or isinstance(keys, Two)
        first, of_first = self.sinkhorn.step(q, k, keys and keys.first)
        second, of_second = self.full.step(q, k, keys and keys.second)
        return SumStep(first, second), Two(of_first, of_second)


class Sum(Operator):
    """The sum of two maps."""

    def __init__(self, first: Operator, second: Operator):
        self.first, self.second = first, second

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Both outputs, added."""
        return self.first.apply(v) + self.second.apply(v)

    def dense(self) -> Float[Tensor, "B H T S"]:
        """Both matrices, added."""
        return self.first.dense() + self.second.dense()

    def materialised(self) -> "Sum":
        """Both, with their weights formed."""
        return Sum(self.first.materialised(), self.second.materialised())


@dataclass(frozen=True)
class Two:
    """Decoding states of two mechanisms."""

    first: State
    second: State

    def select(self, rows: Tensor) -> "Two":
        """Batch rows by index."""
        return Two(self.first.select(rows), self.second.select(rows))


class SumStep(StepOperator):
    """The sum of two steps."""

    def __init__(self, first: StepOperator, second: StepOperator):
        self.first, self.second = first, second

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], Two]:
        """Both outputs, added."""
        assert values is None or isinstance(values, Two)
        first, of_first = self.first.apply(v, values and values.first)
        second, of_second = self.second.apply(v, values and values.second)
        return first + second, Two(of_first, of_second)
