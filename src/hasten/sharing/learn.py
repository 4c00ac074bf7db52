"""The policy and the model learnt together: measure, choose who shares, train, and again until the choice stands."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from hasten import spec as specs
from hasten.data.batch import Batch
from hasten.data.corpus import Corpus
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.models import GenerationModel
from hasten.nn.sharing import Shared, SourceMap
from hasten.sharing.divergence import Similarity, head_divergences, measure
from hasten.sharing.policy import blocks, source_map
from hasten.sharing.retrofit import Matching, best_order, retrofit, sites, with_maps
from hasten.spec import RunSpec
from hasten.training import checkpoint, state
from hasten.training.card import read_metrics

SEARCHES: dict[str, Callable[[Any, float, int | None], SourceMap]] = {"blocks": blocks, "map": source_map}
START, ROUNDS, MODEL = "start", "rounds.jsonl", "model"
BEGUN, HALF_BEGUN = "begun.json", "begun.partial"
_SHA = "sha256 "
Maps = dict[str, SourceMap]
Train = Callable[[RunSpec, Path, bool], object]
"""`train(spec, directory, resume)`: train a run there, or go on with the state that it holds, to the same result."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class Original:
    """The trained model whose layers are to share: its run, itself, and the sentences on which it is measured."""

    spec: RunSpec
    model: GenerationModel
    tokenizer: Tokenizer
    batches: Sequence[Batch]


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
    """A model directory that `hasten translate`, `evaluate`, `bench` and `train` take; on `UserError` none is left."""
    try:
        checkpoint.write_run(directory, spec, tokenizer)
        checkpoint.save_weights(directory / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
    except UserError:
        checkpoint.clear_run(directory)
        with suppress(OSError):  # it was never made, or holds more
            directory.rmdir()
        raise


@dataclass(frozen=True)
class Round:
    """One round: the policy that was chosen, how alike the layers were, and the scores after training with it.

    Where the policy settled there was nothing more to train.
    """

    number: int
    maps: dict[str, list[int]]
    similarity: dict[str, list[list[float]]]
    scores: dict[str, float]
    settled: bool

    @property
    def plans(self) -> Maps:
        """Who shares; `UserError` where the numbers are none of a source map."""
        return {kind: SourceMap.of(numbers, len(numbers), kind) for kind, numbers in self.maps.items()}


def learn(
    original: Original,
    policy: Policy,
    directory: Path,
    train: Train,
    *,
    round_steps: int,
    most_rounds: int,
    match: bool = False,
    note: Note = lambda text: None,
) -> Path:
    """Measure, choose, train for `round_steps`, and again until the policy stays; then train for all steps of the spec.

    The policy and the scores of every round are a line of `rounds.jsonl`; its run is `round-N`. Returns the final
    model's directory. Where an earlier call was interrupted, it goes on to the same result.
    The policy of blocks settles by itself: layers that share attend alike (see `policy.blocks`). After `most_rounds`
    the last policy is kept, and said not to have settled.
    Errors: `UserError` naming the settings that are not those of the earlier call, or the damaged file.
    Source: Xiao et al., 2019, section 3.
    """
    options = {"round_steps": round_steps, "rounds": most_rounds, "match_heads": match}
    thetas = {f"theta.{kind}": theta for kind, theta in policy.thetas.items()}
    settings = settings_of(original, policy, {"command": "train", **thetas, **options})
    going_on = check_begun(directory, settings)
    search = _Search(original, policy, directory, train, round_steps, match, note, settings)
    rounds = read_rounds(directory / ROUNDS) if going_on else []
    if going_on:
        note(f"going on with {directory} after {len(rounds)} finished rounds")
    while len(rounds) < most_rounds and not (rounds and rounds[-1].settled):
        rounds.append(search.next_round(rounds))
        lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in rounds]
        _write_whole(directory / ROUNDS, "".join(lines))
    if not rounds[-1].settled:
        note(f"the policy did not settle in {most_rounds} rounds; the last one is kept")
    return search.finish(rounds)


