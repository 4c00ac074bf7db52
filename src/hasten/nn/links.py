"""Which vertex of a graph comes after which: edges to later vertices, several heads mixed by a gate."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class Links(nn.Module):
    """E(u | v) = sum over heads h of gate_h(v) softmax over later real u of (W_q x_v)_h (W_k x_u)_h / sqrt(D / H).

    A mixture of softmaxes, not a softmax of mixed scores: one vertex may favour several successors far apart. From the
    last real vertex, and from padding, no edge leads on; to padding none leads.
    Source: Huang et al., 2022, section 3 (Directed Acyclic Transformer): transitions.
    """

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        # A bias of the keys would shift all successors' scores alike, and change nothing.
        self.queries = nn.Linear(d_model, d_model)
        self.keys = nn.Linear(d_model, d_model, bias=False)
        self.gate = nn.Linear(d_model, n_heads)
        for linear in (self.queries, self.keys, self.gate):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, x: Float[Tensor, "B L D"], mask: Bool[Tensor, "B L"]) -> Float[Tensor, "B L L"]:
        """log E, [v, u] from v to u, in float32 or wider; -inf where there is no edge. `mask` True on real vertices."""
        q, k = (y.unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2) for y in (self.queries(x), self.keys(x)))
        scores, gate = _wide(q @ k.transpose(2, 3)) * self.d_head**-0.5, _wide(self.gate(x)).log_softmax(-1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        edges = (later & mask[:, None] & mask[..., None])[:, None]
        # A finite filler: rows without successors, and gradients everywhere, stay numbers.
        each = scores.masked_fill(~edges, torch.finfo(scores.dtype).min / 4).log_softmax(-1)
        mixed = (each + gate.transpose(1, 2)[..., None]).logsumexp(1)
        return mixed.masked_fill(~edges[:, 0], -torch.inf)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()
