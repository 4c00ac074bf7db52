"""The proof that a model in ONNX Runtime says what it says in PyTorch, or how much integer weights lose."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hasten.data.batch import pair_batch, source_batch
from hasten.data.tokenizer import EOS, Tokenizer
from hasten.decoding.dag_paths import ahead
from hasten.decoding.refine import Decoded, final, refine
from hasten.export.certificate import Mismatch
from hasten.export.onnx_models import Holdable, beta
from hasten.models.ctc import CTC
from hasten.models.dag import DAG
from hasten.runtime import engine
from hasten.runtime.settings import Settings

TOLERANCE = 1e-3
"""Largest difference of two log probabilities of a token, in float32."""
TIE = 1e-4
"""Two tokens whose log probabilities differ by less in PyTorch may change places, in float32."""
LIKENESS = 85.0
"""Least BLEU of the outputs of integer weights, measured against the outputs of PyTorch."""
LOSS = 1.0
"""Most BLEU that integer weights may lose against references."""
CERTIFICATE = "certificate.json"


@dataclass(frozen=True)
class OnnxCertificate:
    """What was compared and what differed.

    identical: sentences with equal outputs. ties: in float32, sentences whose outputs part at two tokens that are
    equally probable within `TIE`. largest_difference: of two log probabilities of the same token, over all tokens of
    identical outputs. likeness: BLEU of the outputs against those of PyTorch. bleu: against references, in PyTorch and
    in ONNX Runtime; None without references.
    """

    compute: str
    sentences: int
    tokens: int
    identical: int
    ties: int
    largest_difference: float
    likeness: float
    bleu: tuple[float, float] | None = None
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """Why the export is refused; nothing where it is not."""
        if not self.sentences:
            return "there was nothing to compare"
        if self.compute == "float32":
            if self.mismatches:
                first, count = self.mismatches[0], len(self.mismatches)
                return f"sentence {first.number} {first.text!r}: {first.reason} ({count} of {self.sentences} differ)"
            too_far = self.largest_difference > TOLERANCE
            return f"log probabilities differ by {self.largest_difference:.1e}" if too_far else ""
        if self.likeness < LIKENESS:
            return f"BLEU against the outputs of PyTorch is {self.likeness:.1f}, allowed {LIKENESS:.0f} or more"
        if self.bleu is not None and self.bleu[0] - self.bleu[1] > LOSS:
            return f"BLEU falls from {self.bleu[0]:.1f} to {self.bleu[1]:.1f}, allowed is a loss of {LOSS}"
        return ""

    @property
    def valid(self) -> bool:
        """Nothing differs that may not."""
        return not self.problem

    def __str__(self) -> str:
        if self.problem:
            return f"NOT certified ({self.compute}): {self.problem}"
        same = f"{self.identical} of {self.sentences} outputs identical" + (f", {self.ties} by ties" * bool(self.ties))
        parts = [f"certified ({self.compute}): {same}", f"log probabilities within {self.largest_difference:.1e}"]
        if self.compute != "float32":
            parts.append(f"BLEU against the outputs of PyTorch {self.likeness:.1f} (allowed {LIKENESS:.0f})")
        if self.bleu is not None:
            parts.append(f"BLEU {self.bleu[1]:.2f}, in PyTorch {self.bleu[0]:.2f}")
        return "; ".join(parts)

    def write(self, directory: Path) -> None:
        """Keep it beside the model."""
        bounds = {"tolerance": TOLERANCE, "tie": TIE, "likeness": LIKENESS, "loss": LOSS}
        found = {"valid": self.valid, "says": str(self), **asdict(self), "bounds": bounds}
        (directory / CERTIFICATE).write_text(json.dumps(found, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def certify(
    model: Holdable,
    tokenizer: Tokenizer,
    directory: str | Path,
    lines: Sequence[str],
    references: Sequence[str] | None = None,
) -> OnnxCertificate:
    """Decode every line that has text and is not too long, one at a time, with both engines; compare and count."""
    from hasten.training.metrics import quality

    settings = Settings.read(Path(directory))
    peer = engine.load(Path(directory), settings, 1)
    mismatches, tokens, identical, ties, worst = [], 0, 0, 0, 0.0
    texts: tuple[list[str], list[str]] = [], []
    kept = [i for i, line in enumerate(lines) if 0 < len(tokenizer.encode(line.strip())) <= settings.max_source_tokens]
    for i in kept:
        source = tokenizer.encode(lines[i].strip())
        [ours] = final(refine(model, *source_batch([source])), 1)
        [theirs] = peer.decode([source])
        ids = model.output_ids(ours.tokens)
        tokens += len(ids)
        for side, said in zip(texts, (ids, theirs.ids), strict=True):
            side.append(tokenizer.decode(said))
        if theirs.ids == ids:
            identical += 1
            worst = max(worst, _gap(ours, theirs))
        elif settings.compute == "float32" and _parting(model, peer, source, ids, theirs.ids) <= TIE:
            ties += 1
        else:
            reason = f"PyTorch says {texts[0][-1]!r}, ONNX Runtime {texts[1][-1]!r}"
            mismatches.append(Mismatch(i + 1, lines[i].strip(), reason))
    likeness, bleu = 0.0, None
    if kept:  # BLEU of texts of fewer than four words is 0, whatever they are compared with
        likeness = 100.0 if texts[0] == texts[1] else quality(texts[1], texts[0]).bleu
    if kept and references is not None:
        against = [references[i] for i in kept]
        bleu = quality(texts[0], against).bleu, quality(texts[1], against).bleu
    return OnnxCertificate(settings.compute, len(kept), tokens, identical, ties, worst, likeness, bleu, mismatches)


def _gap(ours: Decoded, theirs: engine.Decoded) -> float:
    """The largest difference of two log probabilities of a decision."""
    return max((abs(a - b) for a, b in zip(ours.scores, theirs.scores, strict=True)), default=0.0)


def _parting(model: Holdable, peer: engine.Engine, source: list[int], ours: list[int], theirs: list[int]) -> float:
    """How much less probable, in PyTorch, the first other decision is: 0 for a perfect tie."""
    import torch

    with torch.inference_mode():
        if isinstance(model, CTC):
            assert isinstance(peer, engine.OnePass)
            [(chosen, _)] = peer.frames([source])[0]
            [log_probs] = model.frame_log_probs(model.encode(*source_batch([source])))
            picked = log_probs.gather(1, torch.from_numpy(chosen)[:, None])[:, 0]
            return float((log_probs.max(1).values - picked).max())
        if isinstance(model, DAG):
            return _parting_ways(model, peer, source)
        pairs: Any = zip([*ours, EOS], [*theirs, EOS], strict=False)
        place, (own, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        log_probs = model.forced_log_probs(pair_batch([(source, ours[:place])]))[-1]
        return float(log_probs[own] - log_probs[other])


def _parting_ways(model: DAG, peer: engine.Engine, source: list[int]) -> float:
    """The same of a way through a graph of words: the most that a word on it, or an edge with its word, falls short."""
    import torch

    assert isinstance(peer, engine.OneWay)
    [((tokens, _), visited, _)] = peer.ways([source])
    memory = model.encode(*source_batch([source]))
    graph = model.graph(memory, model.inputs(memory))
    log_probs = model.logits(graph.states[0]).float().log_softmax(-1)
    best = (log_probs + model.banned).max(1).values
    way = torch.from_numpy(visited)
    picked = log_probs[way, torch.from_numpy(tokens)[way]]
    [edges] = ahead(graph.links, best[None], graph.vertices, beta(model))
    stops = [0, *visited.tolist(), len(best) - 1]
    short = [float(edges[v].max() - edges[v, u]) for v, u in pairwise(stops)]
    return max([*short, *(best[way] - picked).tolist()])
