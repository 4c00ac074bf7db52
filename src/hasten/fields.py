"""Types with a range, for the fields of specs."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

PositiveInt = Annotated[int, Gt(0)]
Depth = Annotated[int, Gt(0), Le(1000)]  # a damaged configuration must not keep the machine busy building layers
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]


class Spec:
    """Base of every spec: a keyword that is no field is an error."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (pydantic reads a plain dict)
