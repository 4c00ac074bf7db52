"""The mechanisms of a stack: made for their places, and refused with the reason and what would do instead."""

import pytest
import torch

from hasten.attention import FullSpec, LinformerSpec, LSHSpec, NystromSpec, PerformerSpec, RoutingSpec, SinkhornSpec
from hasten.errors import UserError
from hasten.nn.stack import Decoder, Encoder

SHAPE = (8, 2, 16, 0.1)


def decoder(spec, cross=None) -> Decoder:
    return Decoder(2, *SHAPE, (spec,), (cross or FullSpec(),))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (LinformerSpec(), "its projections mix the whole sequence, what comes later too"),
        (NystromSpec(), "its landmarks mix the whole sequence, what comes later too"),
        (SinkhornSpec(cut=2), "with cut, sorted blocks mix the whole sequence; without cut it can"),
        (LSHSpec(), "who shares a chunk depends on later tokens; with strict = true it can"),
        (RoutingSpec(), "who is in a cluster depends on later tokens; with strict = true it can"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_what_sees_the_future_is_no_decoder_and_the_error_says_why_and_what_is(spec, reason):
    with pytest.raises(UserError) as error:
        decoder(spec)
    text = str(error.value)
    assert text.startswith(f"decoder attention, layer 1: {spec.kind} attention cannot serve here ({reason})")
    assert "must be strictly causal; kinds that can: average, blocks, compressed, efficient, full, " in text
    assert "linformer" not in text.partition("kinds that can")[2]
    assert "\n" not in text


def test_what_is_for_one_sequence_reads_no_memory_and_no_reason_of_another_task_is_given():
    with pytest.raises(UserError, match=r"cross attention, layer 1: lsh attention cannot serve here, where .* padded"):
        decoder(FullSpec(), LSHSpec())
    with pytest.raises(UserError, match=r"kinds that can: compressed, efficient, full, linear, linformer, performer"):
        decoder(FullSpec(), LSHSpec())


def test_a_mistake_in_a_setting_names_the_layer():
    with pytest.raises(UserError, match="encoder attention, layer 2: lsh: got 3 buckets; give 1 or an even number"):
        Encoder(2, *SHAPE, (FullSpec(), LSHSpec(buckets=3)))
    with pytest.raises(
        UserError, match="decoder attention, layer 1: PerformerAttention was made for d_head = 8, got 4"
    ):
        decoder(PerformerSpec(d_head=8))
    with pytest.raises(UserError, match="d_model 9 cannot be cut into 2 heads"):
        Encoder(1, 9, 2, 16, 0.1, (FullSpec(),))


def test_layers_of_a_stack_draw_differently():
    stack = Encoder(3, *SHAPE, (PerformerSpec(features=4, seed=2),))
    rows = [layer.self_attention.attention.directions.rows for layer in stack.layers]
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])
    again = Encoder(3, *SHAPE, (PerformerSpec(features=4, seed=2),))
    assert torch.equal(again.layers[2].self_attention.attention.directions.rows, rows[2])


def test_layers_share_a_projection_only_where_their_specs_are_equal_and_say_so():
    def projections(*specs):
        stack = Encoder(3, *SHAPE, specs)
        return [layer.self_attention.attention.projection for layer in stack.layers], stack

    shared, stack = projections(LinformerSpec(max_length=20, rank=4, sharing="layerwise"))
    assert shared[0] is shared[1] is shared[2]
    assert sum(p.numel() for n, p in stack.named_parameters() if "projection" in n) == 20 * 4
    apart, _ = projections(LinformerSpec(max_length=20, rank=4))
    assert apart[0] is not apart[1]
    one, other = (LinformerSpec(max_length=20, rank=rank, sharing="layerwise") for rank in (4, 5))
    mixed, _ = projections(one, other, one)
    assert mixed[0] is mixed[2] is not mixed[1]


def test_a_stack_knows_the_longest_sequence_it_takes():
    assert Encoder(2, *SHAPE, (FullSpec(),)).longest is None
    assert Encoder(2, *SHAPE, (LinformerSpec(max_length=20), LinformerSpec(max_length=12))).longest == 12
    both = Decoder(1, *SHAPE, (FullSpec(),), (LinformerSpec(max_length=20),))
    assert (both.longest, both.longest_memory) == (None, 20)
