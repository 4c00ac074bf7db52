"""BigBird against transformers: equal where that is right, and where it is not, how."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.test_attention_training import peak_memory
from hasten.attention import BigBirdSpec, Mask, RandomBlocks
from hasten.attention.patterns import Scene
from huggingface_attention import (
    SIZES,
    STILL,
    D,
    H,
    as_found,
    assert_equal,
    differs,
    gradients,
    like,
    seeded,
    sequence,
    texts,
    transformers,
)

big_bird = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")

BLOCK, BLOCKS = 2, 9
WHOLE = torch.ones(2, BLOCKS * BLOCK, dtype=torch.bool)


@pytest.fixture(autouse=True)
def numpys_numbers() -> Iterator[None]:
    """Their training passes seed numpy's global generator."""
    state = np.random.get_state()
    yield
    np.random.set_state(state)


def their_bigbird(random: int, *, block: int = BLOCK, dropout: float = 0.0) -> Any:
    sizes = {**SIZES, "block_size": block, "num_random_blocks": random, "attention_probs_dropout_prob": dropout}
    return seeded(big_bird.BigBirdBlockSparseAttention(transformers.BigBirdConfig(**sizes), 0).double())


def run_bigbird(theirs: Any, x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the weights that they return."""
    masks = transformers.BigBirdModel.create_masks_for_block_sparse_attn(keys.to(x.dtype), theirs.block_size)
    blocked, band, rows, columns = masks
    return theirs(x, band, rows, columns, blocked, blocked)


def table(spec: BigBirdSpec, n_blocks: int) -> Tensor:
    """Our draw, (H, blocks, r)."""
    pattern = RandomBlocks(spec.random, spec.block, near=1, ends=True)
    return pattern.table(Scene(n_blocks * spec.block, H, spec.seed))


def give(theirs: Any, drawn: Tensor) -> None:
    """Our random blocks instead of theirs, which are none in eval()."""
    rows = [head[1:-1].numpy() for head in drawn]
    theirs._bigbird_block_rand_mask_with_head = lambda **sizes: rows


@pytest.mark.parametrize("n_blocks", [7, 9, 16])
@pytest.mark.parametrize("random", [1, 2])
def test_bigbird_is_theirs_with_the_same_random_blocks(random: int, n_blocks: int):
    spec, x = BigBirdSpec(block=BLOCK, random=random, seed=4), sequence(n_blocks * BLOCK, 2).requires_grad_()
    theirs = their_bigbird(random)
    ours = like(theirs, spec)
    give(theirs, table(spec, n_blocks))
    out, expected = ours(x), run_bigbird(theirs, x, torch.ones(2, n_blocks * BLOCK, dtype=torch.bool))[0]
    assert_equal(out, expected)
    assert_equal(gradients(out, [x]), gradients(expected, [x]))


def taken(monkeypatch: pytest.MonkeyPatch, drawn: Tensor) -> None:
    """Their random blocks instead of ours: of those that a shorter sequence has."""

    def table(pattern: RandomBlocks, scene: Scene) -> Tensor:
        n_blocks = (scene.length + BLOCK - 1) // BLOCK
        return drawn[:, :n_blocks].masked_fill(drawn[:, :n_blocks] >= n_blocks, -1)

    monkeypatch.setattr(RandomBlocks, "table", table)


def test_bigbird_is_theirs_with_their_random_blocks(monkeypatch: pytest.MonkeyPatch):
    theirs, x = their_bigbird(2).train(), sequence(2 * BLOCKS * BLOCK, 2)
    out, drawn = draws(theirs, x)
    taken(monkeypatch, torch.nn.functional.pad(drawn, (0, 0, 1, 1), value=-1))
    assert_equal(like(theirs, BigBirdSpec(block=BLOCK, random=2, seed=101))(x), out)


def draws(theirs: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the random blocks (H, blocks - 2, r)."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        make = theirs._create_rand_mask_from_inputs
        patch.setattr(
            theirs,
            "_create_rand_mask_from_inputs",
            lambda rows, columns, drawn, *sizes: (
                seen.update(drawn=drawn[0].clone()),
                make(rows, columns, drawn, *sizes),
            )[1],
        )
        out = run_bigbird(theirs, x, torch.ones(x.shape[:2], dtype=torch.bool))[0]
    return out, seen["drawn"]


def test_a_row_padded_by_whole_blocks_is_theirs_without_a_last_global_block(monkeypatch: pytest.MonkeyPatch):
    theirs, x, keys = their_bigbird(2), sequence(BLOCKS * BLOCK, 2), WHOLE.clone()
    keys[1, -2 * BLOCK :] = False
    drawn = table(BigBirdSpec(block=BLOCK, random=2), BLOCKS)
    give(theirs, drawn)
    taken(monkeypatch, drawn)
    out = run_bigbird(theirs, x, keys)[0]
    whole, short = (
        like(theirs, BigBirdSpec(block=BLOCK, random=2, seed=102 + last, last=last)) for last in (True, False)
    )
    assert_equal(whole(x, Mask(keys=keys))[0], out[0])
    assert_equal(short(x, Mask(keys=keys))[1][keys[1]], out[1][keys[1]])
    assert not out[~keys].any()


@as_found
def test_their_last_global_block_is_that_of_the_tensor_so_that_padding_changes_outputs():
    theirs, x, keys = their_bigbird(1), sequence(BLOCKS * BLOCK, 2), WHOLE.clone()
    keys[1, -BLOCK:] = False
    alone = run_bigbird(theirs, x[1:, :-BLOCK], WHOLE[1:, :-BLOCK])[0]
    together = run_bigbird(theirs, x, keys)[0][1:, :-BLOCK]
    assert differs(together, alone)[0, BLOCK : -3 * BLOCK].all()
    ours = like(theirs, BigBirdSpec(block=BLOCK, random=1))
    assert_equal(ours(x, Mask(keys=keys))[1:, :-BLOCK], ours(x[1:, :-BLOCK]))


@as_found
def test_in_eval_their_random_blocks_are_the_first_block_counted_again():
    random, x = 2, sequence(BLOCKS * BLOCK, 2)
    theirs = their_bigbird(random)
    ours = like(theirs, BigBirdSpec(block=BLOCK, random=0))
    q, k, v = ours._project(x, ours._all)
    counted = torch.zeros(BLOCKS * BLOCK, BLOCKS * BLOCK).double()
    counted[BLOCK:-BLOCK, :BLOCK] = math.log(1 + random)
    scores = q @ k.transpose(2, 3) / math.sqrt(D // H) + counted
    weights = scores.masked_fill(ours.attention.reference(q, k, Mask()) == 0, -torch.inf).softmax(-1)
    out, returned = run_bigbird(theirs, x, WHOLE)
    assert_equal(out, (weights @ v).transpose(1, 2).flatten(2))
    assert differs(out, ours(x)).any()
    assert returned.sum(-1).min() < 0.9


@as_found
def test_in_training_they_draw_the_same_near_blocks_at_every_pass_from_numpys_global_numbers():
    random, x = 3, sequence(40 * BLOCK, 1)
    theirs, before = their_bigbird(random).train(), np.random.get_state()[1].copy()
    out, drawn = draws(theirs, x)
    assert not np.array_equal(np.random.get_state()[1], before)
    again, same = draws(theirs, x)
    assert torch.equal(same, drawn)
    assert torch.equal(again, out)
    assert int(drawn.max()) < 5 + 2 * random < 40
    assert differs(draws(theirs.eval(), x)[0], out).any()
    ours, state = table(BigBirdSpec(block=BLOCK, random=random), 40), np.random.get_state()[1].copy()
    assert int(ours.max()) > 35
    assert np.array_equal(np.random.get_state()[1], state)


@as_found
@pytest.mark.parametrize(("length", "twice"), [(1024, True), (3072, False), (4096, False)])
def test_at_the_lengths_of_the_paper_they_draw_among_the_first_1024_tokens_and_some_blocks_twice(
    length: int, twice: bool
):
    theirs, n_blocks = their_bigbird(3, block=64).train(), length // 64
    np.random.seed(0)
    drawn = theirs._bigbird_block_rand_mask(4096, 4096, 64, 64, 3, last_idx=1024)[: n_blocks - 2]
    assert drawn.max() < 16
    window = [{0, row - 1, row, row + 1, n_blocks - 1} & set(blocks.tolist()) for row, blocks in enumerate(drawn, 1)]
    assert any(window) is twice


@as_found
def test_their_block_sparse_layer_ignores_attention_dropout():
    x = sequence(BLOCKS * BLOCK, 2)
    dropping, still = (their_bigbird(1, dropout=p).train() for p in (0.9, 0.0))
    assert torch.equal(run_bigbird(dropping, x, WHOLE)[0], run_bigbird(still, x, WHOLE)[0])
    ours = like(still, BigBirdSpec(block=BLOCK, random=1, dropout=0.9)).train()
    assert differs(ours(x), ours.eval()(x)).all()


@as_found
def test_their_block_sparse_layer_takes_whole_blocks_and_fails_with_few():
    theirs = their_bigbird(2).train()
    with pytest.raises(ValueError, match="multiple of block size"):
        run_bigbird(theirs, sequence(BLOCKS * BLOCK - 1, 2), WHOLE[:, 1:])
    for n_blocks in (4, 5, 8):
        n = n_blocks * BLOCK
        with pytest.raises(ValueError, match="broadcast"):
            run_bigbird(theirs, sequence(n, 2), WHOLE[:, :n])
    for n in (1, 3, 8, 17):
        assert like(theirs, BigBirdSpec(block=BLOCK, random=2))(sequence(n, 2)).isfinite().all()


@as_found
def test_their_block_sparse_layer_lets_what_stands_in_padding_into_real_tokens():
    theirs, keys = their_bigbird(1), WHOLE.clone()
    keys[:, -1] = False
    x = sequence(BLOCKS * BLOCK, 2).masked_fill(~keys[..., None], math.nan)
    assert run_bigbird(theirs, x, keys)[0][keys].isnan().all()
    assert not like(theirs, BigBirdSpec(block=BLOCK, random=1))(x, Mask(keys=keys))[keys].isnan().any()


@as_found
@torch.no_grad()
def test_one_short_text_turns_their_model_to_full_attention_for_good():
    sizes = {**SIZES, **STILL, "block_size": BLOCK, "num_random_blocks": 1, "num_hidden_layers": 1}
    model = seeded(transformers.BigBirdModel(transformers.BigBirdConfig(**sizes, max_position_embeddings=64)))
    long, short = texts(40)[0], texts(14)[0]
    before = model(long).last_hidden_state
    assert model.attention_type == "block_sparse"
    model(short)
    assert model.attention_type == "original_full"
    assert not torch.allclose(model(long).last_hidden_state, before, atol=1e-3)


@as_found
@torch.no_grad()
def test_their_block_sparse_layer_needs_memory_by_the_square_of_the_length(tmp_path: Path):
    theirs, growth = their_bigbird(2, block=16).float(), {}
    ours = like(theirs, BigBirdSpec(block=16, random=2)).float()
    for name in ("theirs", "ours"):
        peaks = []
        for n in (1088, 2176):
            x, keys = sequence(n, 1).float(), torch.ones(1, n, dtype=torch.bool)
            run = (lambda x=x, keys=keys: run_bigbird(theirs, x, keys)) if name == "theirs" else (lambda x=x: ours(x))
            run()
            peaks.append(peak_memory(run, tmp_path / "trace.json"))
        growth[name] = math.log2(peaks[1] / peaks[0])
    assert growth["theirs"] > 1.5
    assert growth["ours"] < 1.1
