import copy

import torch

from hasten.models.autoregressive import AutoregressiveSpec
from hasten.nn.layout import lay_out

SPEC = AutoregressiveSpec(d_model=16, n_heads=2, d_ff=32, encoder_layers=1, decoder_layers=1)


def test_layout_keeps_names_shapes_and_values():
    model = SPEC.build(20)
    before = copy.deepcopy(model.state_dict())
    after = lay_out(model).state_dict()
    assert list(before) == list(after)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0)


def test_wide_matrices_lie_by_columns_and_narrowing_ones_by_rows():
    model = lay_out(SPEC.build(20))
    assert model.embedding.weight.stride() == (1, 20)
    assert model.decoder.get_parameter("layers.0.feed_forward.inner.weight").stride() == (1, 32)
    assert model.decoder.get_parameter("layers.0.feed_forward.outer.weight").stride() == (32, 1)


def test_layout_changes_outputs_and_gradients_only_by_rounding():
    model = SPEC.build(20).eval()
    source, mask = torch.randint(7, 20, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    found = []
    for candidate in (model, lay_out(copy.deepcopy(model))):
        states = candidate.encode(source, mask).states
        states.square().sum().backward()
        gradient = candidate.embedding.weight.grad
        assert gradient is not None
        found.append((states, gradient))
    torch.testing.assert_close(found[0], found[1])
