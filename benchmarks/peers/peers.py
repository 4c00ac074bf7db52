"""Attention by others, as the contestants `peer:NAME` of `hasten bench attention`, at the sizes of hasten's own.

Runs inside hasten's `attention_worker.py` (which says what the functions mean) in the environment that `setup` makes:
it needs torch and the peers, and nothing of hasten; a package is imported when its peer is built. At the level "module"
a peer is the package's own multi-head module, in its defaults but for the settings named here; at the level "core" it
is what that very module has inside, without the projections.
"""

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
Sizes = dict[str, Any]
Make = Callable[[Sizes, int], nn.Module]
Lay = Callable[[Tensor, Tensor, Tensor], Sequence[Any]]


class Unsupported(Exception):
    """The peer is not made for such sizes."""


REFUSALS = (Unsupported,)


@dataclass(frozen=True)
class Peer:
    """A peer: its package, what it is set to, how it is built; and what sizes it takes.

    make: the module, from sizes and d_model. core: its attention alone, from q, k, v (B, H, N, D) each. causal: whether
    it can be. multiple: lengths are multiples of that. shortest: the shortest length.
    """

    package: str
    setting: str
    make: Make
    core: Make
    causal: bool = True
    multiple: int = 1
    shortest: int = 1


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention`, called so that it uses `scaled_dot_product_attention` and forms no weights."""

    def __init__(self, sizes: Sizes, d_model: int):
        super().__init__()
        # The fast path of evaluation forms the weights after all, and is slower for it on a CPU.
        torch.backends.mha.set_fastpath_enabled(False)
        self.attention = nn.MultiheadAttention(d_model, sizes["heads"], batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(sizes["length"]) if sizes["causal"] else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False, attn_mask=self.mask, is_causal=self.mask is not None)[0]


class TorchCore(nn.Module):
    """`scaled_dot_product_attention` itself."""

    def __init__(self, sizes: Sizes, d_model: int):
        super().__init__()
        self.causal = sizes["causal"]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Inner(nn.Module):
    """A module, or what it calls between its projections (from q, k, v), whose result may be a tuple that begins so."""

    def __init__(self, inner: Callable[..., Any]):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.inner(*inputs)
        return out[0] if isinstance(out, tuple) else out


class SharedInner(nn.Module):
    """The same where q is query and key at once, k is not read, and batch and heads are one dimension."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(v)


class Given(nn.Module):
    """Stands where a projection was, and gives back what was laid down there for the call."""

    value: Any = None

    def forward(self, x: Tensor) -> Any:
        value, self.value = self.value, None
        return value


class Three(tuple):
    """q, k, v as if they were one tensor that is yet to be cut in three."""

    def chunk(self, parts: int, dim: int) -> tuple:
        return self


class Bare(nn.Module):
    """A module without its projections: those named give what `lay` makes of q, k, v; that to the output is gone.

    The input of the module is then nothing but a shape.
    """

    def __init__(self, module: nn.Module, names: str, lay: Lay, out: str):
        super().__init__()
        self.module, self.lay = module, lay
        self.given = nn.ModuleList(Given() for _ in names.split())
        inside = getattr(module, "attention", module)  # where the projection to the output had to be added outside
        for name, given in zip(names.split(), self.given, strict=True):
            setattr(inside, name, given)
        setattr(module, out, nn.Identity())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for given, value in zip(self.given, self.lay(q, k, v), strict=True):
            given.value = value
        b, h, n, d = v.shape
        return self.module(v.new_zeros(()).expand(b, n, h * d)).view(b, n, h, d).transpose(1, 2)


class BareNystrom(nn.Module):
    """The same where the module pads its input before it projects: q, k, v are that input, side by side."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, module.to_qkv, module.to_out = module, nn.Identity(), nn.Identity()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, n, d = v.shape
        x = torch.cat([_tokens(t) for t in (q, k, v)], dim=2).view(b, n, 3 * h * d)
        return self.module(x).view(b, n, h, d).transpose(1, 2)


def _tokens(x: Tensor) -> Tensor:
    """(B, N, H, D), a view."""
    return x.transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    """(B, N, H D), a copy."""
    return _tokens(x).flatten(2)


class Longformer(nn.Module):
    """transformers' self-attention with the output projection that its modules apply outside; no global tokens."""

    def __init__(self, sizes: Sizes, d_model: int):
        super().__init__()
        from transformers import LongformerConfig
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

        config = LongformerConfig(
            hidden_size=d_model,
            num_attention_heads=sizes["heads"],
            num_hidden_layers=1,
            attention_window=[512],
            attention_probs_dropout_prob=0.0,
        )
        self.attention, self.out = LongformerSelfAttention(config, 0), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(x.shape[:2])
        nowhere = torch.zeros(x.shape[:2], dtype=torch.bool)
        out = self.attention(x, mask, is_index_masked=nowhere, is_index_global_attn=nowhere, is_global_attn=False)
        return self.out(out[0])


class BigBird(nn.Module):
    """transformers' block-sparse self-attention with the output projection that its modules apply outside."""

    def __init__(self, sizes: Sizes, d_model: int):
        super().__init__()
        from transformers import BigBirdConfig
        from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

        config = BigBirdConfig(
            hidden_size=d_model,
            num_attention_heads=sizes["heads"],
            max_position_embeddings=sizes["length"],
            block_size=64,
            num_random_blocks=3,
        )
        self.attention, self.out = BigBirdBlockSparseAttention(config, seed=0), nn.Linear(d_model, d_model)
        everywhere = torch.ones(sizes["batch"], sizes["length"])
        self.masks = BigBirdModel.create_masks_for_block_sparse_attn(everywhere, 64)

    def forward(self, x: Tensor) -> Tensor:
        blocks, band, queries, keys = self.masks
        return self.out(self.attention(x, band, queries, keys, blocks, blocks)[0])


class Reformer(nn.Module):
    """transformers' LSH self-attention with the output projection that its modules apply outside."""

    def __init__(self, sizes: Sizes, d_model: int):
        super().__init__()
        from transformers import ReformerConfig
        from transformers.models.reformer.modeling_reformer import LSHSelfAttention

        config = ReformerConfig(
            hidden_size=d_model,
            num_attention_heads=sizes["heads"],
            attention_head_size=sizes["width"],
            is_decoder=sizes["causal"],
            max_position_embeddings=sizes["length"],
            lsh_attn_chunk_length=64,
            num_hashes=4,
            lsh_attention_probs_dropout_prob=0.0,
        )
        self.attention, self.out = LSHSelfAttention(config), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x).hidden_states)


def _of(module: str, name: str, **settings: Any) -> Make:
    """A class called with d_model, heads and settings; settings that are functions are asked about the sizes."""

    def make(sizes: Sizes, d_model: int) -> nn.Module:
        found = {key: value(sizes) if callable(value) else value for key, value in settings.items()}
        return getattr(importlib.import_module(module), name)(dim=d_model, heads=sizes["heads"], **found)

    return make


def _core(make: Make, wrap: Callable[..., nn.Module], inner: str | None = None, **settings: Any) -> Make:
    """The core of what `make` makes: that wrapped, or the attribute `inner` of it."""

    def made(sizes: Sizes, d_model: int) -> nn.Module:
        module = make(sizes, d_model)
        return wrap(module if inner is None else getattr(module, inner), **settings)

    return made


def _inner(make: Make, inner: str) -> tuple[Make, Make]:
    """A module, and the core that it has as an attribute."""
    return make, _core(make, Inner, inner)


def _bare(make: Make, names: str, lay: Lay, out: str = "to_out") -> tuple[Make, Make]:
    """A module, and the same without its projections."""
    return make, _core(make, Bare, names=names, lay=lay, out=out)


_length, _causal, _width = map(itemgetter, ("length", "causal", "width"))


def _local(exact: bool) -> tuple[Make, Make]:
    """The module, and its core without the rotary positions, which belong to no mechanism."""
    settings = {"window_size": 256, "causal": _causal, "dim_head": _width, "exact_windowsize": exact}
    make = partial(_of, "local_attention.transformer", "LocalMHA", **settings)
    return make(), _core(make(use_rotary_pos_emb=False), Inner, "attn_fn")


_linear = _of("linear_attention_transformer.linear_attention_transformer", "SelfAttention", causal=_causal)
_performer = _of("performer_pytorch", "SelfAttention", nb_features=256, causal=_causal, dim_head=_width)
_reformer = _of("reformer_pytorch", "LSHSelfAttention", bucket_size=64, n_hashes=4, causal=_causal)
_routed = {"depth": 1, "max_seq_len": _length, "local_attn_heads": 0, "window_size": 128, "causal": _causal}
_routing = _of("routing_transformer.routing_transformer", "SelfAttention", **_routed)
_sorted = {"bucket_size": 64, "max_seq_len": _length, "causal": _causal}
_sinkhorn = _of("sinkhorn_transformer.sinkhorn_transformer", "SinkhornSelfAttention", **_sorted)
_linformer = _bare(
    _of("linformer.linformer", "LinformerSelfAttention", seq_len=_length, k=256),
    "to_q to_k to_v",
    lambda q, k, v: (_tokens(q), _merged(k), _merged(v)),
)
_nystrom = _of("nystrom_attention", "NystromAttention", num_landmarks=64, dim_head=_width)
_compressed = _bare(
    _of("memory_compressed_attention", "MemoryCompressedAttention", causal=_causal),
    "to_qkv",
    lambda q, k, v: [Three((_tokens(q), _merged(k), _merged(v)))],
)
_longformer = _bare(
    Longformer,
    "query key value",
    # q is copied because it is divided in place.
    lambda q, k, v: (q.permute(2, 0, 1, 3).clone(), k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)),
    "out",
)
_bigbird = _bare(BigBird, "query key value", lambda q, k, v: (_tokens(q), _tokens(k), _tokens(v)), "out")
_hf_reformer = _bare(Reformer, "query_key value", lambda q, k, v: (_merged(q), _merged(v)), "out")
PEERS = {
    "torch-sdpa": Peer("torch", "nn.MultiheadAttention", TorchAttention, TorchCore),
    "local-attention": Peer("local-attention", "LocalMHA, window 256 each side, exact", *_local(True)),
    "local-attention-blocked": Peer("local-attention", "LocalMHA, window 256 in whole blocks", *_local(False)),
    "linear-attention-transformer": Peer(
        "linear-attention-transformer", "SelfAttention", *_inner(_linear, "global_attn_fn")
    ),
    "performer-pytorch": Peer(
        "performer-pytorch", "SelfAttention, 256 features", *_inner(_performer, "fast_attention")
    ),
    "reformer-pytorch": Peer(
        "reformer-pytorch",
        "LSHSelfAttention, buckets of 64, 4 rounds",
        _reformer,
        _core(_reformer, SharedInner, "lsh_attn"),
        multiple=128,
    ),
    "routing-transformer": Peer(
        "routing-transformer",
        "SelfAttention, window 128, N / 128 clusters, no local heads",
        _core(_routing, Inner),
        _core(_routing, Inner, "global_attn"),
        multiple=128,
    ),
    "sinkhorn-transformer": Peer(
        "sinkhorn-transformer",
        "SinkhornSelfAttention, buckets of 64",
        *_inner(_sinkhorn, "sinkhorn_attention"),
        multiple=64,
    ),
    "linformer": Peer("linformer", "LinformerSelfAttention, k 256", *_linformer, causal=False),
    "nystrom-attention": Peer(
        "nystrom-attention",
        "NystromAttention, 64 landmarks, with its convolution",
        _nystrom,
        _core(_nystrom, BareNystrom),
        causal=False,
    ),
    "memory-compressed-attention": Peer(
        "memory-compressed-attention", "MemoryCompressedAttention, factor 3", *_compressed
    ),
    "hf-longformer": Peer(
        "transformers",
        "LongformerSelfAttention, window 512 in total, no global tokens",
        *_longformer,
        causal=False,
        multiple=512,
    ),
    "hf-bigbird": Peer(
        "transformers",
        "BigBirdBlockSparseAttention, blocks of 64, 3 random",
        *_bigbird,
        causal=False,
        multiple=64,
        shortest=768,
    ),
    "hf-reformer": Peer("transformers", "LSHSelfAttention, chunks of 64, 4 rounds", *_hf_reformer, multiple=128),
}


def names() -> dict[str, str]:
    """All peers, with their settings."""
    return {name: f"{peer.package}: {peer.setting}" for name, peer in PEERS.items()}


def facts(name: str) -> dict[str, Any]:
    """Settings and versions."""
    peer = PEERS[name]
    versions = {package: metadata.version(package) for package in ("torch", peer.package)}
    return {"kind": name, "setting": peer.setting, "versions": versions}


def build(name: str, sizes: Sizes) -> nn.Module:
    """The peer at these sizes."""
    peer, length = PEERS[name], sizes["length"]
    if sizes["causal"] and not peer.causal:
        raise Unsupported("it cannot be causal")
    if length % peer.multiple:
        raise Unsupported(f"its lengths are multiples of {peer.multiple}")
    if length < peer.shortest:
        raise Unsupported(f"its lengths begin at {peer.shortest}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that nobody maintains: none is about a result
        make = peer.core if sizes["level"] == "core" else peer.make
        return make(sizes, sizes["heads"] * sizes["width"])


def check(name: str, sizes: Sizes) -> str:
    """Peers have no reference: only that an output is finite and of the input's shape."""
    length = max(512, PEERS[name].multiple, -(-PEERS[name].shortest // 64) * 64)
    module = build(name, {**sizes, "length": length, "batch": 1}).eval()
    core, heads, width = sizes["level"] == "core", sizes["heads"], sizes["width"]
    shape = (1, heads, length, width) if core else (1, length, heads * width)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = module(x, x, x) if core else module(x)
    if out.shape != x.shape:
        return f"its output is {tuple(out.shape)} for an input of {tuple(x.shape)}"
    return "" if out.isfinite().all() else "its output is not finite"
