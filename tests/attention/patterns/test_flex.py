"""Patterns for FlexAttention: the same pairs as `allows`, found without looking at all of them."""

import time

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from hasten.attention import Mask
from hasten.attention.patterns import PatternAttention
from hasten.attention.patterns.algebra import Pattern, Scene
from hasten.attention.patterns.expression import parse
from hasten.attention.patterns.flex import FlexOperator, block_mask
from hasten.attention.patterns.plan import resolved
from hasten.errors import UserError

# Patterns of which every block is known, and others, in which a listed block may turn out empty.
KNOWN = (
    "Local(20)",
    "Local(3, 40)",
    "Local(5, 0, dilation=7)",
    "Blocks(24, 1, 0)",
    "Blocks(16)",
    "Strided(40)",
    "Strided(3)",
    "Summary(50, 7)",
    "Summary(16, 16)",
    "Global(first=20, last=3)",
    "Global(last=20, rows=False)",
    "Everything()",
    "Causal()",
    "External(3)",
    "Local(6) | Strided(30) | Global(first=1)",
    "Blocks(32, 0, 0) | Summary(32, 4)",
    "Local(16, 0) | Local(0, 16)",
    "Local(4) & Strided(2)",
    "Blocks(20) & Causal()",
    "Summary(40, 5) & Local(30)",
    "External(5) | Local(9) | Global(first=2, last=2)",
)
DRAWN = (
    "RandomBlocks(2, 8)",
    "RandomBlocks(9, 24)",
    "RandomBlocks(1, 24, near=1, ends=True)",
    "Blocks(16, 1, 1) | Global(first=16, last=16) | RandomBlocks(1, 16, near=1, ends=True)",
    "External(4) | Blocks(8, 1, 1) | RandomBlocks(1, 8)",
    "Marked()",
    "Marked(rows=False) | Local(4)",
    "External(2) | Marked() | Local(3)",
    "RandomBlocks(2, 8) & Local(40)",
)
CAUSAL = ("Local(20)", "Blocks(24, 1, 1)", "Strided(9)", "Summary(50, 7)", "Global(first=20)", "Everything()")
CAUSAL += ("Local(6) | Strided(30) | Global(first=1)", "RandomBlocks(2, 8)", "Marked() | Local(3)")
SIZES = ((100, 100), (96, 96), (37, 100), (130, 100), (1, 100), (5, 5))
BLOCK, HEADS = 16, 2


def marked_tokens(batch: int, n_keys: int) -> Tensor:
    return torch.rand(batch, n_keys, generator=torch.Generator().manual_seed(2)) < 0.04


def dense(
    pattern: Pattern, n_queries: int, n_keys: int, lengths: list[int], marked: Tensor | None = None, seed: int = 0
) -> Tensor:
    """The definition, (B, H, T, S), one example at a time."""
    i, j = torch.arange(n_queries) + n_keys - n_queries, torch.arange(n_keys)
    found = []
    for b, length in enumerate(lengths):
        own = None if marked is None else marked[b : b + 1] & (j < length)
        scene = Scene(length, HEADS, seed, own, n_keys)
        allowed = resolved(pattern).allows(i[None, None, :, None], j[None, None, None, :], scene) & (j < length)
        found.append(allowed[0].expand(HEADS, -1, -1))
    return torch.stack(found)


