"""Whether the peers compute what their papers define: small experiments, one line of a table each, on one thread.

    benchmarks/peers/.venv/bin/python benchmarks/peers/findings.py

Most set two results beside each other that the definition makes equal: a mechanism and its dense formula where it must
reach that, an output before and after what may not change it, v + 5 and the output + 5 (weights sum to one). Torch and
the peers are needed, and nothing of hasten.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import linear_attention_transformer.linear_attention_transformer as linear_attention
import performer_pytorch
import reformer_pytorch
import routing_transformer.routing_transformer as routing_transformer
import sinkhorn_transformer.sinkhorn_transformer as sinkhorn_transformer
import torch
from linformer.linformer import LinformerSelfAttention
from local_attention.transformer import LocalAttention, LocalMHA
from memory_compressed_attention import MemoryCompressedAttention
from nystrom_attention import NystromAttention
from torch import Tensor, nn
from transformers import BigBirdConfig, LongformerConfig, ReformerConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

YES, NO, DESIGN, INSTEAD = "as defined", "**differs**", "by design", "what it computes"
SHIFT = 5.0  # what is added to all values
N, D = 64, 16
Row = tuple[str, str, str, str]  # what is tested, what is expected and measured, the verdict


def check(tested: str, expected: str, measured: str, agrees: bool, no: str = NO) -> Row:
    """A row; `no` is the verdict where the measured is not the expected."""
    return tested, expected, measured, YES if agrees else no


def same(tested: str, found: Tensor, wanted: Tensor, yes: str = YES) -> Row:
    """Two results that should be one; `yes` is the verdict where they are."""
    apart = (found - wanted).abs().max().item()
    measured = f"{apart:.2g} (outputs up to {wanted.abs().max().item():.2g})"
    return tested, "difference 0", measured, yes if apart < 1e-4 else NO


def shifted(tested: str, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, no: str = NO) -> Row:
    """What a constant added to the values adds to the outputs."""
    added = attend(q, k, v + SHIFT) - attend(q, k, v)
    low, high = added.min().item(), added.max().item()
    measured = f"{low:.3g}" if high - low < 1e-3 else f"between {low:.2g} and {high:.2g}"
    return check(tested, f"{SHIFT:g} added", measured, abs(low - SHIFT) + abs(high - SHIFT) < 1e-3, no)


def quiet(make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Build a module with the generator at 0, in evaluation, without what it prints."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        return make(*arguments, **settings).eval()


def drawn(call: Callable[..., Any], *inputs: Any, seed: int = 0, **settings: Any) -> Any:
    """A call whose draws begin at a seed."""
    torch.manual_seed(seed)
    return call(*inputs, **settings)


def softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = D**-0.5) -> Tensor:
    """Full attention."""
    scores = q @ k.mT * scale
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def shared_qk(q: Tensor, v: Tensor, counts: Tensor | None = None) -> Tensor:
    """Attention of keys q / |q|, to itself only if nothing else is left; pairs weigh as often as counted."""
    scores = (q @ nn.functional.normalize(q, dim=-1).mT * D**-0.5).clone()
    scores.diagonal(dim1=-2, dim2=-1).fill_(-5e4)
    return (scores if counts is None else scores + counts.log()).softmax(-1) @ v


def heads(x: Tensor) -> Tensor:
    """(B, N, H D) to (B, H, N, D)."""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def qkv(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v."""
    q, k, v = torch.randn(3, *(shape or (1, 2, N, D)))
    return q, k, v


def before(n: int, length: int = N) -> Tensor:
    """The mask of the first n tokens, (1, length)."""
    return torch.arange(length)[None] < n


def padding(module: Callable[..., Any], x: Tensor, keep: int, name: str = "input_mask") -> Row:
    """Whether what stands in the masked tokens, those from `keep` on, changes the others; equal draws."""
    mask = before(keep, x.shape[1])
    other = torch.where(mask[..., None], x, 3 * torch.randn_like(x))
    return same("other contents in masked tokens", *(drawn(module, y, **{name: mask})[:, :keep] for y in (other, x)))


def last(module: Callable[[Tensor], Tensor], x: Tensor) -> Row:
    """Whether the last token changes earlier outputs."""
    other = torch.cat((x[:, :-1], x[:, -1:] + 3), 1)
    return same("causal: another last token, earlier outputs", module(other)[:, :-1], module(x)[:, :-1])


