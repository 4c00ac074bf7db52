"""Models: one paper, one file. Adding one is a file, a test and a line in each tuple below."""

from typing import Annotated

from pydantic import Field

from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.models.base import GenerationModel
from hasten.models.classifier import Classifier, ClassifierSpec
from hasten.models.ctc import CTC, CTCSpec

MODELS = (Autoregressive, CTC)
ModelSpec = Annotated[AutoregressiveSpec | CTCSpec, Field(discriminator="kind")]

__all__ = [
    "CTC",
    "MODELS",
    "Autoregressive",
    "AutoregressiveSpec",
    "CTCSpec",
    "Classifier",
    "ClassifierSpec",
    "GenerationModel",
    "ModelSpec",
]
