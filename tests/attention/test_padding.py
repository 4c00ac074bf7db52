import torch

from hasten.attention.masks import padding


def test_a_batch_without_padding_needs_no_mask():
    assert padding(torch.ones(2, 3, dtype=torch.bool)).keys is None


def test_one_padded_key_keeps_the_mask():
    keys = torch.tensor([[True, True], [True, False]])
    assert padding(keys).keys is keys


def test_traced_code_keeps_the_mask_whatever_its_values(unchecked):
    def masked(x, keys):
        mask = padding(keys).keys
        assert mask is not None
        return x.masked_fill(~mask, 0.0)

    torch.compiler.reset()
    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(1, 2), torch.tensor([[True, True]])).tolist() == [[1.0, 1.0]]
    assert compiled(torch.ones(1, 2), torch.tensor([[True, False]])).tolist() == [[1.0, 0.0]]
