"""How a masked output is filled, told in lists: what the sampler and the models that use it are compared with."""

import math
from collections.abc import Callable, Sequence

from hasten.data.tokenizer import MASK
from hasten.decoding.masked import MaskedSpec

Predictor = Callable[[Sequence[int]], list[tuple[int, float]]]
Passes = list[tuple[list[int], list[int]]]
"""Of every pass the row after filling and after masking."""


def plainly(spec: MaskedSpec, n: int, predict: Predictor) -> tuple[Passes, list[float]]:
    """The definition: blocks from left to right, and in each of them passes until nothing in it is masked."""
    row, scores, passes = [MASK] * n, [0.0] * n, []
    size = spec.block or n
    for begin in range(0, n, size):
        block = range(begin, min(begin + size, n))
        t = 0
        while any(row[i] == MASK for i in block):
            t += 1
            predicted = [i for i in block if row[i] == MASK]
            found = predict(row)
            for i in predicted:
                row[i], scores[i] = found[i]
            filled = list(row)
            pool = list(block) if spec.remask == "worst" else predicted
            n_masked = (len(block) * (spec.iterations - t)) // spec.iterations
            if spec.remask == "none":
                n_masked = min(n_masked, len(predicted) - 1)
            doubtful = [i for i in pool if not scores[i] > math.log(spec.threshold)]
            doubtful.sort(key=lambda i: (scores[i], -i))  # of equal ones the rightmost are masked
            for i in doubtful[:n_masked]:
                row[i] = MASK
            passes.append((filled, list(row)))
    return passes, scores
