"""Learning from what a teacher would say at every place, not only from what stands there."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Gt, Le
from jaxtyping import Float
from torch import Tensor

from hasten.data.batch import Batch
from hasten.errors import UserError
from hasten.fields import Spec
from hasten.nn.loss import LossTerm

if TYPE_CHECKING:
    from hasten.models.autoregressive import Autoregressive


@dataclass(frozen=True, kw_only=True)
class WordDistillationSpec(Spec):
    """Whose distributions are learnt from, and how much they count."""

    teacher: str
    """An autoregressive model with the same tokenizer: a bundled name or a run directory. Only training needs it."""
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Weight of the teacher's distributions; the ordinary loss keeps the rest."""


class WordDistillation:
    """L = share * sum_t KL(q_t || p_t) + (1 - share) * the ordinary loss, fed with the given target.

    q_t and p_t are the distributions of teacher and student over the vocabulary at position t, the end symbol's among
    them, in float32. The teacher is frozen, sees no dropout and is no part of the model: it is not in its state dict.
    Source: Kim and Rush, 2016, section 3.1 (word-level knowledge distillation).
    """

    def __init__(self, spec: WordDistillationSpec):
        self.spec = spec
        self.teacher: Autoregressive | None = None

    def learn_from(self, teacher: "Autoregressive") -> None:
        """Take a teacher, and freeze it."""
        self.teacher = teacher.eval().requires_grad_(False)

    def terms(self, ordinary: dict[str, LossTerm], logits: Float[Tensor, "N V"], batch: Batch) -> dict[str, LossTerm]:
        """All terms of the objective; `logits` are the student's at all decisions, row after row."""
        if self.teacher is None:
            raise UserError(
                f"this model learns from {self.spec.teacher}, which has not been given to it; "
                "call model.learn_from(teacher), or train it by `hasten train`"
            )
        with torch.no_grad():
            log_q = self.teacher.to(logits.device).forced_log_probs(batch)
        divergence = (log_q.exp() * (log_q - logits.float().log_softmax(-1))).sum()
        share, count = self.spec.share, torch.tensor(len(logits), device=logits.device)
        kept = {name: replace(term, weight=(1 - share) * term.weight) for name, term in ordinary.items()}
        return {**kept, "teacher": LossTerm(divergence, count, share)}