def strictly(tested: str, attend: Callable[[Tensor], Tensor], q: Tensor, no: str = NO) -> Row:
    """How many earlier outputs move, on average and per head, when the last query and key become others."""
    total, trials = 0.0, 30
    for seed in range(trials):
        other = q.clone()
        other[..., -1, :] = torch.randn((*q.shape[:-2], D), generator=torch.Generator().manual_seed(seed))
        change = drawn(attend, other, seed=seed) - drawn(attend, q, seed=seed)
        total += (change[..., :-1, :].abs().amax(-1) > 1e-5).float().sum(-1).mean().item()
    return check(tested, f"0 of {q.shape[-2] - 1}", f"{total / trials:.3g} on average", total == 0, no)


def dot_product() -> Iterator[Row]:
    q, k, v = qkv()
    found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    yield same("causal, beside the formula", found, softmax(q, k, v, torch.ones(N, N).tril() > 0))


def local() -> Iterator[Row]:
    q, k, v = qkv(1, 2, 50, D)
    apart = torch.arange(50)[:, None] - torch.arange(50)
    exact = {"window_size": 8, "autopad": True, "exact_windowsize": True, "use_rotary_pos_emb": False}
    attend, wanted = LocalAttention(**exact).eval(), softmax(q, k, v, apart.abs() <= 8)
    yield same("exact window of 8, N = 50, which it pads to 56; no mask given", attend(q, k, v), wanted)
    yield same("the same, a mask of ones", attend(q, k, v, mask=before(50, 50)), wanted)
    attend = LocalAttention(causal=True, **exact).eval()
    yield same("the same, causal, no mask given", attend(q, k, v), softmax(q, k, v, (apart >= 0) & (apart <= 8)))
    x = torch.randn(1, 40, 32)
    for rotary in (True, False):
        module = quiet(LocalMHA, dim=32, window_size=8, heads=2, dim_head=D, causal=True, use_rotary_pos_emb=rotary)
        steps, cache = [], None
        for i in range(40):
            step, cache = module(x[:, i : i + 1], cache=cache, return_cache=True)
            steps.append(step)
        what = f"LocalMHA {'with' if rotary else 'without'} rotary positions: token by token with its cache, or at once"
        yield same(what, torch.cat(steps, 1), module(x))


def linear() -> Iterator[Row]:
    def causal(q: Tensor, k: Tensor, v: Tensor, bucket: int = 1) -> Tensor:
        return linear_attention.causal_linear_attn(q, k, v, bucket_size=bucket)

    q, k, v = qkv()
    once = q.softmax(-1) @ k.softmax(-2).mT @ v / D**0.5
    yield shifted("values + 5 (d = 16)", linear_attention.linear_attn, q, k, v)
    yield same("the formula divided by sqrt(d)", linear_attention.linear_attn(q, k, v), once, INSTEAD)
    yield shifted("causal: values + 5", causal, q, k, v)
    yield shifted("causal, `blindspot_size=8`: values + 5", lambda *x: causal(*x, 8), q, k, v, DESIGN)
    large = k.clone()
    large[0, 0, 3, 0] = 90
    lost = (~causal(q, large, v).isfinite()).float().mean().item()
    yield check("causal, one component of one key at 90", "all finite", f"{lost:.0%} of the outputs are not", lost == 0)
    yield same("causal: 10 taken from all keys", causal(q, k - 10, v), causal(q, k, v))
    x, module = torch.randn(1, N, 32), quiet(linear_attention.SelfAttention, 32, 2, causal=True)
    yield last(module, x)
    yield padding(module, x, 29)


def performer() -> Iterator[Row]:
    q, k, v = qkv()
    attend = quiet(performer_pytorch.FastAttention, D, 8192)
    error = (attend(q / 2, k / 2, v) - softmax(q / 2, k / 2, v)).pow(2).mean().sqrt().item()
    yield check("8192 features, beside softmax: root mean square", "small", f"{error:.2g}", error < 0.02)
    yield shifted("values + 5", attend, q, k, v)
    attend, larger = quiet(performer_pytorch.FastAttention, D, 256, causal=True), k.clone()
    larger[:, :, -1] *= 3
    found, wanted = (attend(q, x, v)[:, :, :-1] for x in (larger, k))
    yield same("causal: last key times 3, earlier outputs", found, wanted)
    module = quiet(performer_pytorch.SelfAttention, dim=32, heads=2, dim_head=D, nb_features=256)
    x = torch.randn(1, 16, 32)
    bias = module.to_out.bias
    ratio = ((module(x, mask=before(8, 16))[:, :8] - bias).norm() / (module(x[:, :8]) - bias).norm()).item()
    what = "size of the outputs of 8 tokens with 8 masked ones behind them, by that without"
    yield check(what, "ratio 1", f"ratio {ratio:.2g}", abs(ratio - 1) < 1e-3)
    yield padding(module, x, 8, "mask")
    yield same("evaluation twice", module(x), module(x))


