"""What tests against attention of transformers share: weights, inputs, comparison.

What docs/longformer-bigbird.md says of transformers is tested, in the version in which it was found.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import MultiHeadAttention, multi_head

transformers = pytest.importorskip("transformers")

FOUND_IN = "5.24.0"
as_found = pytest.mark.skipif(transformers.__version__ != FOUND_IN, reason=f"found in transformers {FOUND_IN}")
D, H = 24, 3
SIZES = {"hidden_size": D, "num_attention_heads": H, "intermediate_size": 16, "vocab_size": 30, "sep_token_id": 2}
STILL = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def seeded(module: Any) -> Any:
    """With weights large enough for attention to matter."""
    for i, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(i))
    return module.eval()


def sequence(n: int, batch: int, seed: int = 1) -> Tensor:
    """Hidden states in double precision."""
    return torch.randn(batch, n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def like(theirs: Any, spec: Any) -> MultiHeadAttention:
    """Ours with their weights; they have no output projection, so ours is the identity."""
    ours = multi_head(D, H, spec.build()).double().eval()
    sets = {"in_proj": ("query", "key", "value"), "second_proj": ("query_global", "key_global", "value_global")}
    state = {"out_proj.weight": torch.eye(D).double(), "out_proj.bias": torch.zeros(D).double()}
    for name, linears in sets.items():
        for kind in ("weight", "bias"):
            if f"{name}_{kind}" in ours.state_dict():
                state[f"{name}_{kind}"] = torch.cat([getattr(getattr(theirs, one), kind) for one in linears]).detach()
    ours.load_state_dict(state, strict=False)
    return ours


def assert_equal(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Up to a relative and an absolute error."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(out: Tensor, wrt: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a random linear function of `out`; zero where there is no path."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, wrt, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True)


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Which positions (B, N)."""
    return (one - other).abs().amax(-1) > 1e-3


def texts(*lengths: int) -> tuple[Tensor, Tensor]:
    """Ids and their mask, padded on the right by 1."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 30, mask.shape, generator=torch.Generator().manual_seed(0))
    return ids * mask + (1 - mask), mask