@final
@dataclass(frozen=True)
class _Search:
    """What all rounds have in common."""

    original: Original
    policy: Policy
    directory: Path
    train: Train
    round_steps: int
    match: bool
    note: Note
    settings: dict[str, Any]

    def next_round(self, rounds: Sequence[Round]) -> Round:
        """One more: the model of the last one measured and, unless the policy stays, trained with a new policy."""
        number, model = len(rounds) + 1, self._latest(rounds)
        similarities = measure(model, self.original.batches)
        maps = self.policy.choose(similarities)
        settled = bool(rounds) and maps == rounds[-1].plans
        self.note(f"round {number}: {described(maps)}")
        scores: dict[str, float] = {}
        if not settled:
            orders = match_heads(model, maps, self.original.batches) if self.match else None
            scores = _scores(self._trained(self.directory / f"round-{number}", model, maps, orders))
        return Round(
            number,
            {kind: list(plan.numbers) for kind, plan in maps.items()},
            {kind: [list(line) for line in own.mu] for kind, own in similarities.items()},
            scores,
            settled,
        )

    def finish(self, rounds: Sequence[Round]) -> Path:
        """The last policy's model, trained for all steps."""
        model = self._latest(rounds)
        spec = with_maps(self._run_of(model), rounds[-1].plans, self.policy.shared_of_cross)
        write_model(self.directory / START, spec, self.original.tokenizer, model)
        return train_from(self.directory, spec, spec.training.steps, self.original.tokenizer, self.train, self.note)

    def _latest(self, rounds: Sequence[Round]) -> GenerationModel:
        """As it is on disk: so what follows is the same whether the round was trained just now or long ago."""
        trained = [row.number for row in rounds if not row.settled]
        if not trained:
            return self.original.model.eval()
        return checkpoint.read_run(self.directory / f"round-{trained[-1]}" / MODEL)[2]

    def _run_of(self, model: GenerationModel) -> RunSpec:
        """The original run with the attention that `model` has, which earlier rounds may have changed."""
        names = {name for kind in maps_of(model) for name in (f"{kind}_attention", f"{kind}_sharing")}
        own = {name: value for name, value in vars(model.spec).items() if name in names}
        return dataclasses.replace(self.original.spec, model=dataclasses.replace(self.original.spec.model, **own))

    def _trained(self, here: Path, model: GenerationModel, maps: Maps, orders: Matching | None) -> Path:
        spec, tokenizer = with_maps(self._run_of(model), maps, self.policy.shared_of_cross), self.original.tokenizer
        shared = shared_model(model, spec, tokenizer.vocab_size, orders)
        begin(self.directory, self.settings)  # now that no mistake of the user's has come to light
        write_model(here / START, spec, tokenizer, shared)
        return train_from(here, spec, self.round_steps, tokenizer, self.train, self.note)


def described(maps: Maps) -> str:
    """Who shares, for people."""
    return "; ".join(f"{kind} {list(plan.numbers)}" for kind, plan in maps.items())


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


def train_from(here: Path, spec: RunSpec, steps: int, tokenizer: Tokenizer, train: Train, note: Note) -> Path:
    """Train from `start` to `model`, or go on with what is saved there of this very run; returns `model`."""
    run, own = here / MODEL, starting_at(spec, here / START, steps)
    saved = _saved(run, own, tokenizer)
    if saved is None and any((run / name).exists() for name in _STATES):
        note(f"{run}: the state saved there is damaged or another run's; this model is trained anew")
    train(saved or own, run, saved is not None)
    return run


_TEXTS = ("path", "distilled", "fertilities")
_STATES = (checkpoint.STATE, checkpoint.STATE + ".old")


def _saved(run: Path, spec: RunSpec, tokenizer: Tokenizer) -> RunSpec | None:
    """The run that has a whole state there, if it is `spec`; places are the same by whatever path."""
    held = next((run / name for name in _STATES if (run / name).exists()), None)
    if held is None:
        return None
    try:
        saved = specs.load(run / checkpoint.CONFIG)
        json.loads((held / "state.json").read_bytes())
        for name in (checkpoint.WEIGHTS, state.OPTIMIZER):
            checkpoint.read_weights(held / name, tokenizer)
    except (UserError, OSError, ValueError):
        return None
    training = dataclasses.replace(spec.training, init_from=saved.training.init_from)
    data = dataclasses.replace(spec.data, **{name: getattr(saved.data, name) for name in _TEXTS})
    same = dataclasses.replace(spec, training=training, tokenizer=saved.tokenizer, data=data)
    return dataclasses.replace(saved, data=spec.data) if saved == same else None


