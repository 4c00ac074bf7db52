"""Models: one paper, one file. Adding one is a file, a test and a line in each tuple below."""

from typing import Annotated

from pydantic import Field

from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.models.base import GenerationModel
from hasten.models.classifier import Classifier, ClassifierSpec
from hasten.models.ctc import CTC, CTCSpec
from hasten.models.dag import DAG, DAGSpec
from hasten.models.marian import Marian, MarianSpec
from hasten.models.mask_predict import MaskPredict, MaskPredictSpec
from hasten.models.nat import NAT, NATSpec
from hasten.models.refinement import Refinement, RefinementSpec

MODELS = (Autoregressive, CTC, DAG, Marian, MaskPredict, NAT, Refinement)
ModelSpec = Annotated[
    AutoregressiveSpec | CTCSpec | DAGSpec | MarianSpec | MaskPredictSpec | NATSpec | RefinementSpec,
    Field(discriminator="kind"),
]

__all__ = [
    "CTC",
    "DAG",
    "MODELS",
    "NAT",
    "Autoregressive",
    "AutoregressiveSpec",
    "CTCSpec",
    "Classifier",
    "ClassifierSpec",
    "DAGSpec",
    "GenerationModel",
    "Marian",
    "MarianSpec",
    "MaskPredict",
    "MaskPredictSpec",
    "ModelSpec",
    "NATSpec",
    "Refinement",
    "RefinementSpec",
]
