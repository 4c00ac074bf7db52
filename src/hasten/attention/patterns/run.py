"""One call of sparse attention: examples arranged by their real tokens, the kernel run, results put back in place."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.attention.patterns.algebra import Pattern, Scene
from hasten.attention.patterns.expression import parse
from hasten.attention.patterns.plan import make_plan, resolved
from hasten.attention.patterns.tiles import Dropping, attend, attend_backward
from hasten.attention.patterns.work import ROWS, Plan, Shape


@dataclass(frozen=True, eq=False)
class Call:
    """Everything but the tensors that gradients flow to. rows: queries in a tile, 0: chosen here."""

    pattern: Pattern
    keys: Tensor | None
    marked: Tensor | None
    seed: int
    rows: int
    share: float
    drawn: int

    @property
    def dropping(self) -> Dropping | None:
        """Dropout of this call."""
        return Dropping(self.share, self.drawn) if self.share else None


@dataclass(frozen=True, eq=False)
class Part:
    """Examples that one plan serves: `rows` of the batch (None: all) in an order in which real tokens come first.

    order: (B, S) tokens by position, None where they stand in order already. front: queries put before the call's own,
    so that every token of the sequence has one that can change places with it.
    """

    plan: Plan
    rows: Tensor | None
    order: Tensor | None
    front: int

    def take(self, x: Tensor, *, queries: bool) -> Tensor:
        """(B, H, n, D) as sheets (B' H, n', D), contiguous."""
        x = x if self.rows is None else x.index_select(0, self.rows)
        if self.order is not None:
            x = F.pad(x, (0, 0, self.front, 0)) if queries and self.front else x
            x = x.gather(2, self._places(x))
        return x.reshape(-1, *x.shape[2:]).contiguous()

    def put(self, sheets: Tensor, whole: Tensor, *, queries: bool) -> None:
        """Write sheets back into (B, H, n, D)."""
        n_heads = whole.shape[1]
        x = sheets.view(-1, n_heads, *sheets.shape[1:])
        if self.order is not None:
            x = torch.empty_like(x).scatter_(2, self._places(x), x)
            x = x[:, :, self.front :] if queries else x
        if self.rows is None:
            whole.copy_(x)
        else:
            whole.index_copy_(0, self.rows, x.to(whole.dtype))

    def _places(self, x: Tensor) -> Tensor:
        """Where each row of x comes from: rows before the first token stay."""
        assert self.order is not None
        before = x.shape[2] - self.order.shape[1]
        stay = torch.arange(before, device=x.device).expand(len(self.order), -1)
        places = torch.cat((stay, self.order + before), 1)
        return places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])


def parts(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[Part]:
    """How the batch is served: at once, or by length where the pattern depends on it; not at all where it is empty."""
    if 0 in (q.numel(), k.numel(), v.numel()):
        return []
    (batch, n_heads, n_queries, _), n_keys = q.shape, k.shape[2]
    everything = torch.ones(batch, n_keys, dtype=torch.bool, device=q.device)
    keys = everything if call.keys is None else call.keys
    lengths = keys.sum(1).tolist() if call.keys is not None else [n_keys] * batch
    order = None
    if call.keys is not None and bool((keys[:, 1:] & ~keys[:, :-1]).any()):
        order = (~keys).to(torch.uint8).sort(dim=1, stable=True).indices
    sets = [None]
    if call.pattern.of_length and len(set(lengths)) > 1:
        sets = [[b for b in range(batch) if lengths[b] == n] for n in sorted(set(lengths))]
    return [_part(call, some, order, lengths, n_heads, n_queries, n_keys, q) for some in sets]


def _part(
    call: Call,
    some: list[int] | None,
    order: Tensor | None,
    lengths: list[int],
    n_heads: int,
    n_queries: int,
    n_keys: int,
    like: Tensor,
) -> Part:
    rows = None if some is None else torch.tensor(some, device=like.device)
    own = lengths if some is None else [lengths[b] for b in some]
    marked = call.marked
    if marked is not None:
        marked = marked if order is None else marked.gather(1, order)
        marked = marked if rows is None else marked.index_select(0, rows)
    order = order if order is None or rows is None else order.index_select(0, rows)
    front = max(0, n_keys - n_queries) if order is not None else 0
    if call.keys is not None and marked is not None:
        marked = marked & (torch.arange(n_keys, device=like.device) < torch.tensor(own, device=like.device)[:, None])
    same = len(set(own)) == 1
    shape = Shape(len(own), n_heads, n_queries + front, n_keys, (own[0],) if same else tuple(own))
    scene = Scene(max(own), n_heads, call.seed, marked, n_keys)
    dtype = torch.promote_types(like.dtype, torch.float32)
    plan = make_plan(call.pattern, shape, scene, call.rows or ROWS, dtype, like.device)
    return Part(plan, rows, order, front)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, T, Dv) and log normalisers (B, H, T, 1), the latter zero where nothing was merged."""
    out, norm = v.new_zeros(*q.shape[:3], v.shape[3]), None
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.promote_types(q.dtype, torch.float32)
        for part in parts(q, k, v, call):
            own_q, own_k, own_v = (part.take(x, queries=n == 0).to(wide) for n, x in enumerate((q, k, v)))
            own, own_norm = attend(part.plan, own_q, own_k, own_v, call.dropping)
            part.put(own, out, queries=True)
            if own_norm is not None:
                norm = own_norm.new_zeros(*q.shape[:3], 1) if norm is None else norm
                part.put(own_norm, norm, queries=True)
    return out, torch.zeros(*q.shape[:3], 1, dtype=wide, device=q.device) if norm is None else norm


