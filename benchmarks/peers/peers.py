"""Attention by others, as the contestants `peer:NAME` of `hasten bench attention`, at the sizes of hasten's own.

Runs inside hasten's `attention_worker.py` (which says what the functions mean) in the environment that `setup` makes:
it needs torch and the peers, and nothing of hasten. Each peer is the package's own multi-head module with its
projections, in its defaults but for the settings named here. A package is imported only when its peer is built.
"""

import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
Sizes = dict[str, Any]


class Unsupported(Exception):
    """The peer is not made for such sizes."""


REFUSALS = (Unsupported,)


@dataclass(frozen=True)
class Peer:
    """A peer: its package, what it is set to, how it is built; and what sizes it takes.

    causal: whether it can be. multiple: lengths are multiples of that. shortest: the shortest length. core: its
    attention alone, from q, k, v (B, H, N, D), where the package offers that as a module.
    """

    package: str
    setting: str
    make: Callable[[Sizes, int], nn.Module]
    causal: bool
    multiple: int = 1
    shortest: int = 1
    core: Callable[[Sizes], nn.Module] | None = None


class First(nn.Module):
    """A module whose first result is the output."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


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

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.causal = sizes["causal"]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def _local_core(exact: bool) -> Callable[[Sizes], nn.Module]:
    def make(sizes: Sizes) -> nn.Module:
        from local_attention import LocalAttention

        return LocalAttention(
            window_size=256,
            causal=sizes["causal"],
            look_backward=1,
            look_forward=0 if sizes["causal"] else 1,
            exact_windowsize=exact,
            autopad=True,
            use_rotary_pos_emb=False,
        )

    return make


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
            num_buckets=None,
            lsh_attention_probs_dropout_prob=0.0,
        )
        self.attention, self.out = LSHSelfAttention(config), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x).hidden_states)


def _of(module: str, name: str, **settings: Any) -> Callable[[Sizes, int], nn.Module]:
    """A class called with d_model, heads and settings; settings that are functions are asked about the sizes."""

    def make(sizes: Sizes, d_model: int) -> nn.Module:
        found = {key: value(sizes) if callable(value) else value for key, value in settings.items()}
        return getattr(importlib.import_module(module), name)(dim=d_model, heads=sizes["heads"], **found)

    return make


def _length(sizes: Sizes) -> int:
    return sizes["length"]


def _causal(sizes: Sizes) -> bool:
    return sizes["causal"]


def _width(sizes: Sizes) -> int:
    return sizes["width"]


_local = {"window_size": 256, "causal": _causal, "dim_head": _width}
_routing = _of(
    "routing_transformer.routing_transformer",
    "SelfAttention",
    depth=1,
    max_seq_len=_length,
    local_attn_heads=0,
    window_size=128,
    causal=_causal,
)
PEERS = {
    "torch-sdpa": Peer("torch", "nn.MultiheadAttention", TorchAttention, causal=True, core=TorchCore),
    "local-attention": Peer(
        "local-attention",
        "LocalMHA, window 256 each side, exact",
        _of("local_attention.transformer", "LocalMHA", exact_windowsize=True, **_local),
        causal=True,
        core=_local_core(True),
    ),
    "local-attention-blocked": Peer(
        "local-attention",
        "LocalMHA, window 256 in whole blocks",
        _of("local_attention.transformer", "LocalMHA", exact_windowsize=False, **_local),
        causal=True,
        core=_local_core(False),
    ),
    "linear-attention-transformer": Peer(
        "linear-attention-transformer",
        "SelfAttention",
        _of("linear_attention_transformer.linear_attention_transformer", "SelfAttention", causal=_causal),
        causal=True,
    ),
    "performer-pytorch": Peer(
        "performer-pytorch",
        "SelfAttention, 256 features",
        _of("performer_pytorch", "SelfAttention", nb_features=256, causal=_causal, dim_head=_width),
        causal=True,
    ),
    "reformer-pytorch": Peer(
        "reformer-pytorch",
        "LSHSelfAttention, buckets of 64, 4 rounds",
        _of("reformer_pytorch", "LSHSelfAttention", bucket_size=64, n_hashes=4, causal=_causal),
        causal=True,
        multiple=128,
    ),
    "routing-transformer": Peer(
        "routing-transformer",
        "SelfAttention, window 128, N / 128 clusters, no local heads",
        lambda sizes, d_model: First(_routing(sizes, d_model)),
        causal=True,
        multiple=128,
    ),
    "sinkhorn-transformer": Peer(
        "sinkhorn-transformer",
        "SinkhornSelfAttention, buckets of 64",
        _of(
            "sinkhorn_transformer.sinkhorn_transformer",
            "SinkhornSelfAttention",
            bucket_size=64,
            max_seq_len=_length,
            causal=_causal,
        ),
        causal=True,
        multiple=64,
    ),
    "linformer": Peer(
        "linformer",
        "LinformerSelfAttention, k 256",
        _of("linformer.linformer", "LinformerSelfAttention", seq_len=_length, k=256),
        causal=False,
    ),
    "nystrom-attention": Peer(
        "nystrom-attention",
        "NystromAttention, 64 landmarks, with its convolution",
        _of("nystrom_attention", "NystromAttention", num_landmarks=64, dim_head=_width),
        causal=False,
    ),
    "memory-compressed-attention": Peer(
        "memory-compressed-attention",
        "MemoryCompressedAttention, factor 3",
        _of("memory_compressed_attention", "MemoryCompressedAttention", causal=_causal),
        causal=True,
    ),
    "hf-longformer": Peer(
        "transformers",
        "LongformerSelfAttention, window 512 in total, no global tokens",
        Longformer,
        causal=False,
        multiple=512,
    ),
    "hf-bigbird": Peer(
        "transformers",
        "BigBirdBlockSparseAttention, blocks of 64, 3 random",
        BigBird,
        causal=False,
        multiple=64,
        shortest=704,
    ),
    "hf-reformer": Peer(
        "transformers", "LSHSelfAttention, chunks of 64, 4 rounds", Reformer, causal=True, multiple=128
    ),
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
    if sizes["level"] == "core" and peer.core is None:
        raise Unsupported("it is a module with projections: it takes part at --level module")
    if sizes["causal"] and not peer.causal:
        raise Unsupported("it cannot be causal")
    if length % peer.multiple:
        raise Unsupported(f"its lengths are multiples of {peer.multiple}")
    if length < peer.shortest:
        raise Unsupported(f"its lengths begin at {peer.shortest}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that nobody maintains: none is about a result
        if sizes["level"] == "core" and peer.core is not None:
            return peer.core(sizes)
        return peer.make(sizes, sizes["heads"] * sizes["width"])


def check(name: str, sizes: Sizes) -> str:
    """Peers have no reference: only that an output is finite and of the input's shape."""
    length = max(512, PEERS[name].multiple, -(-PEERS[name].shortest // 64) * 64)
    module = build(name, {**sizes, "length": length, "batch": 1}).eval()
    shape = (1, length, sizes["heads"] * sizes["width"])
    if sizes["level"] == "core":
        shape = (1, sizes["heads"], length, sizes["width"])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = module(x, x, x) if sizes["level"] == "core" else module(x)
    if out.shape != x.shape:
        return f"its output is {tuple(out.shape)} for an input of {tuple(x.shape)}"
    return "" if out.isfinite().all() else "its output is not finite"
