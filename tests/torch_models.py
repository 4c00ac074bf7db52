"""Small models of torch's own layers, and inputs for them."""

from typing import Any

import torch
from torch import Tensor, nn

D, H, B, T, S = 16, 4, 3, 6, 5


def encoder(norm_first: bool = False, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(D, H, 32, norm_first=norm_first, batch_first=True, **options)
    return randomised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first and not options))


def decoder() -> nn.TransformerDecoder:
    return randomised(nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 32, batch_first=True), 2))


def whole() -> nn.Transformer:
    return randomised(nn.Transformer(D, H, 2, 2, 32, batch_first=True))


def randomised(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def states(length: int = T, seed: int = 0) -> Tensor:
    return torch.randn(B, length, D, generator=torch.Generator().manual_seed(seed))


def padded(length: int = T) -> Tensor:
    """True = ignore: nothing, the last two, the last one."""
    return torch.arange(length) >= torch.tensor([length, length - 2, length - 1])[:, None]


def run(module: nn.Module, with_padding: bool, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs where nothing is padded, and which those are."""
    padding = padded() if with_padding else None
    mask = nn.Transformer.generate_square_subsequent_mask(T) if causal else None
    memory_padding = padded(S) if with_padding else None
    if isinstance(module, nn.TransformerEncoder):
        # torch deprecates masks of two types: the padding must be of the type of the other
        out = module(states(), mask, None if padding is None else as_type_of(mask, padding))
    elif isinstance(module, nn.TransformerDecoder):
        out = module(states(), states(S, 1), mask, None, as_type_of(mask, padding), memory_padding)
    else:
        padding_of_source = {"src_key_padding_mask": memory_padding, "memory_key_padding_mask": memory_padding}
        out = module(
            states(S, 1), states(), tgt_mask=mask, tgt_key_padding_mask=as_type_of(mask, padding), **padding_of_source
        )
    real = ~padded() if with_padding else torch.ones(B, T, dtype=torch.bool)
    return out[real], real


def as_type_of(mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    if mask is None or padding is None:
        return padding
    return torch.zeros(padding.shape).masked_fill(padding, -torch.inf)