def backward(
    qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, norm: Tensor, grad: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    q, k, v = qkv
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.promote_types(q.dtype, torch.float32)
        mean = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        for part in parts(q, k, v, call):
            own_q, own_k, own_v = (part.take(x, queries=n == 0).to(wide) for n, x in enumerate(qkv))
            own_grad, own_mean, own_norm = (part.take(x.to(wide), queries=True) for x in (grad, mean, norm))
            merged = own_norm if part.plan.merge else None
            made = attend_backward(part.plan, (own_q, own_k, own_v), own_grad, own_mean, merged, call.dropping)
            for n, (own, whole) in enumerate(zip(made, grads, strict=True)):
                part.put(own, whole, queries=n == 0)
    return grads


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call):
        out, norm = forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, norm)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        # Torch would take these gradients for constants, and be wrong without a word.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "sparse attention has no second derivatives; leave out create_graph, or for short sequences apply "
                "the weights of reference(), which have them"
            )
        q, k, v, out, norm = ctx.saved_tensors
        return *backward((q, k, v), out, norm, grad, ctx.call), None


def run(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Outputs (B, H, T, Dv), differentiable once."""
    return _Run.apply(q, k, v, call)


@torch.library.custom_op("hasten::sparse_attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor | None,
    marked: Tensor | None,
    seed: Tensor,
    drawn: Tensor,
    pattern: str,
    rows: int,
    share: float,
) -> tuple[Tensor, Tensor]:
    """The same call as one operation of a traced graph, whatever the lengths."""
    return forward(q, k, v, _call(keys, marked, seed, drawn, pattern, rows, share))


@torch.library.custom_op("hasten::sparse_attention_backward", mutates_args=())
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    norm: Tensor,
    grad: Tensor,
    keys: Tensor | None,
    marked: Tensor | None,
    seed: Tensor,
    drawn: Tensor,
    pattern: str,
    rows: int,
    share: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    return backward((q, k, v), out, norm, grad, _call(keys, marked, seed, drawn, pattern, rows, share))


def _call(
    keys: Tensor | None, marked: Tensor | None, seed: Tensor, drawn: Tensor, pattern: str, rows: int, share: float
) -> Call:
    return Call(resolved(parse(pattern)), keys, marked, int(seed), rows, share, int(drawn))


@attention_op.register_fake
def _(q, k, v, keys, marked, seed, drawn, pattern, rows, share):
    wide = torch.promote_types(q.dtype, torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(*q.shape[:3], 1, dtype=wide)


@backward_op.register_fake
def _(q, k, v, out, norm, grad, keys, marked, seed, drawn, pattern, rows, share):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx, inputs, output):
    q, k, v, keys, marked, seed, drawn, *settings = inputs
    ctx.save_for_backward(q, k, v, *output, keys, marked, seed, drawn)
    ctx.settings = settings


def _backward(ctx, grad, _):
    q, k, v, out, norm, keys, marked, seed, drawn = ctx.saved_tensors
    grads = backward_op(q, k, v, out, norm, grad, keys, marked, seed, drawn, *ctx.settings)
    return (*grads, *[None] * 7)


attention_op.register_autograd(_backward, setup_context=_setup)