def _scores(run: Path) -> dict[str, float]:
    rows = [row for row in read_metrics(run) if "valid_bleu" in row]
    return {name: row for name, row in (rows[-1] if rows else {}).items() if name.startswith("valid_")}


def read_rounds(path: Path) -> list[Round]:
    """The finished rounds, without a last line that was cut off; `UserError` names a damaged one."""
    rounds: list[Round] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], 1):
        try:
            row = Round(**json.loads(line))
            _ = row.plans
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}, line {number}: this is no round; remove it and the lines after it") from error
        if row.number != number:
            raise UserError(f"{path}, line {number}: this is round {row.number}; remove it and the lines after it")
        rounds.append(row)
    return rounds


def settings_of(original: Original, policy: Policy, options: Mapping[str, Any]) -> dict[str, Any]:
    """All that the result depends on, by name: settings as they are, weights and text by their SHA-256."""
    sections = dataclasses.asdict(original.spec).items()
    data, tensors = original.spec.data, original.model.state_dict()
    text = json.dumps(Corpus.open(data.path).manifest, sort_keys=True).encode()
    for name, place in (("distilled", data.distilled), ("fertilities", data.fertilities)):
        try:
            text += b"" if place is None else Path(place).read_bytes()
        except OSError as error:
            references = " (the references will do: train.LANGUAGE of the data)" * (name == "distilled")
            raise UserError(
                f"cannot read data.{name} {place}, of the model itself: {error.strerror}; name what "
                f"it is to learn from, as in data.{name}=PATH{references}"
            ) from error
    named = {
        **options,
        **{name: getattr(policy, name) for name in ("form", "largest", "shared_of_cross")},
        **{f"{section}.{key}": value for section, table in sections for key, value in table.items()},
        "weights of the model": _sha(*(_bytes(tensors[name]) for name in sorted(tensors))),
        "tokenizer": _SHA + original.tokenizer.fingerprint,
        "sentences measured on": _sha(*(_bytes(ids) for own in original.batches for ids in (own.source, own.target))),
        "training text": _sha(text),
    }
    kept = {name: value for name, value in named.items() if name not in _PLACES}
    return json.loads(json.dumps(kept))  # as it will be read back: tuples are lists


_PLACES = ("data.path", "data.distilled", "data.fertilities", "tokenizer.from_model", "training.init_from")
"""Paths: another way to the same place, from another directory, changes nothing; what is there is compared."""


def _sha(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return _SHA + digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return str(tuple(tensor.shape)).encode() + tensor.detach().cpu().contiguous().numpy().tobytes()


def begin(directory: Path, settings: Mapping[str, Any]) -> None:
    """Note with what the work in `directory` began."""
    _write_whole(directory / BEGUN, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


def check_begun(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Whether work was begun in `directory`; `UserError` where it began with other settings, naming them."""
    path = directory / BEGUN
    if not path.exists():
        return False
    try:
        old: dict[str, Any] = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); choose another --out") from error
    names = [name for name in {**dict.fromkeys(old), **settings} if name not in _PLACES]
    changes = [_change(name, old, settings) for name in names if old.get(name, ...) != settings.get(name, ...)]
    if changes:
        told = ", ".join(changes)
        raise UserError(f"{directory} began with other settings: {told}; restore them or choose another --out")
    return True


def _change(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if any(str(settings.get(name)).startswith(_SHA) for settings in (old, new)):
        return f"{name} (changed)"
    words = {None: "none", True: "on", False: "off"}
    before, now = (
        (words[value] if value is None or isinstance(value, bool) else value)
        for value in (settings.get(name, "not given") for settings in (old, new))
    )
    return f"{name} {before} (now {now})"


def _write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
