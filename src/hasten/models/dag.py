"""DAG: the directed acyclic Transformer, which says a graph of words at once and reads one way through it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.data.batch import Batch, pad
from hasten.data.tokenizer import PAD, PLACEHOLDER
from hasten.decoding.beam import Hypothesis, length_normalised
from hasten.decoding.dag_beam import prefix_beam_search
from hasten.decoding.dag_loss import best_path, dag_loss, inner, words_carried
from hasten.decoding.dag_paths import greedy, lookahead, viterbi
from hasten.errors import NOT_FINITE, UserError
from hasten.fields import Factor, PositiveInt, Share, Spec
from hasten.models.base import Canvas, Edit, Memory, ObserveAttention, reported
from hasten.models.encoder_decoder import EncoderDecoderSpec, fewest, less_one
from hasten.models.tied import Tied
from hasten.nn.draws import row_draws
from hasten.nn.glancing import share_at, shown
from hasten.nn.links import Links
from hasten.nn.loss import LossTerm
from hasten.nn.parallel import ParallelDecoder
from hasten.nn.stack import Observer, unobserved
from hasten.nn.words import EveryFrame, FrameWords, ListedFrames


@dataclass(frozen=True, kw_only=True)
class DAGDecoding(Spec):
    """How a way through the graph is found. None of it touches the weights."""

    method: Literal["greedy", "lookahead", "viterbi", "beam"] = "lookahead"
    """By the best edge, the best edge with its word, the best path of all, or the best output over all its paths."""
    beta: Factor = 1.0
    """Lookahead: the weight of a word's log probability beside that of the edge to it."""
    length_power: Annotated[float, Ge(0), Le(8)] = 1.0
    """Viterbi and beam rank by log probability / words ** length_power: 0 favours short outputs, 1 none."""
    beam: PositiveInt = 20
    """Beginnings that the method `beam` keeps."""