def seen(buckets: Tensor, size: int) -> Tensor:
    """How often each pair is visible: tokens sorted by (bucket, position), own chunk and the one before, any bucket."""
    n = buckets.shape[1]
    chunks = torch.cat([(bucket * n + torch.arange(n)).argsort() for bucket in buckets]).view(-1, size)
    counts = torch.zeros(n, n)
    for own, previous in zip(chunks, chunks.roll(1, 0), strict=True):
        counts[own[:, None], torch.cat((own, previous))[None]] += 1
    return counts


def reformer() -> Iterator[Row]:
    def attention(size: int = 8, **settings: Any) -> nn.Module:
        return quiet(reformer_pytorch.LSHAttention, bucket_size=size, **settings)

    q, _, v = qkv(1, N, D)
    full = attention(32, n_hashes=1)(q, v)[0]
    yield same("one round in which all see all, beside full attention of shared QK", full, shared_qk(q, v))
    _, weights, buckets = attention(n_hashes=1, return_attn=True)(q, v)
    other = weights[0].masked_fill(buckets[0][:, None] == buckets[0], 0).sum(-1).mean().item()
    yield check("weight of keys in other buckets, defaults", "0", f"{other:.2g} of 1", other < 1e-6)
    for name, once in (("defaults", True), ("`allow_duplicate_attention=False`", False)):
        out, _, buckets = attention(n_hashes=4, allow_duplicate_attention=once)(q, v)
        wanted = shared_qk(q, v, (seen(buckets.view(4, N), 8) > 0).float())
        yield same(f"4 rounds, a pair seen in several counts once: {name}", out, wanted)
    for name, across, verdict in (("defaults", True, NO), ("`attend_across_buckets=False`", False, DESIGN)):
        attend = attention(n_hashes=1, causal=True, attend_across_buckets=across)
        what = f"causal, {name}: earlier outputs that another last token moves"
        yield strictly(what, lambda x, attend=attend: attend(x, v)[0], q, verdict)
    yield same("evaluation twice", attend(q, v)[0], attend(q, v)[0])
    module = quiet(reformer_pytorch.LSHSelfAttention, 32, heads=2, bucket_size=8, n_hashes=2)
    yield padding(module, torch.randn(1, N, 32), 32)


def routing() -> Iterator[Row]:
    q, k, v = qkv()
    found = quiet(routing_transformer.KmeansAttention, 1, N, 2, D)(q, k, v)[0]
    yield same("one cluster that takes all, beside full attention", found, softmax(q, k, v))
    long = qkv(1, 8, 1024, 64)
    one, two = (quiet(routing_transformer.KmeansAttention, 8, 128, 8, 64) for _ in range(2))
    found, wanted = one(*long)[0], drawn(two, *long, seed=1)[0]
    nothing = (found == 0).all(-1).float().mean().item()
    what = "tokens that no cluster takes, whose output is zero (N = 1024, 8 clusters of 128)"
    yield check(what, "0 %", f"{nothing:.0%}", nothing == 0, DESIGN)
    yield same("two modules of equal state, evaluated before any training", found, wanted)
    attend = quiet(routing_transformer.KmeansAttention, 8, 8, 2, D, causal=True)
    attend(q, k, v)  # the first call sets the centroids
    what = "causal: earlier outputs that another last query and key move"
    yield strictly(what, lambda x: attend(x, x, v)[0], q, DESIGN)
    x, module = torch.randn(1, N, 32), quiet(routing_transformer.SelfAttention, 32, 1, N, 2, 0, 8)
    module(x)
    yield padding(lambda y, **mask: module(y, **mask)[0], x, 32)


