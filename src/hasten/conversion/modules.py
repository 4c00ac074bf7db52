"""`torch.nn.MultiheadAttention` in a model, also inside torch's own Transformer layers."""

from collections.abc import Callable

from torch import nn

from hasten.attention.base import Attention
from hasten.attention.dropin import DropInAttention, obstacle
from hasten.conversion.sites import CROSS_NAMES, Site, Undo, layer_of

_BEFORE = "_used_nested_tensor_before_hasten"


def find(root: nn.Module) -> list[Site]:
    """Every `nn.MultiheadAttention`, and every stand-in of an earlier conversion, under every name it has."""
    modules = dict(root.named_modules(remove_duplicate=False))
    encoders = {name: module for name, module in modules.items() if isinstance(module, nn.TransformerEncoder)}
    found: dict[int, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention | DropInAttention):
            found.setdefault(id(module), []).append(name)
    sites = []
    for names in found.values():
        homes = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names if name]
        around = [
            encoder for at, encoder in encoders.items() if any(name.startswith(f"{at}." * (at != "")) for name in names)
        ]
        sites.append(_site(names[0], modules[names[0]], homes, around))
    return sites


def _site(
    name: str, module: nn.Module, homes: list[tuple[nn.Module, str]], around: list[nn.TransformerEncoder]
) -> Site:
    assert isinstance(module, nn.MultiheadAttention | DropInAttention)
    decoders = {attribute for parent, attribute in homes if isinstance(parent, nn.TransformerDecoderLayer)}
    if isinstance(module, DropInAttention):
        reason = f"it is {type(module.attention).__name__} already; restore() that conversion first"
    elif not homes:
        reason = "it is the model itself, and nothing can stand in for that; make a DropInAttention of it"
    else:
        reason = obstacle(module)
    return Site(
        name=name,
        module=module,
        n_heads=module.num_heads,
        d_head=module.head_dim,
        dropout=module.dropout,
        causal="self_attn" in decoders,
        cross="multihead_attn" in decoders or any(attribute in CROSS_NAMES for _, attribute in homes),
        layer=layer_of(name),
        cached=False,
        ties=True,
        obstacle=reason,
        install=_installer(module, homes, around),
    )


def _installer(
    module: nn.Module, homes: list[tuple[nn.Module, str]], around: list[nn.TransformerEncoder]
) -> Callable[[Attention], Undo]:
    def install(attention: Attention) -> Undo:
        assert isinstance(module, nn.MultiheadAttention)
        stand_in = DropInAttention(module, attention)
        for encoder in around:
            _keep_padded(encoder)
        for parent, attribute in homes:
            setattr(parent, attribute, stand_in)

        def undo() -> None:
            for parent, attribute in homes:
                if getattr(parent, attribute) is stand_in:
                    setattr(parent, attribute, module)
            # loading with assign=True and some moves between devices put new objects in the place of parameters
            for name in ("in_proj_weight", "in_proj_bias", "out_proj"):
                setattr(module, name, getattr(stand_in, name))
            module.train(stand_in.training)
            for encoder in around:
                _allow_nested(encoder)

        return undo

    return install


def _keep_padded(encoder: nn.TransformerEncoder) -> None:
    """In eval() torch's encoder would turn a padded batch into a nested tensor, which only its fused kernel reads."""
    vars(encoder).setdefault(_BEFORE, encoder.use_nested_tensor)
    encoder.use_nested_tensor = False


def _allow_nested(encoder: nn.TransformerEncoder) -> None:
    if _BEFORE in vars(encoder) and not any(isinstance(module, DropInAttention) for module in encoder.modules()):
        encoder.use_nested_tensor = vars(encoder).pop(_BEFORE)
