"""The classifier: pooling, loss, padding, every encoder mechanism; and what it can learn of far tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.mechanisms import Case, those
from hasten.attention import ATTENTIONS, BigBirdSpec, FullSpec, LocalSpec, LongformerSpec, PatternSpec
from hasten.errors import UserError
from hasten.models.classifier import Classifier, ClassifierSpec

SMALL = {"d_model": 8, "n_heads": 2, "d_ff": 16, "n_layers": 2, "dropout": 0.0}
TOKENS = torch.tensor([[1, 5, 7, 2, 9, 3, 3], [1, 4, 8, 6, 0, 0, 0]])
MASK = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
LABELS = torch.tensor([2, 0])


def build(*attention, seed: int = 0, **changes) -> Classifier:
    torch.manual_seed(seed)
    return ClassifierSpec(**{**SMALL, **changes}, attention=attention or (FullSpec(),)).build(10, 3).double().eval()


def test_the_loss_is_the_sum_of_the_negative_log_probabilities_of_the_labels():
    model = build()
    term = model.loss(TOKENS, MASK, LABELS)
    log_probs = model(TOKENS, MASK).log_softmax(-1)
    assert term.sum.item() == pytest.approx(-(log_probs[0, 2] + log_probs[1, 0]).item())
    assert int(term.count) == 2
    smooth = build(label_smoothing=0.3).loss(TOKENS, MASK, LABELS)
    assert smooth.sum.item() == pytest.approx(0.7 * term.sum.item() - 0.3 * log_probs.mean(1).sum().item())


def test_pooling_is_the_mean_of_real_tokens_or_the_first_of_them():
    model, seen = build(), {}
    model.encoder.register_forward_hook(lambda module, args, out: seen.update(states=out))
    scores = model(TOKENS, MASK)
    means = torch.stack([states[mask].mean(0) for states, mask in zip(seen["states"], MASK, strict=True)])
    torch.testing.assert_close(scores, model.output(means))
    model = build(pooling="first")
    model.encoder.register_forward_hook(lambda module, args, out: seen.update(states=out))
    scores = model(TOKENS.flip(1), MASK.flip(1))
    torch.testing.assert_close(scores, model.output(seen["states"][[0, 1], [0, 3]]))


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_sequence_without_tokens_is_finite(pooling: str):
    scores = build(pooling=pooling)(TOKENS, torch.zeros_like(MASK))
    assert scores.isfinite().all()


@pytest.mark.parametrize("pooling", ["mean", "first"])
@those(lambda case: isinstance(case.spec, ATTENTIONS) and case.traits.key_padding)
def test_every_encoder_mechanism_serves_and_padding_changes_nothing(case: Case, pooling: str):
    model = build(case.spec, pooling=pooling)
    scores = model(TOKENS, MASK)
    junk = F.pad(TOKENS.masked_fill(~MASK, 4), (0, 3), value=9)
    torch.testing.assert_close(model(junk, F.pad(MASK, (0, 3))), scores, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(TOKENS[1:, :4], MASK[1:, :4]), scores[1:], rtol=1e-9, atol=1e-9)
    scores.square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_mechanisms_without_padding_are_refused():
    lacking = [case for case in those().args[1] if isinstance(case.spec, ATTENTIONS) and not case.traits.key_padding]
    for case in lacking:
        with pytest.raises(UserError, match="padded"):
            build(case.spec)


def test_marked_tokens_are_global():
    model = build(LongformerSpec(window=1, first=0, marked=True), pooling="first", n_layers=1)
    far = TOKENS.clone()
    far[0, 6] = 8
    marked = torch.zeros_like(MASK)
    assert torch.equal(model(far, MASK, marked), model(TOKENS, MASK, marked))
    marked[0, 6] = True
    assert not torch.allclose(model(far, MASK, marked)[0], model(TOKENS, MASK, marked)[0])


# Long range

LENGTH = 32
GLOBAL = {
    "full": FullSpec(),
    "longformer": LongformerSpec(window=2),
    "bigbird": BigBirdSpec(block=4, random=1),
    "bigbird, external": BigBirdSpec(block=4, random=0, external=2),
    "external": PatternSpec(pattern="External(1) | Local(2)"),
}


def examples(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noise with an A (2) or B (3) in its first half and an a (4) or b (5) in its second; which ones they are."""
    tokens = torch.randint(6, 8, (n, LENGTH), generator=generator)
    tokens[:, 0] = 1
    which = torch.randint(0, 2, (2, n), generator=generator)
    for half, first in enumerate((6, 22)):
        tokens[torch.arange(n), torch.randint(first, first + 4, (n,), generator=generator)] = 2 + 2 * half + which[half]
    return tokens, which[0], which[1]


def learn(attention, label) -> float:
    """Accuracy on new examples after at most 300 steps."""
    settings = {**SMALL, "d_model": 32, "d_ff": 64, "pooling": "first"}
    torch.manual_seed(0)
    model = ClassifierSpec(**settings, attention=(attention,)).build(8, 2)
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(300):
        tokens, one, other = examples(64, generator)
        term = model.loss(tokens, torch.ones_like(tokens, dtype=torch.bool), label(one, other))
        optimizer.zero_grad()
        (term.sum / term.count).backward()
        optimizer.step()
        if term.sum / term.count < 0.05:
            break
    tokens, one, other = examples(300, generator)
    with torch.no_grad():
        found = model(tokens, torch.ones_like(tokens, dtype=torch.bool)).argmax(1)
    return (found == label(one, other)).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "longformer", "bigbird"])
def test_it_learns_whether_two_far_tokens_agree_wherever_the_first_token_is_global(name: str):
    assert learn(GLOBAL[name], lambda one, other: (one == other).long()) > 0.98


@pytest.mark.parametrize("name", list(GLOBAL))
def test_it_learns_what_the_farthest_token_is(name: str):
    assert learn(GLOBAL[name], lambda one, other: other) > 0.98


def test_through_windows_alone_the_first_token_knows_nothing_of_far_ones():
    model = build(LocalSpec(left=2), pooling="first")
    tokens, *_ = examples(20, torch.Generator().manual_seed(0))
    blank = tokens.masked_fill(tokens < 6, 6)
    blank[:, 0] = 1
    everything = torch.ones_like(tokens, dtype=torch.bool)
    assert torch.equal(model(tokens, everything), model(blank, everything))
    for spec in GLOBAL.values():
        model = build(spec, pooling="first")
        assert not torch.allclose(model(tokens, everything), model(blank, everything))
