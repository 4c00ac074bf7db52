"""Types with a range, for the fields of specs."""

import math
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

_MOST = 2**40  # tensors of integers hold it, and products with lengths and numbers of things
PositiveInt = Annotated[int, Gt(0), Le(_MOST)]
Depth = Annotated[int, Gt(0), Le(1000)]  # a damaged configuration must not keep the machine busy building layers
DepthOrNone = Annotated[int, Ge(0), Le(1000)]
NonNegativeInt = Annotated[int, Ge(0), Le(_MOST)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]
# Factors of what is float32, where they and their inverses must be finite.
PositiveFactor = Annotated[float, Ge(1e-30), Le(1e30)]
Factor = Annotated[float, Ge(0), Le(1e30)]
Share = Annotated[float, Ge(0), Lt(1)]


class Spec:
    """Base of every spec: a keyword that is no field is an error."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (pydantic reads a plain dict)