def blocks(allowed: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Blocks with some but not only allowed pairs, and blocks within the matrix with nothing else."""
    some = [[part.any((2, 3)) for part in rows.split(block, 3)] for rows in allowed.split(block, 2)]
    full = [
        [part.all((2, 3)) & (part.shape[2:] == (block, block)) for part in rows.split(block, 3)]
        for rows in allowed.split(block, 2)
    ]
    some, full = (torch.stack([torch.stack(row, -1) for row in grid], 2) for grid in (some, full))
    return some & ~full, full


def listed(numbers: Tensor | None, columns: Tensor | None) -> Tensor:
    """The listed blocks as a grid, (B, H, R, C)."""
    assert numbers is not None
    assert columns is not None
    chosen = torch.arange(columns.shape[-1]) < numbers[..., None]
    return torch.zeros_like(columns, dtype=torch.bool).scatter(-1, columns.long(), chosen)


def assert_mask(made: BlockMask, allowed: Tensor, *, exact: bool) -> None:
    """made stands for exactly the allowed pairs."""
    batch, heads, n_queries, n_keys = allowed.shape
    checked = create_mask(made.mask_mod, batch, heads, n_queries, n_keys, device="cpu")
    assert torch.equal(checked, allowed)
    some, full = blocks(allowed, made.BLOCK_SIZE[0])
    partial = listed(made.kv_num_blocks, made.kv_indices).expand_as(some)
    whole = listed(made.full_kv_num_blocks, made.full_kv_indices).expand_as(some)
    assert not (partial & whole).any()
    assert not (whole & ~full).any()
    assert not ((some | full) & ~(partial | whole)).any()
    assert torch.equal(made.to_dense().bool().expand_as(some), partial | whole)
    assert made.shape[-2:] == (n_queries, n_keys)
    if exact:
        assert torch.equal(partial, some)
        assert torch.equal(whole, full)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("text", KNOWN)
def test_the_blocks_are_those_in_which_pairs_are_allowed(text: str, sizes: tuple[int, int]):
    made = block_mask(parse(text), *sizes, n_heads=HEADS, batch=2, block=BLOCK)
    assert made.kv_indices.shape[:2] == (1, 1)
    assert_mask(made, dense(parse(text), *sizes, [sizes[1]] * 2), exact=True)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("text", DRAWN)
def test_no_pair_of_a_drawn_pattern_is_lost(text: str, sizes: tuple[int, int]):
    marked = marked_tokens(2, sizes[1]) if "Marked" in text else None
    made = block_mask(parse(text), *sizes, n_heads=HEADS, batch=2, seed=3, marked=marked, block=BLOCK)
    allowed = dense(parse(text), *sizes, [sizes[1]] * 2, marked, 3)
    assert_mask(made, allowed, exact=False)


def test_drawn_blocks_are_listed_for_their_head_alone():
    made = block_mask(parse("RandomBlocks(2, 16)"), 160, 160, n_heads=3, block=16)
    assert made.kv_num_blocks.tolist() == [[[2] * 10] * 3]
    assert not torch.equal(made.kv_indices[0, 0, :, :2], made.kv_indices[0, 1, :, :2])


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
@pytest.mark.parametrize("text", CAUSAL)
def test_causal_masks_hold_what_the_causal_pattern_allows(text: str, sizes: tuple[int, int]):
    marked = marked_tokens(1, sizes[1]) if "Marked" in text else None
    made = block_mask(parse(text), *sizes, n_heads=HEADS, causal=True, marked=marked, block=BLOCK)
    allowed = dense(parse(text).causal(), *sizes, [sizes[1]], marked)
    assert_mask(made, allowed, exact="Random" not in text and "Marked" not in text)


@pytest.mark.parametrize("text", [*KNOWN, *DRAWN])
def test_padding_at_the_end_is_never_read(text: str):
    lengths = [70, 100, 0, 33, 70]
    marked = marked_tokens(5, 100) if "Marked" in text else None
    made = block_mask(parse(text), 100, 100, n_heads=HEADS, batch=5, lengths=lengths, marked=marked, block=BLOCK)
    allowed = dense(parse(text), 100, 100, lengths, marked)
    assert not allowed[0, ..., 70:].any()
    assert_mask(made, allowed, exact=text in KNOWN)
    marked = None if marked is None else marked[:2]
    same = block_mask(parse(text), 100, 100, n_heads=HEADS, batch=2, lengths=[40, 40], marked=marked, block=BLOCK)
    assert marked is not None or same.kv_indices.shape[0] == 1
    assert_mask(same, dense(parse(text), 100, 100, [40, 40], marked), exact=text in KNOWN)


def operands(batch: int, n_queries: int, n_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, n, 8, generator=generator) for n in (n_queries, n_keys, n_keys))
    return q, k, v


def softmax_over(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """The plain definition; a row that may read nothing gives zero."""
    scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("text", [*KNOWN, *DRAWN])
def test_flex_attention_gives_the_softmax_over_what_is_allowed(unchecked, text: str):
    sizes = (37, 70)
    marked = marked_tokens(2, sizes[1]) if "Marked" in text else None
    q, k, v = operands(2, *sizes)
    operator = FlexOperator(q, k, Mask(marked=marked), parse(text), seed=3, block=BLOCK, compiled=False)
    allowed = dense(parse(text), *sizes, [70, 70], marked, 3)
    torch.testing.assert_close(operator.apply(v), softmax_over(q, k, v, allowed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("padding", "sizes"),
    [
        ("none", (50, 50)),
        ("none", (20, 50)),
        ("right", (60, 50)),
        ("left", (50, 50)),
        ("interior", (20, 50)),
        ("left", (60, 50)),
        ("all", (50, 50)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])
def test_the_operator_is_that_of_pattern_attention(unchecked, sizes: tuple[int, int], causal: bool, padding: str):
    keys = None
    if padding != "none":
        keys = torch.ones(3, 50, dtype=torch.bool)
        keys[
            0, {"right": slice(41, 50), "left": slice(0, 9), "interior": slice(3, 9), "all": slice(0, 50)}[padding]
        ] = 0
    q, k, v = operands(3, *sizes)
    marked = marked_tokens(3, 50)
    attention = PatternAttention(
        parse("Local(3) | Strided(9) | Marked() | RandomBlocks(1, 4) | Global(first=1)")
    ).eval()
    mask = Mask(causal=causal, keys=keys, marked=marked)
    if keys is not None:
        k, v = (x.masked_fill(~keys[:, None, :, None], torch.nan) for x in (k, v))
    expected = attention.operator(q, k, mask)
    actual = FlexOperator(q, k, mask, attention.pattern, block=BLOCK, compiled=False)
    torch.testing.assert_close(actual.apply(v), expected.apply(v), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.dense(), expected.dense(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.materialised().apply(v), expected.apply(v), rtol=1e-5, atol=1e-5)


def test_a_row_that_reads_nothing_gives_exactly_zero(unchecked):
    q, k, v = operands(1, 40, 40)
    operator = FlexOperator(q, k, Mask(), parse("Summary(20, 2) & Causal()"), block=BLOCK, compiled=False)
    assert (operator.apply(v)[:, :, :18] == 0).all()
    assert (operator.apply(v)[:, :, 18:] != 0).all()
    assert (operator.dense()[:, :, :18] == 0).all()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Local(256) | Global(first=2)", 2.0),
        ("Local(256) | Strided(316)", 5.0),
        ("Blocks(128, 1, 1) | Global(first=128, last=128) | RandomBlocks(3, 128, near=1, ends=True)", 5.0),
        ("Blocks(316) | Summary(316, 8)", 5.0),
    ],
)
def test_a_long_mask_is_made_without_looking_at_pairs(text: str, seconds: float):
    block_mask(parse(text), 1000, 1000)
    began = time.process_time()
    made = block_mask(parse(text), 100_000, 100_000)
    assert time.process_time() - began < seconds
    assert made.kv_indices.numel() == 782**2


def test_the_blocks_of_a_long_window_are_as_many_as_it_touches():
    made = block_mask(parse("Local(256) | Global(first=2)"), 100_000, 100_000)
    partial, full = made.kv_num_blocks[0, 0].long(), made.full_kv_num_blocks
    assert full is not None
    # Of a row of 128 queries: three whole blocks and one cut at either side; far from them the column of block 0.
    assert full[0, 0, 10:770].eq(3).all()
    assert partial[10:770].eq(3).all()
    # Queries 0 and 1 read everything, so in the first row every block has allowed pairs.
    assert int(partial[0] + full[0, 0, 0]) == 782


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        ("Marked()", {}, "which tokens are marked"),
        ("Local(1)", {"lengths": [3]}, "give 2 numbers from 0 to 9"),
        ("Local(1)", {"lengths": [3, 10]}, "give 2 numbers from 0 to 9"),
        ("Global(last=1)", {"causal": True}, "leave out last"),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_refused(text: str, options: dict, problem: str):
    with pytest.raises(UserError, match=problem):
        block_mask(parse(text), 9, 9, batch=2, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "text",
    [
        "Local(40) | Strided(50) | Global(first=2, last=1)",
        "External(3) | Blocks(32, 1, 1) | RandomBlocks(2, 32) | Marked()",
    ],
)
def test_the_compiled_kernel_gives_the_same(unchecked, text: str):
    lengths, marked = [250, 300], marked_tokens(2, 300) if "Marked" in text else None
    q, k, v = (x.repeat(1, 1, 1, 4) for x in operands(2, 300, 300))
    mask = Mask(keys=torch.arange(300) < torch.tensor(lengths)[:, None], marked=marked)
    with torch.no_grad():
        actual = FlexOperator(q, k, mask, parse(text)).apply(v)
    expected = softmax_over(q, k, v, dense(parse(text), 300, 300, lengths, marked))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
