"""Small Hugging Face models with random weights, and batches for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 50}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 50,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "dropout": 0.0,
}


def bert(**options: Any) -> Any:
    return seeded(transformers.BertModel, transformers.BertConfig(**SIZES, **options))


def llama(**options: Any) -> Any:
    options = {"num_key_value_heads": 2, "pad_token_id": 0, **options}
    return seeded(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, **options))


def gpt2(**options: Any) -> Any:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=True, **options)
    return seeded(transformers.GPT2LMHeadModel, config)


def bart(**options: Any) -> Any:
    return seeded(transformers.BartForConditionalGeneration, transformers.BartConfig(**SEQ2SEQ, **options))


def marian(**options: Any) -> Any:
    config = transformers.MarianConfig(**SEQ2SEQ, max_position_embeddings=64, **options)
    return seeded(transformers.MarianMTModel, config)


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 64, "vocab_size": 50}
    return seeded(transformers.T5ForConditionalGeneration, transformers.T5Config(**sizes, decoder_start_token_id=0))


def seeded(kind: Any, config: Any) -> Any:
    """With weights large enough for attention to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    return model


MODELS: dict[str, Callable] = {"bert": bert, "llama": llama, "gpt2": gpt2, "bart": bart, "marian": marian}
GENERATING = {name: make for name, make in MODELS.items() if name != "bert"}
TWO_SIDED = {name: make for name, make in MODELS.items() if name in ("bart", "marian")}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
each_generating = pytest.mark.parametrize("make", GENERATING.values(), ids=GENERATING)
each_side = pytest.mark.parametrize("side", ["left", "right", "none"])
each_implementation = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


def batch(side: str = "left", length: int = 7) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (3, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, :3] = mask[1, :1] = 0
        mask = mask if side == "left" else mask.flip(1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def run(model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    """Scores or states at real tokens; two-sided models decode what they read."""
    real = given["attention_mask"].bool()
    if model.config.is_encoder_decoder:
        target = {"decoder_input_ids": given["input_ids"], "decoder_attention_mask": given["attention_mask"]}
        return model(**given, **target, **options)[0][real]
    return model(**given, **options)[0][real]
