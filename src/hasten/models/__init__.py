"""Models: one paper, one file. Adding one is a file, a test and a line in each tuple below."""

from typing import Annotated, Union

from pydantic import Field

from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.models.base import GenerationModel

MODELS = (Autoregressive,)
ModelSpec = AutoregressiveSpec

__all__ = ["MODELS", "Autoregressive", "AutoregressiveSpec", "GenerationModel", "ModelSpec"]
