"""What the configuration of every model with an encoder and a decoder says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hasten.attention import AttentionSpec, FullSpec
from hasten.fields import Depth, PositiveInt, Share, Spec
from hasten.nn.sharing import Shared
from hasten.nn.stack import Encoder

Decoding = TypeVar("Decoding")


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

    @property
    def shape(self) -> tuple[int, int, int, float]:
        """Width, heads, inner width and dropout of every layer."""
        return self.d_model, self.n_heads, self.d_ff, self.dropout

    def encoder(self) -> Encoder:
        """The encoder, with fresh weights."""
        return Encoder(self.encoder_layers, *self.shape, self.encoder_attention, self.encoder_sharing)

    def decoder(self, kind: Callable[..., Decoding]) -> Decoding:
        """A decoder of this kind (`hasten.nn.stack.DecoderStack`), with fresh weights."""
        return kind(
            self.decoder_layers,
            *self.shape,
            self.decoder_attention,
            self.cross_attention,
            sharing=self.decoder_sharing,
            cross_sharing=self.cross_sharing,
            shared_of_cross=self.shared_of_cross,
        )


def fewest(*limits: int | None) -> int | None:
    """The smallest of the limits that there are."""
    return min((limit for limit in limits if limit is not None), default=None)


def less_one(limit: int | None) -> int | None:
    """A limit of tokens where one more symbol takes a place: the end of a source, the beginning of a target."""
    return None if limit is None else limit - 1
