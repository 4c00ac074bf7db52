"""What the configuration of every model with an encoder and a decoder says."""

from dataclasses import dataclass

from hasten.attention import AttentionSpec, FullSpec
from hasten.fields import Depth, PositiveInt, Share, Spec
from hasten.nn.sharing import Shared


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderSpec(Spec):
    """The sizes, the attention of each layer, and which layers use that of others."""

    kind: str
    """The model's name."""
    d_model: PositiveInt = 256
    """Width of the states."""
    n_heads: PositiveInt = 4
    """Attention heads; divides d_model."""
    d_ff: PositiveInt = 1024
    """Width inside the feed-forward networks."""
    encoder_layers: Depth = 6
    """Layers of the encoder."""
    decoder_layers: Depth = 6
    """Layers of the decoder; where there are two, of each."""
    dropout: Share = 0.1
    """Dropout after every sub-layer and inside the feed-forward networks."""
    label_smoothing: Share = 0.1
    """Share of the target probability that is spread over the vocabulary."""
    encoder_attention: tuple[AttentionSpec, ...] = (FullSpec(),)
    """The encoder's self-attention: one spec for all layers, or one per layer."""
    decoder_attention: tuple[AttentionSpec, ...] = (FullSpec(),)
    """The decoder's self-attention: one spec for all layers, or one per layer."""
    cross_attention: tuple[AttentionSpec, ...] = (FullSpec(),)
    """The decoder's attention over the source: one spec for all layers, or one per layer."""

    encoder_sharing: tuple[PositiveInt, ...] = ()
    """For each encoder layer, from 1, the layer whose attention weights it uses; empty: every layer its own."""
    decoder_sharing: tuple[PositiveInt, ...] = ()
    """The same for the decoder's self-attention."""
    cross_sharing: tuple[PositiveInt, ...] = ()
    """The same for the decoder's attention over the source, of which `shared_of_cross` is shared."""
    shared_of_cross: Shared = "output"
    """The weights (layers keep values and output projection), the context (they keep the latter) or the output."""