def sinkhorn() -> Iterator[Row]:
    def attention(bucket: int = 8, **settings: Any) -> Any:
        return quiet(sinkhorn_transformer.SinkhornSelfAttention, 32, bucket, N, heads=2, **settings).sinkhorn_attention

    q, k, v = qkv()
    full = attention(N)(q, k, v)
    yield same("one bucket, beside full attention", full, softmax(q, k, v))
    yield same("one bucket: full attention, values (k + v) / 2", full, softmax(q, k, (k + v) / 2), INSTEAD)
    yield shifted("values + 5", attention(), q, k, v)
    total = attention().sort_net(q.flatten(0, 1), k.flatten(0, 1)).sum(-1)
    measured = f"between {total.min().item():.2g} and {total.max().item():.2g}"
    yield check("row sums of the matrix that sorts, defaults", "1", measured, bool((total - 1).abs().max() < 1e-2))
    causal = attention(causal=True)  # whose first half of heads is not rotated
    yield shifted("causal, after the first bucket: values + 5", lambda *x: causal(*x)[:, :1, 8:], q, k, v)
    drift = 0.0
    for i in range(1, N):
        changed = [torch.where(torch.arange(N)[:, None] == i, x + 3, x) for x in (q, k, v)]
        drift = max(drift, (causal(*changed) - causal(q, k, v))[:, :, :i].abs().max().item())
    yield check("causal: any token changed, earlier outputs", "difference 0", f"{drift:.2g}", drift < 1e-6)
    noisy = attention(non_permutative=False)
    yield same("evaluation twice, `non_permutative=False`", noisy(q, k, v), noisy(q, k, v))
    yield padding(quiet(sinkhorn_transformer.SinkhornSelfAttention, 32, 8, N, heads=2), torch.randn(1, N, 32), 32)


def linformer() -> Iterator[Row]:
    x, module = torch.randn(1, 20, 32), quiet(LinformerSelfAttention, 32, 20, k=20, heads=2)
    for projection in (module.proj_k, module.proj_v):
        projection.copy_(torch.eye(20))
    full = softmax(*(heads(to(x)) for to in (module.to_q, module.to_k, module.to_v)))
    yield same("E = F = I, beside full attention", module(x), module.to_out(full.transpose(1, 2).flatten(2)))
    yield padding(quiet(LinformerSelfAttention, 32, 20, k=8, heads=2), x, 12)


def nystrom() -> Iterator[Row]:
    def attention(landmarks: int = 8, iterations: int = 6) -> Any:
        settings = {"num_landmarks": landmarks, "pinv_iterations": iterations, "residual": False}
        return quiet(NystromAttention, 64, dim_head=D, heads=2, **settings)

    x, exact, attend = torch.randn(1, N, 64), attention(N, 20), attention()
    full = softmax(*map(heads, exact.to_qkv(x).chunk(3, -1))).transpose(1, 2).flatten(2)
    yield same("N landmarks, 20 iterations, beside full attention", exact(x), exact.to_out(full))
    lost = (~attend(x, mask=before(5)).isfinite()).float().mean().item()
    yield check("7 of 8 landmarks stand for masked tokens only", "all finite", f"{lost:.0%} are not", lost == 0)
    yield padding(attend, x, 29, "mask")
    both = torch.cat((x, 10 * torch.randn(1, N, 64)))
    yield same("a sequence beside another in the batch, or alone", attend(both)[:1], attend(x))
    found, wanted = attend(x[:, :60]), attend(x[:, :60], mask=before(60, 60))
    yield same("N = 60, which it pads to 64: no mask, or a mask of ones", found, wanted)


def compressed() -> Iterator[Row]:
    x, module = torch.randn(1, 24, 32), quiet(MemoryCompressedAttention, 32, heads=2, compression_factor=1)
    module.compress_fn.conv.weight.copy_(torch.eye(D).repeat(2, 1)[..., None])
    module.compress_fn.conv.bias.zero_()
    q, k, v = map(heads, module.to_qkv(x).chunk(3, -1))
    k, v = (torch.cat((torch.zeros(1, 2, 1, D), y), 2) for y in (k, v))  # the null key and value
    for name, width, yes in (("head", D, YES), ("model", 32, INSTEAD)):
        full = module.to_out(softmax(q, k, v, scale=width**-0.5).transpose(1, 2).flatten(2))
        yield same(f"compression by 1, beside full attention scaled by 1 / sqrt({name} width)", module(x), full, yes)
    module = quiet(MemoryCompressedAttention, 32, heads=2)
    masked = module(x, input_mask=before(24, 24))
    yield same("a mask of ones, or none", masked, module(x))
    null = module.to_out(module.null_v).expand_as(masked)
    yield same("a mask of ones: all outputs are the null value", masked, null, INSTEAD)
    causal = quiet(MemoryCompressedAttention, 32, heads=2, causal=True)
    yield last(causal, x)
    longer = torch.cat((x, torch.randn(1, 1, 32)), 1)
    yield same("causal: one more token appended, earlier outputs", causal(longer)[:, :-1], causal(x))


