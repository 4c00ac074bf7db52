"""Fine-tuning of a NAT by what an autoregressive teacher thinks of its outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.data.batch import Batch
from hasten.data.tokenizer import PAD
from hasten.errors import UserError
from hasten.fields import Factor, Share, Spec
from hasten.models.autoregressive import Autoregressive
from hasten.models.tied import SourceMemory
from hasten.nn.draws import row_draws
from hasten.nn.fertility import average, drawn
from hasten.nn.loss import LossTerm

if TYPE_CHECKING:
    from hasten.models.nat import NAT


@dataclass(frozen=True, kw_only=True)
class FineTuneSpec(Spec):
    """Whose judgement is learnt from, and how much it counts."""

    teacher: str
    """An autoregressive model with the same tokenizer: a bundled name or a run directory. Only training needs it."""
    share: Share = 0.25
    """lambda: the weight of the teacher's judgement; the ordinary loss keeps 1 - lambda."""
    reinforce: Factor = 0.1
    """Weight, within the judgement, of the fertilities' policy gradient beside the tokens' divergence."""


class FineTuning:
    """L = lambda (r L_RL + L_BP) + (1 - lambda) L_KD, with L_KD the ordinary loss.

    L_BP = sum_t KL(p_t || q_t): p_t is the student's distribution at position t under the true fertilities, q_t that of
    the teacher, fed with the student's most probable tokens before t. Gradients pass p_t only: neither the teacher's
    input nor the teacher itself has any.

    L_RL = -(R(f) - R(mean f)) log p(f), a policy gradient for the fertility head alone (the encoder's states are
    detached, since its variance is large). f is drawn, one sample a sentence; R is the teacher's mean log probability a
    decision, end symbol included, of what the student says under f, so that short outputs are not better for being
    short. Its baseline is R under the average fertilities: of the sentence itself, so that the gradient of a batch is
    the sum of those of its sentences. The student says it without dropout.

    Source: Gu et al., 2018, section 4.3. L_BP is the whole divergence here, the student's negative entropy included.
    The teacher is no part of the model: it is not in its state dict.
    """

    def __init__(self, spec: FineTuneSpec):
        self.spec = spec
        self.teacher: Autoregressive | None = None

    def learn_from(self, teacher: Autoregressive) -> None:
        """Take a teacher, and freeze it."""
        self.teacher = teacher.eval().requires_grad_(False)

    def terms(
        self,
        ordinary: dict[str, LossTerm],
        model: "NAT",
        memory: SourceMemory,
        logits: Float[Tensor, "N V"],
        batch: Batch,
        generator: torch.Generator,
    ) -> dict[str, LossTerm]:
        """All terms of the objective; `logits` are the student's at the real target positions, row after row."""
        teacher, share = self._teacher(batch.source.device), self.spec.share
        kept = {name: replace(term, weight=(1 - share) * term.weight) for name, term in ordinary.items()}
        ids = (logits.detach().float() + model.banned).argmax(-1)
        said = torch.full_like(batch.target, PAD).masked_scatter(batch.target_mask, ids)
        divergence = reverse_divergence(logits, teacher, replace(batch, target=said))
        policy = self._policy(model, teacher, memory, batch, generator)
        rows = torch.tensor(len(batch.source), device=batch.source.device)
        return {
            **kept,
            "teacher": LossTerm(divergence, batch.target_mask.sum(), share),
            "policy": LossTerm(policy, rows, share * self.spec.reinforce),
        }

    def _teacher(self, device: torch.device) -> Autoregressive:
        if self.teacher is None:
            raise UserError(
                f"this model learns from {self.spec.teacher}, which has not been given to it; "
                "call model.fine_tuning.learn_from(teacher), or train it by `hasten train`"
            )
        if self.teacher.embedding.weight.device != device:
            self.teacher.to(device)
        return self.teacher

    def _policy(
        self, model: "NAT", teacher: Autoregressive, memory: SourceMemory, batch: Batch, generator: torch.Generator
    ) -> Float[Tensor, ""]:
        log_probs = model.fertility.log_probs(memory.states.detach())
        _, uniform = row_draws(memory.mask, generator, 0)
        with torch.no_grad(), without_dropout(model):
            fertilities = drawn(log_probs, uniform)
            sampled, baseline = (
                rewards(teacher, batch, model.said(memory, chosen, log_probs))
                for chosen in (fertilities, average(log_probs))
            )
        return policy_loss(log_probs, memory.mask, fertilities, sampled - baseline)


def reverse_divergence(logits: Float[Tensor, "N V"], teacher: Autoregressive, said: Batch) -> Float[Tensor, ""]:
    """sum over positions of sum over V of p (log p - log q), in float32; `logits` are those at the real positions."""
    with torch.no_grad():
        log_q = teacher.forced_log_probs(said)[_tokens(said.target_mask)]
    log_p = logits.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def _tokens(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "N"]:
    """Of an autoregressive model's decisions, row after row, those for tokens: a row's last is its end."""
    ends = F.pad(mask, (0, 1), value=False)
    return ends[F.pad(mask, (1, 0), value=True)]


def rewards(teacher: Autoregressive, batch: Batch, said: Int[Tensor, "B T"]) -> Float[Tensor, "B"]:
    """The teacher's mean log probability a decision of what is said about the sources; PAD stands after it."""
    total, count = teacher.log_probs(Batch(batch.source, batch.source_mask, said, said != PAD))
    return total / count


def policy_loss(
    log_probs: Float[Tensor, "B S C"],
    mask: Bool[Tensor, "B S"],
    fertilities: Int[Tensor, "B S"],
    advantage: Float[Tensor, "B"],
) -> Float[Tensor, ""]:
    """-advantage * log p(f), summed over the rows, where f is drawn from p and `advantage` has no gradient.

    The gradient is on average that of -E[reward], whatever baseline the reward is less by: REINFORCE (Williams, 1992).
    """
    own = log_probs.gather(2, fertilities[..., None])[..., 0].masked_fill(~mask, 0.0).sum(1)
    return -(advantage.detach() * own).sum()


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model in eval mode for a while."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
