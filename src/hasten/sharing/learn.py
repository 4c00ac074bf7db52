"""The policy and the model learnt together: measure, choose who shares, train, and again until the choice stands."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hasten import spec as specs
from hasten.data.batch import Batch
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.models import GenerationModel
from hasten.nn.sharing import Shared, SourceMap
from hasten.sharing.divergence import Similarity, head_divergences, measure
from hasten.sharing.policy import blocks, source_map
from hasten.sharing.retrofit import Matching, best_order, retrofit, sites
from hasten.spec import RunSpec
from hasten.training import checkpoint
from hasten.training.card import read_metrics

SEARCHES: dict[str, Callable[[Any, float, int | None], SourceMap]] = {"blocks": blocks, "map": source_map}
START, ROUNDS, MODEL = "start", "rounds.jsonl", "model"
Maps = dict[str, SourceMap]
Train = Callable[[RunSpec, Path], GenerationModel]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How to choose who shares.

    thetas: the threshold of each kind of attention; kinds that are not named share nothing. form: "blocks" of adjacent
    layers, or a "map". largest: the most layers with one source. shared_of_cross: what is shared of attention over the
    source.
    """

    thetas: Mapping[str, float]
    form: str = "blocks"
    largest: int | None = None
    shared_of_cross: Shared = "output"

    def choose(self, similarities: Mapping[str, Similarity]) -> Maps:
        """The source map of every kind of attention; `UserError` for a threshold of a kind that there is not."""
        for kind in self.thetas:
            if kind not in similarities:
                raise UserError(f"a threshold for {kind!r}: the model's attention is {', '.join(similarities)}")
        search = SEARCHES[self.form]
        return {
            kind: search(own.mu, self.thetas[kind], self.largest)
            if kind in self.thetas
            else SourceMap.of((), len(own.mu), kind)
            for kind, own in similarities.items()
        }


def maps_of(model: GenerationModel) -> Maps:
    """Who shares in a model."""
    return {site.kind: site.plan for site in sites(model)}


def with_maps(spec: RunSpec, maps: Mapping[str, SourceMap], shared_of_cross: Shared = "output") -> RunSpec:
    """The run whose model shares so; maps where every layer computes its own are left out."""
    changes: dict[str, Any] = {}
    for kind, plan in maps.items():
        alone = all(plan.leads(layer) is plan.follows(layer) for layer in range(len(plan.sources)))
        changes[f"{kind}_sharing"] = () if alone else plan.numbers
    if "cross" in maps:
        changes["shared_of_cross"] = shared_of_cross
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, **changes))


def match_heads(model: GenerationModel, maps: Mapping[str, SourceMap], batches: Sequence[Batch]) -> Matching:
    """For every layer that is to follow, its heads in the order that reads most like its leader's heads."""
    orders: dict[tuple[str, int, int], list[int]] = {}
    for kind, plan in maps.items():
        for layer, source in enumerate(plan.sources):
            if layer != source:
                orders[kind, source, layer] = best_order(head_divergences(model, batches, kind, (source, layer)))
    return orders


def shared_model(
    model: GenerationModel, spec: RunSpec, vocab_size: int, matching: Matching | None = None
) -> GenerationModel:
    """A model of `spec`, which differs from `model` in who shares, with the weights of `model`; in eval mode."""
    with torch.random.fork_rng(devices=[]):
        new = spec.model.build(vocab_size)
    retrofit(model.cpu(), new, matching)
    return new.eval()


def write_model(directory: Path, spec: RunSpec, tokenizer: Tokenizer, model: GenerationModel) -> None:
    """A model directory that `hasten translate`, `evaluate`, `bench` and `train` take."""
    checkpoint.write_run(directory, spec, tokenizer)
    checkpoint.save_weights(directory / checkpoint.WEIGHTS, model.state_dict(), tokenizer)


@dataclass(frozen=True)
class Round:
    """One round: the policy that was chosen, how alike the layers were, and the scores after training with it."""

    number: int
    maps: dict[str, list[int]]
    similarity: dict[str, list[list[float]]]
    scores: dict[str, float]
    settled: bool


def learn(
    spec: RunSpec,
    model: GenerationModel,
    tokenizer: Tokenizer,
    batches: Sequence[Batch],
    policy: Policy,
    directory: Path,
    train: Train,
    *,
    round_steps: int,
    most_rounds: int,
    match: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Path:
    """Measure, choose, train for `round_steps`, and again until the policy stays; then train for all steps of `spec`.

    batches: what is measured on. `train(spec, directory)` trains a run there and returns its model. The policy and the
    scores of every round are a line of `rounds.jsonl`; its run is `round-N`. Returns the final model's directory.
    The policy of blocks settles by itself: layers that share attend alike (see `policy.blocks`). After `most_rounds`
    the last policy is kept, and said not to have settled.
    Source: Xiao et al., 2019, section 3.
    """
    maps = maps_of(model)
    for number in range(1, most_rounds + 1):
        similarities = measure(model.eval(), batches)
        chosen = policy.choose(similarities)
        settled = number > 1 and chosen == maps
        note(f"round {number}: " + "; ".join(f"{kind} {list(plan.numbers)}" for kind, plan in chosen.items()))
        scores: dict[str, float] = {}
        if not settled:
            own = with_maps(spec, chosen, policy.shared_of_cross)
            orders = match_heads(model, chosen, batches) if match else None
            model = shared_model(model, own, tokenizer.vocab_size, orders)
            here = directory / f"round-{number}"
            write_model(here / START, own, tokenizer, model)
            model = train(starting_at(own, here / START, round_steps), here / MODEL)
            scores, maps = _scores(here / MODEL), chosen
        _record(directory, number, chosen, similarities, scores, settled)
        if settled:
            break
    else:
        note(f"the policy did not settle in {most_rounds} rounds; the last one is kept")
    final, start = with_maps(spec, maps, policy.shared_of_cross), directory / START
    write_model(start, final, tokenizer, model)
    train(starting_at(final, start, spec.training.steps), directory / MODEL)
    return directory / MODEL


def starting_at(spec: RunSpec, start: Path, steps: int) -> RunSpec:
    """The run from these weights, with a validation at its end."""
    training = dataclasses.replace(
        spec.training,
        steps=steps,
        init_from=str(start),
        save_every=min(spec.training.save_every, steps),
        warmup=min(spec.training.warmup, steps // 4),
        validate_every=min(spec.training.validate_every, steps),
    )
    tokenizer = specs.TokenizerSpec(from_model=str(start), vocab_size=spec.tokenizer.vocab_size)
    return dataclasses.replace(spec, training=training, tokenizer=tokenizer)


def _scores(run: Path) -> dict[str, float]:
    rows = [row for row in read_metrics(run) if "valid_bleu" in row]
    return {name: row for name, row in (rows[-1] if rows else {}).items() if name.startswith("valid_")}


def _record(
    directory: Path,
    number: int,
    maps: Maps,
    similarities: Mapping[str, Similarity],
    scores: dict[str, float],
    settled: bool,
) -> None:
    row = Round(
        number,
        {kind: list(plan.numbers) for kind, plan in maps.items()},
        {kind: [list(line) for line in own.mu] for kind, own in similarities.items()},
        scores,
        settled,
    )
    try:
        with (directory / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {directory / ROUNDS}: {error.strerror}") from error