def longformer() -> Iterator[Row]:
    config = LongformerConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, attention_window=[8])
    module, x = quiet(LongformerSelfAttention, config, 0), torch.randn(1, N, 32)

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        flags = {"is_index_masked": ~mask, "is_index_global_attn": mask & ~mask, "is_global_attn": False}
        return module(x, torch.where(mask, 0.0, -1e4), **flags)[0]

    apart = (torch.arange(N)[:, None] - torch.arange(N)).abs()
    window = softmax(*(heads(to(x)) for to in (module.query, module.key, module.value)), apart <= 4)
    yield same("window of 4 each side, beside the formula", attend(x, before(N)), window.transpose(1, 2).flatten(2))
    yield same("40 tokens + 24 masked, or 40 tokens", attend(x, before(40))[:, :40], attend(x[:, :40], before(40, 40)))


def bigbird() -> Iterator[Row]:
    sizes = {"max_position_embeddings": 256, "block_size": D, "num_random_blocks": 3}
    config = BigBirdConfig(hidden_size=32, num_attention_heads=2, **sizes)
    module, x = quiet(BigBirdBlockSparseAttention, config, seed=0), torch.randn(1, 256, 32)
    blocks, band, queries, keys = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, 256), D)
    evaluated = module(x, band, queries, keys, blocks, blocks)[0]
    apart = (torch.arange(16)[:, None] - torch.arange(16)).abs()
    seen = (apart <= 1).float()  # windows and globals, and then block 0 three more times
    seen[[0, -1]], seen[:, [0, -1]] = 1, 1
    seen[1:-1, 0] += 3
    bias = seen.log().repeat_interleave(D, 0).repeat_interleave(D, 1)
    q, k, v = (heads(to(x)) for to in (module.query, module.key, module.value))
    wanted = ((q @ k.mT * D**-0.5 + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
    yield same("evaluation, with block 0 three times in place of 3 random blocks", evaluated, wanted, INSTEAD)
    trained = module.train()(x, band, queries, keys, blocks, blocks)[0]
    yield same("the same input in training (no dropout here) and in evaluation", trained, evaluated)


def hf_reformer() -> Iterator[Row]:
    def attention(**settings: Any) -> Any:
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "attention_head_size": D, "lsh_attn_chunk_length": 8}
        return quiet(LSHSelfAttention, ReformerConfig(num_hashes=1, **sizes, **settings))

    x, module = torch.randn(1, N, 32), attention(num_buckets=8)
    yield same("evaluation twice", module(x).hidden_states, module(x).hidden_states)
    seeded = attention(num_buckets=8, hash_seed=0)
    after = [(drawn(seeded, x, seed=seed), torch.rand(1).item())[1] for seed in (1, 2)]
    measured = "begins anew at it" if after[0] == after[1] else "goes on"
    yield check("`hash_seed` set: torch's own generator after a call", "goes on", measured, after[0] != after[1])
    short, fresh = attention(), attention()
    for y in (x[:, :16], x):
        short(y)
    fresh(x)
    measured = f"{short.num_buckets}, without that call {fresh.num_buckets}"
    what = "buckets for 64 tokens after a call with 16"
    yield check(what, "equal", measured, short.num_buckets == fresh.num_buckets)
    yield padding(lambda y, **mask: module(y, **mask).hidden_states, x, 40, "attention_mask")


EXPERIMENTS = {
    "torch": dot_product,
    "local-attention": local,
    "linear-attention-transformer": linear,
    "performer-pytorch": performer,
    "reformer-pytorch": reformer,
    "routing-transformer": routing,
    "sinkhorn-transformer": sinkhorn,
    "linformer": linformer,
    "nystrom-attention": nystrom,
    "memory-compressed-attention": compressed,
    "transformers (Longformer)": longformer,
    "transformers (BigBird)": bigbird,
    "transformers (Reformer)": hf_reformer,
}


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print("| peer | version | what is tested | expected | measured | verdict |\n| --- | --- | --- | --- | --- | --- |")
    for peer, experiment in EXPERIMENTS.items():
        torch.manual_seed(0)
        for row in experiment():
            print(f"| {' | '.join((peer, metadata.version(peer.split()[0]), *row))} |", flush=True)


if __name__ == "__main__":
    main()
