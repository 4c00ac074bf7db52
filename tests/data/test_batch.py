import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data.batch import endless_batches, epoch_batches, pad, pair_batch, source_batch
from hasten.data.grouping import group_by_tokens
from hasten.data.tokenizer import EOS, PAD

lengths = st.lists(st.integers(0, 30), max_size=50)


def test_rows_are_padded_on_the_right():
    ids, mask = pad([[8, 9], [], [7]])
    assert ids.tolist() == [[8, 9], [PAD, PAD], [7, PAD]]
    assert mask.tolist() == [[True, True], [False, False], [True, False]]
    assert ids.dtype == torch.int64


def test_no_rows_and_empty_rows_have_no_width():
    assert pad([])[0].shape == (0, 0)
    assert pad([[]])[0].shape == (1, 0)


def test_a_source_ends_in_the_end_symbol_and_a_target_does_not():
    batch = pair_batch([([8], [9, 10]), ([11, 12], [])])
    assert batch.source.tolist() == [[8, EOS, PAD], [11, 12, EOS]]
    assert batch.source_mask.sum(1).tolist() == [2, 3]
    assert batch.target.tolist() == [[9, 10], [PAD, PAD]]
    assert batch.target_mask.sum(1).tolist() == [2, 0]
    assert source_batch([[]])[0].tolist() == [[EOS]]


def test_fertilities_stand_under_the_source_and_its_end_with_nothing_on_padding():
    pairs = [([8], [9, 10]), ([11, 12], [])]
    batch = pair_batch(pairs, [[2, 0], [0, 0, 0]])
    assert batch.fertilities is not None
    assert batch.fertilities.tolist() == [[2, 0, 0], [0, 0, 0]]
    assert batch.fertilities.shape == batch.source.shape
    assert batch.fertilities.sum(1).tolist() == batch.target_mask.sum(1).tolist()
    assert pair_batch(pairs).fertilities is None
    with pytest.raises(AssertionError, match="a label a source token"):
        pair_batch(pairs, [[2], [0, 0, 0]])


@pytest.mark.parametrize("fertilities", [None, [[2, 0]]])
def test_a_batch_moves_with_all_it_has(fertilities: list[list[int]] | None):
    batch = pair_batch([([8], [9, 10])], fertilities)
    moved = batch.to("meta")
    assert {name: t is None for name, t in vars(moved).items()} == {name: t is None for name, t in vars(batch).items()}
    assert all(t is None or t.device.type == "meta" for t in vars(moved).values())


@given(lengths, st.integers(1, 100))
def test_groups_hold_every_index_once_and_keep_within_the_tokens(lengths: list[int], batch_tokens: int):
    groups = group_by_tokens(lengths, batch_tokens)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= batch_tokens
    flat = [lengths[i] for group in groups for i in group]
    assert flat == sorted(flat)


@given(lengths, st.integers(1, 100))
def test_no_group_could_take_the_next_one_in(lengths: list[int], batch_tokens: int):
    for group, after in itertools.pairwise(group_by_tokens(lengths, batch_tokens)):
        assert (len(group) + 1) * lengths[after[0]] > batch_tokens


pairs = st.lists(st.tuples(st.lists(st.just(8), max_size=9), st.lists(st.just(9), max_size=9)), min_size=1, max_size=30)


@given(pairs, st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=50)
def test_an_epoch_takes_every_pair_once(pairs, batch_tokens: int, seed: int):
    batches = epoch_batches(pairs, batch_tokens, torch.Generator().manual_seed(seed))
    assert sorted(itertools.chain(*batches)) == list(range(len(pairs)))
    assert batches == epoch_batches(pairs, batch_tokens, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("skip", [0, 1, 3, 4, 7, 20])
def test_skipping_batches_is_taking_and_dropping_them(skip: int):
    pairs = [([8] * (1 + i % 5), [9] * (i % 7)) for i in range(13)]
    everything = list(itertools.islice(endless_batches(pairs, 20, seed=3), 30))
    assert list(itertools.islice(endless_batches(pairs, 20, seed=3, skip=skip), 30 - skip)) == everything[skip:]


def test_every_epoch_is_in_another_order():
    pairs = [([8], [9])] * 40
    per_epoch = len(epoch_batches(pairs, 8, torch.Generator()))
    stream = endless_batches(pairs, 8, seed=1)
    first, second = ([*itertools.islice(stream, per_epoch)] for _ in range(2))
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(40))
    assert first != second