@dataclass(frozen=True, kw_only=True)
class DAGSpec(EncoderDecoderSpec):
    """A one-pass model: encode, say a graph of words, take one way through it."""

    kind: Literal["dag"] = "dag"
    """The model's name."""
    label_smoothing: Share = 0.0
    """Weight of the distance between a vertex's distribution and the uniform one."""
    upsample: PositiveInt = 8
    """Vertices per source token, its end symbol counted; a pair can be learnt if vertices >= target tokens + 2."""
    decoder_input: Literal["placeholder", "copy"] = "placeholder"
    """What vertices read: one embedding for all, told apart by position, or the state of their source token."""
    glancing_start: Share = 0.5
    """Share of wrongly predicted words of the best path that are shown, at the start of the run; 0 turns it off."""
    glancing_end: Share = 0.1
    """The same share at the end of the run; linear in between, so the schedule fits every run length."""

    decoding: DAGDecoding = field(default_factory=DAGDecoding)
    """How a way through the graph is found."""

    def build(self, vocab_size: int) -> "DAG":
        """A model with fresh weights."""
        return DAG(self, vocab_size)

    def learnable(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether a path through the graph of `source` (its end symbol counts) can say `target`."""
        return len(target) <= words_carried(self.upsample * (len(source) + 1))


@dataclass(frozen=True)
class Visited:
    """For the words on a canvas (B, T): True where the chosen path goes."""

    on: Bool[Tensor, "B T"]

    def select(self, rows: Tensor) -> "Visited":
        """Batch rows by index."""
        return Visited(self.on.index_select(0, rows))


@dataclass(frozen=True)
class Graph:
    """What the decoder says: states (B, L, D) of the vertices, links (B, L, L) log E(v, u), mask (B, L) real ones."""

    states: Float[Tensor, "B L D"]
    links: Float[Tensor, "B L L"]
    mask: Bool[Tensor, "B L"]

    @property
    def vertices(self) -> Int[Tensor, "B"]:
        """Real vertices of each row, both ends counted."""
        return self.mask.sum(1)


class DAG(Tied):
    """p(y | x) = sum over paths a of prod_i E(a_(i-1), a_i) P(y_i | a_i), in a graph of `upsample` vertices a token.

    The first vertex begins every path, the last ends it; both are silent, so that no special symbol is ever said, an
    output may be empty, and one word needs no more room than one vertex. The paper's begin and end symbols, said with
    probability 1, are the same. Edges lead to later vertices only. Training sums all paths (`dag_loss`) and shows the
    model a share of the words it gets wrong on the best one (glancing). A path may say the same word twice in a row.
    Source: Huang et al., 2022, "Directed Acyclic Transformer for Non-Autoregressive Machine Translation". Layers are
    pre-norm and positions sinusoids, where the paper's are post-norm and learnt.
    """

    def __init__(self, spec: DAGSpec, vocab_size: int):
        super().__init__(spec, vocab_size)
        self.encoder = spec.encoder()
        self.decoder = spec.decoder(ParallelDecoder)
        self.links = Links(spec.d_model, spec.n_heads)
        vertices = self.decoder.longest and self.decoder.longest // spec.upsample
        self.longest = less_one(fewest(self.encoder.longest, self.decoder.longest_memory, vertices))
        self.edits = (Edit("fill", self._fill), Edit("collapse", self._collapse))
        self.glancing = spec.glancing_start
        self._inputs = INPUTS[spec.decoder_input]
        self._route = _routes(self)[spec.decoding.method]

    def inputs(self, memory: Memory) -> Float[Tensor, "B L D"]:
        """What the vertices read, positions not yet added."""
        return self._inputs(self.look_up, memory, self.spec.upsample)

    def graph(self, memory: Memory, inputs: Float[Tensor, "B L D"], observe: Observer = unobserved) -> Graph:
        """The graph of each row, out of what its vertices read."""
        mask = memory.mask.repeat_interleave(self.spec.upsample, dim=1)
        states = self.decoder(self.placed(inputs), mask, memory.states, memory.mask, observe)
        return Graph(states, self.links(self.positions(states), mask), mask)

    def attentions(self, batch: Batch, observe: ObserveAttention) -> None:
        """Of the "encoder", of the "decoder" over the vertices, and "cross"; the target is not read."""
        memory = self.encode(batch.source, batch.source_mask, reported(observe, {"self": "encoder"}, batch.source_mask))
        mask = memory.mask.repeat_interleave(self.spec.upsample, dim=1)
        told = reported(observe, {"self": "decoder", "cross": "cross"}, mask)
        self.graph(memory, self.inputs(memory), told)

    def progress(self, fraction: float) -> None:
        """Move the glancing share along its schedule."""
        self.glancing = share_at(fraction, self.spec.glancing_start, self.spec.glancing_end)

    def loss(self, batch: Batch, generator: torch.Generator) -> dict[str, LossTerm]:
        """-log p(y | x) per decision, which are the words and the end; infeasible rows count and give nothing."""
        memory, lengths = self.encode(batch.source, batch.source_mask), batch.target_mask.sum(1)
        inputs = self.inputs(memory)
        if self.training and self.glancing > 0:
            inputs = self._glance(memory, inputs, batch, generator)
        graph = self.graph(memory, inputs)
        normaliser = self._normaliser(graph, memory)
        losses = dag_loss(self._emissions(graph, normaliser, batch.target), graph.links, graph.vertices, lengths)
        possible = losses.isfinite()
        terms = {"dag": LossTerm(losses[possible].sum(), (lengths + 1)[possible].sum(), 1 - self.spec.label_smoothing)}
        if self.spec.label_smoothing:
            words = inner(graph.vertices, graph.mask.shape[1])
            mean = F.linear(graph.states, self.embedding.weight.mean(0, keepdim=True))[..., 0].float()
            distance = (normaliser - mean)[words].sum()
            terms["smoothing"] = LossTerm(distance, words.sum(), self.spec.label_smoothing)
        return terms

    def keep_to(self, memory: Memory, lists: Sequence[Int[Tensor, "_"]]) -> Memory:
        """With each row's output limited to its list."""
        return replace(memory, words=ListedFrames.of(self.embedding.weight, self.banned, lists))

    def _words(self, memory: Memory) -> FrameWords:
        return memory.words if isinstance(memory.words, FrameWords) else EveryFrame(self.logits, self.banned)

    def _normaliser(self, graph: Graph, memory: Memory) -> Float[Tensor, "B L"]:
        """log sum over y of exp score(y | u), in float32; 0 at padding."""
        sums = self._words(memory).normaliser(graph.states[graph.mask], graph.vertices.tolist())
        return torch.zeros(graph.mask.shape, device=sums.device).masked_scatter(graph.mask, sums)

    def _emissions(
        self, graph: Graph, normaliser: Float[Tensor, "B L"], target: Int[Tensor, "B U"]
    ) -> Float[Tensor, "B U L"]:
        """log P(y_i | u); the scores of the target's words alone are formed."""
        scores = self.embedding(target) @ graph.states.transpose(1, 2)
        return scores.float() - normaliser[:, None]

    def _glance(
        self, memory: Memory, inputs: Float[Tensor, "B L D"], batch: Batch, generator: torch.Generator
    ) -> Float[Tensor, "B L D"]:
        """Inputs, some of them replaced by the word that their vertex should say.

        The vertices are those of the target's best path; of its words that their vertices would not say the share
        `glancing` is counted, and as many are drawn, uniformly over all words.
        """
        with torch.no_grad():
            graph = self.graph(memory, inputs)
            emissions = self._emissions(graph, self._normaliser(graph, memory), batch.target)
            path = best_path(emissions, graph.links, graph.vertices, batch.target_mask.sum(1))
            real = batch.target_mask & inner(graph.vertices, graph.mask.shape[1]).gather(1, path)
            states = graph.states.gather(1, path[..., None].expand(-1, -1, graph.states.shape[2]))
            wrong = ((self.logits(states) + self.banned).argmax(-1) != batch.target) & real
            told = shown(wrong, real, self.glancing, row_draws(batch.target_mask, generator, 0)[1])
        # What is not shown goes to the first vertex, which is then left as it was.
        place = path.masked_fill(~told, 0)
        tokens = torch.full_like(graph.mask, PAD, dtype=torch.int64).scatter(1, place, batch.target)
        seen = torch.zeros_like(graph.mask).scatter(1, place, value=True) & inner(graph.vertices, graph.mask.shape[1])
        return torch.where(seen[..., None], self.look_up(tokens), inputs)

    def start(self, memory: Memory) -> Canvas:
        """A placeholder for every vertex that can say a word."""
        mask = memory.mask.repeat_interleave(self.spec.upsample, dim=1)
        words = inner(mask.sum(1), mask.shape[1])[:, 1:-1]
        tokens = torch.where(words, PLACEHOLDER, PAD)
        none = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return Canvas(tokens, torch.zeros(tokens.shape, device=tokens.device), none, Visited(torch.zeros_like(words)))

    def limit(self, memory: Memory) -> Int[Tensor, "B"]:
        """The most words that Viterbi and beam search look for in each row; it depends on the row's source alone."""
        return 2 * memory.lengths + 20

    def _fill(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        """Every vertex says its most probable word, those that are visited say that of their path.

        Scores are log probabilities: of the word; on the path also of the edge to it and, at its last vertex, of that
        to the end, so that they sum to the path's.
        """
        graph = self.graph(memory, self.inputs(memory))
        visited, words, tokens = self._route(graph, memory, *self._said(graph, memory))
        scores = words + _edges(graph.links, visited, graph.vertices)
        real = inner(graph.vertices, graph.mask.shape[1])
        tokens, scores = tokens.masked_fill(~real, PAD), scores.masked_fill(~real, 0.0)
        return Canvas(tokens[:, 1:-1], scores[:, 1:-1], canvas.done, Visited(visited[:, 1:-1]))

    def _said(self, graph: Graph, memory: Memory) -> tuple[Float[Tensor, "B L"], Int[Tensor, "B L"]]:
        """Each vertex's most probable word that is text: its log probability, and which; 0 and PAD at padding."""
        words = torch.zeros(graph.mask.shape, device=graph.mask.device)
        tokens = torch.full_like(graph.mask, PAD, dtype=torch.int64)
        best, ids = self._words(memory).best(graph.states[graph.mask], graph.vertices.tolist())
        return words.masked_scatter(graph.mask, best), tokens.masked_scatter(graph.mask, ids)

    def _collapse(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        """The words on the path stay."""
        on = canvas.cache.on
        tokens, scores = (_packed(x, on) for x in (canvas.tokens, canvas.scores))
        return Canvas(tokens, scores, torch.ones_like(canvas.done))

    def stopped(self, before: Canvas, after: Canvas, memory: Memory, iteration: int) -> Bool[Tensor, "B"]:
        """Every row, after one pass."""
        return after.done

    def candidates(self, memory: Memory, *, beam: int, n_best: int) -> list[list[Hypothesis]]:
        """The `n_best` outputs of each row by beam search, which sums all paths of an output."""
        return self._searched(self.graph(memory, self.inputs(memory)), memory, beam, n_best)

    def _searched(self, graph: Graph, memory: Memory, beam: int, n_best: int) -> list[list[Hypothesis]]:
        if graph.states.isnan().any() or graph.links.isnan().any():
            raise UserError(NOT_FINITE)
        results, power = [], self.spec.decoding.length_power
        for row, (n, limit) in enumerate(zip(graph.vertices.tolist(), self.limit(memory).tolist(), strict=True)):
            own = self._words(memory).select(torch.tensor([row]))
            words = own.log_probs(graph.states[row, :n], [n])
            links = graph.links[row, :n, :n]
            found = prefix_beam_search(words, links, beam=beam, limit=limit, n_best=n_best, length_power=power)
            results.append([Hypothesis(list(y), total, length_normalised(total, len(y), power)) for y, total in found])
        return results


Inputs = Callable[[Callable[[Tensor], Tensor], Memory, int], Tensor]


def _placeholder(look_up: Callable[[Tensor], Tensor], memory: Memory, upsample: int) -> Tensor:
    one = look_up(torch.tensor([[PLACEHOLDER]], device=memory.mask.device))
    return one.expand(len(memory.mask), upsample * memory.mask.shape[1], -1)


def _copy(look_up: Callable[[Tensor], Tensor], memory: Memory, upsample: int) -> Tensor:
    return memory.states.repeat_interleave(upsample, dim=1)


INPUTS: dict[str, Inputs] = {"placeholder": _placeholder, "copy": _copy}

Route = Callable[[Graph, Memory, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Of a graph and its vertices' best words, log probabilities and ids (B, L): which vertices are visited, and the words
again, on the path perhaps others."""


def _routes(model: DAG) -> dict[str, Route]:
    decoding = model.spec.decoding

    def along(choose: Callable[[Graph, Memory, Tensor], Tensor]) -> Route:
        return lambda graph, memory, words, tokens: (choose(graph, memory, words), words, tokens)

    ahead = partial(lookahead, beta=decoding.beta)
    return {
        "greedy": along(lambda graph, _, words: greedy(graph.links, words, graph.vertices)),
        "lookahead": along(lambda graph, _, words: ahead(graph.links, words, graph.vertices)),
        "viterbi": along(
            lambda graph, memory, words: viterbi(
                graph.links, words, graph.vertices, model.limit(memory), decoding.length_power
            )
        ),
        "beam": partial(_most_probable, model),
    }


def _most_probable(
    model: DAG, graph: Graph, memory: Memory, words: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The best path of the output that beam search finds, and its words there."""
    found = model._searched(graph, memory, model.spec.decoding.beam, 1)
    target, mask = (x.to(words.device) for x in pad([best[0].tokens if best else [] for best in found]))
    emissions = model._emissions(graph, model._normaliser(graph, memory), target)
    path = best_path(emissions, graph.links, graph.vertices, mask.sum(1))
    said = emissions.gather(2, path[..., None])[..., 0]
    visited = torch.zeros_like(graph.mask).scatter(1, path, value=True) & inner(graph.vertices, graph.mask.shape[1])
    # Padding of the path points at the first vertex, which says nothing.
    return visited, words.scatter(1, path, said), tokens.scatter(1, path, target)


def _edges(
    links: Float[Tensor, "B L L"], visited: Bool[Tensor, "B L"], vertices: Int[Tensor, "B"]
) -> Float[Tensor, "B L"]:
    """At every visited vertex log E of the edge to it and, at the last, of that to the end; 0 elsewhere."""
    places = torch.arange(visited.shape[1], device=visited.device)
    latest = torch.where(visited, places, 0).cummax(1).values
    before = F.pad(latest, (1, 0))[:, :-1]
    into = links.gather(1, before[:, None])[:, 0]
    end = (vertices - 1)[:, None]
    out = links.gather(2, end[..., None].expand(-1, links.shape[1], 1))[..., 0]
    last = visited & (places == latest[:, -1:])
    return torch.where(visited, into, 0.0) + torch.where(last, out, 0.0)


def _packed(x: Any, on: Bool[Tensor, "B T"]) -> Any:
    """What stands at True, moved to the left; zeros (PAD) after it."""
    n = on.sum(1)
    slots = torch.where(on, on.cumsum(1) - 1, on.shape[1])
    kept = x.new_zeros(len(x), on.shape[1] + 1).scatter(1, slots, x)
    kept = kept[:, : int(n.max()) if len(n) else 0]
    return kept.masked_fill(torch.arange(kept.shape[1], device=x.device) >= n[:, None], 0)
