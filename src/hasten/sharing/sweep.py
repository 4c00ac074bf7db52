"""Who shares, as the threshold falls: the time of decoding against the quality."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hasten.errors import UserError
from hasten.models import GenerationModel
from hasten.sharing.divergence import Similarity, measure
from hasten.sharing.learn import (
    START,
    Maps,
    Note,
    Original,
    Policy,
    Train,
    begin,
    check_begun,
    described,
    maps_of,
    match_heads,
    settings_of,
    shared_model,
    train_from,
    with_maps,
    write_model,
)
from hasten.sharing.retrofit import Matching
from hasten.sharing.sample import spread
from hasten.spec import RunSpec


@dataclass(frozen=True)
class Point:
    """One model of a sweep.

    theta: the largest threshold that gives its policy, None for the original. milliseconds: the median of a sentence
    alone. sentences_per_second: in batches of 32. front: no other model is both faster and better by chrF.
    """

    label: str
    theta: float | None
    maps: dict[str, list[int]]
    milliseconds: float
    sentences_per_second: float
    bleu: float
    chrf: float
    front: bool = False


Made = list[tuple[float, Maps, Path]]


def models(
    original: Original,
    thetas: Sequence[float],
    kinds: Sequence[str],
    policy: Policy,
    directory: Path,
    train: Train | None,
    *,
    steps: int,
    match: bool,
    note: Note,
) -> Made:
    """A model directory for each different policy, trained for `steps` where `train` is given.

    Every threshold is that of all `kinds`; `policy` says the rest. Where an earlier call was interrupted, it goes on to
    the same models. Errors: `UserError` where nothing is shared at all, or that call had other settings.
    """
    options = {"command": "sweep", "thetas": thetas, "kinds": kinds, "steps": steps, "match_heads": match}
    settings = settings_of(original, policy, options)
    check_begun(directory, settings)
    policies = {theta: replace(policy, thetas=dict.fromkeys(kinds, theta)) for theta in thetas}
    chosen = _different(original, policies, measure(original.model.eval(), original.batches))
    orders: dict[float, Matching | None] = {}
    for theta, maps in chosen.items():  # what cannot be built is told before anything is written or trained
        orders[theta] = match_heads(original.model, maps, original.batches) if match else None
        _shared(original, policy, maps, orders[theta])
    begin(directory, settings)
    made: Made = []
    for theta, maps in chosen.items():
        note(f"theta {theta:g}: {described(maps)}")
        here = directory / f"theta-{_name(theta)}"
        spec, model = _shared(original, policy, maps, orders[theta])
        write_model(here if train is None else here / START, spec, original.tokenizer, model)
        if train is not None:
            here = train_from(here, spec, steps, original.tokenizer, train, note)
        made.append((theta, maps, here))
    return made


def _shared(original: Original, policy: Policy, maps: Maps, orders: Matching | None) -> tuple[RunSpec, GenerationModel]:
    spec = with_maps(original.spec, maps, policy.shared_of_cross)
    return spec, shared_model(original.model, spec, original.tokenizer.vocab_size, orders)


def _different(
    original: Original, policies: Mapping[float, Policy], similarities: Mapping[str, Similarity]
) -> dict[float, Maps]:
    """The policies that are neither the original's nor an earlier threshold's."""
    chosen: dict[float, Maps] = {}
    for theta, policy in policies.items():
        maps = policy.choose(similarities)
        if maps != maps_of(original.model) and maps not in chosen.values():
            chosen[theta] = maps
    if not chosen:
        raise UserError("no threshold makes any layers share; give lower ones, see `hasten share analyse`")
    return chosen


def _name(theta: float) -> str:
    return repr(theta).removesuffix(".0")


def timed(original: str, made: Made, data: Path, sentences: int, threads: int, repeats: int, note: Note) -> list[Point]:
    """All models and the original, timed side by side on held-out sentences."""
    import hasten
    from hasten.bench import decode
    from hasten.bench.contestant import Contestant, told_apart
    from hasten.data.corpus import Corpus

    pairs = spread(*Corpus.open(data).pairs("valid"), sentences)
    sources, references = (list(side) for side in zip(*pairs, strict=True))
    names = [original, *(str(path) for _, _, path in made)]
    entries = told_apart([Contestant(name) for name in names])
    ready = []
    for entry in entries:
        loaded = hasten.load(entry.model).model
        ready.append(replace(entry, parameters=sum(p.numel() for p in loaded.parameters())))
    rows = decode.run(decode.Plan(ready, sources, references, f"{data.name} valid", (threads,), repeats), note)
    facts = [(None, maps_of(hasten.load(original).model)), *((theta, maps) for theta, maps, _ in made)]
    points = [
        Point(
            "original" if theta is None else f"theta {theta:g}",
            theta,
            {kind: list(plan.numbers) for kind, plan in maps.items()},
            row["latency_ms"]["median"],
            row["sentences_per_second"],
            row["quality"]["bleu"],
            row["quality"]["chrf"],
        )
        for row, (theta, maps) in zip(rows, facts, strict=True)
    ]
    return front(points)


def front(points: Sequence[Point]) -> list[Point]:
    """The points with those marked that no other one beats: at least as fast and as good, and better in one."""

    def beaten(own: Point) -> bool:
        return any(
            (other.milliseconds <= own.milliseconds and other.chrf >= own.chrf)
            and (other.milliseconds, other.chrf) != (own.milliseconds, own.chrf)
            for other in points
        )

    return [Point(**{**asdict(point), "front": not beaten(point)}) for point in points]


def markdown(points: Sequence[Point]) -> str:
    """A table; those on the Pareto front are marked."""
    base = next(point for point in points if point.theta is None)
    lines = [
        "| | Who computes | ms a sentence | Faster | Sentences/s | BLEU | chrF | Pareto |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for point in points:
        maps = "; ".join(f"{kind} {numbers}" for kind, numbers in point.maps.items())
        faster = base.milliseconds / point.milliseconds
        lines.append(
            f"| {point.label} | {maps} | {point.milliseconds:.1f} | {faster:.2f} | {point.sentences_per_second:.0f} "
            f"| {point.bleu:.1f} | {point.chrf:.1f} | {'front' if point.front else ''} |"
        )
    return "\n".join(lines) + "\n"


def write(points: Sequence[Point], path: Path) -> None:
    """The rows as JSON lines."""
    try:
        path.write_text("".join(json.dumps(asdict(point)) + "\n" for point in points), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def picture(points: Sequence[Point], path: Path) -> None:
    """Quality against time, the front joined by a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    best = sorted((point for point in points if point.front), key=lambda point: point.milliseconds)
    axes.plot([p.milliseconds for p in best], [p.chrf for p in best], color="#bbbbbb", zorder=1)
    for point in points:
        axes.scatter(point.milliseconds, point.chrf, color="#00695c" if point.front else "#b0bec5", zorder=2)
        axes.annotate(point.label, (point.milliseconds, point.chrf), xytext=(6, 4), textcoords="offset points")
    axes.set_xlabel("milliseconds a sentence, median")
    axes.set_ylabel("chrF")
    axes.set_title("Shared attention: quality against time")
    axes.margins(0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
