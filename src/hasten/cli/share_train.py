"""hasten share retrofit, train and sweep: models whose layers share attention."""

import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hasten.cli.limits import MOST_THREADS
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.data.batch import Pair
    from hasten.sharing.learn import Original, Policy, Train
    from hasten.spec import RunSpec
    from hasten.training.loop import Task
    from hasten.translator import Translator

Model = Annotated[str, typer.Option(help="A bundled model, a run directory or a hub id.", show_default=False)]
Data = Annotated[Path, typer.Option(help="A data directory by `hasten data`.", show_default=False)]
Theta = Annotated[
    float | None,
    typer.Option(help="Layers of the decoder (or refiner) more alike than this share.", show_default=False),
]
ThetaCross = Annotated[float | None, typer.Option(help="The same for attention over the source.", show_default=False)]
ThetaEncoder = Annotated[float | None, typer.Option(help="The same for the encoder.", show_default=False)]
Largest = Annotated[
    int | None, typer.Option(min=1, help="The most layers that share one attention.", show_default=False)
]
Form = Annotated[Literal["blocks", "map"], typer.Option(help="Adjacent layers, or each the most similar earlier one.")]
SharedOfCross = Annotated[
    Literal["output", "context", "weights"], typer.Option(help="What is shared of attention over the source.")
]
Match = Annotated[bool, typer.Option("--match-heads/--no-match-heads", help="Put heads in the order of the leader's.")]
Sentences = Annotated[int, typer.Option(min=1, help="How many validation sentences are measured on.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="training.KEY=value and data.KEY=value in TOML notation.", show_default=False),
]
Distillation = Annotated[
    float,
    typer.Option(min=0, max=1, help="Weight of the words that --model would say itself; 0: learn from the text alone."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with what an interrupted call left in --out, to the same result.")
]
Threads = Annotated[int | None, typer.Option(min=1, max=MOST_THREADS, help="CPU threads; all.", show_default=False)]
_SECTIONS = ("training", "data")


def retrofit(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Run directory of the new model.", show_default=False)],
    theta: Theta = None,
    theta_cross: ThetaCross = None,
    theta_encoder: ThetaEncoder = None,
    largest: Largest = None,
    form: Form = "blocks",
    shared_of_cross: SharedOfCross = "output",
    match_heads: Match = True,
    sentences: Sentences = 500,
    threads: Threads = None,
) -> None:
    """Let the layers of a trained model share attention, and keep all its other weights.

    Without more training it translates worse: go on with `hasten train OUT/config.toml tokenizer.from_model=OUT
    training.init_from=OUT`, best on the model's own translations (`hasten distill`). Kinds of attention without a
    threshold share nothing.

    Example: hasten share retrofit --model en-de-teacher --data data/en-de --theta 0.5 --theta-cross 0.5 --out shared
    """
    from hasten.sharing.divergence import measure
    from hasten.sharing.learn import match_heads as matched
    from hasten.sharing.learn import shared_model, with_maps, write_model

    thetas = given(theta, theta_cross, theta_encoder)
    _claim(out)
    translator, spec = _load(model, threads)
    policy = _policy(translator, thetas, largest, form, shared_of_cross)
    original = _original(translator, spec, data, sentences)
    maps = policy.choose(measure(original.model, original.batches))
    orders = matched(original.model, maps, original.batches) if match_heads else None
    own = with_maps(spec, maps, shared_of_cross)
    shared = shared_model(original.model, own, original.tokenizer.vocab_size, orders)
    write_model(out, own, original.tokenizer, shared)
    for kind, plan in maps.items():
        typer.echo(f"{kind}: {list(plan.numbers)}", err=True)
    typer.echo(str(out))


def train(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Directory of the rounds and of the final model.", show_default=False)],
    overrides: Overrides = None,
    theta: Theta = None,
    theta_cross: ThetaCross = None,
    theta_encoder: ThetaEncoder = None,
    largest: Largest = None,
    form: Form = "blocks",
    shared_of_cross: SharedOfCross = "output",
    match_heads: Match = False,
    sentences: Sentences = 500,
    distillation: Distillation = 0.0,
    round_steps: Annotated[int, typer.Option(min=1, help="Updates of each round.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="The most rounds.")] = 5,
    resume: Resume = False,
    threads: Threads = None,
) -> None:
    """Learn who shares together with the model: measure, choose, train, until the choice stands; then train to the end.

    The settings are those of the model's own run; change them with overrides (training.steps are those of the last
    part). OUT/model is the result, OUT/rounds.jsonl says of each round who shared and how well it translated. With
    --distillation it learns from what the model would have said before it shared, at every word. After an interruption
    the same command with --resume goes on.

    Example: hasten share train --model en-de-teacher --data data/en-de --theta 0.5 --theta-cross 0.5 --out shared
    training.steps=2000 training.learning_rate=0.0007
    """
    from hasten.sharing.learn import learn
    from hasten.training import memory

    thetas = given(theta, theta_cross, theta_encoder)
    with _resumable(out, resume):
        translator, spec = _load(model, threads)
        policy = _policy(translator, thetas, largest, form, shared_of_cross)
        taught = _taught(spec, model, distillation)
        original = _original(translator, _overridden(taught, data, overrides or []), data, sentences)
        memory.keep_freed_memory()
        found = learn(
            original,
            policy,
            out,
            _trainer(translator, original.spec),
            round_steps=round_steps,
            most_rounds=rounds,
            match=match_heads,
            note=_say,
        )
    typer.echo(str(found))


def sweep(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Directory of the models, the rows and the picture.", show_default=False)],
    thetas: Annotated[str, typer.Option(help="Thresholds, comma-separated, for all kinds named by --kinds.")] = (
        "0.9,0.8,0.7,0.6,0.5"
    ),
    kinds: Annotated[str, typer.Option(help="Which attention shares: decoder, cross, encoder, refiner.")] = (
        "decoder,cross"
    ),
    overrides: Overrides = None,
    largest: Largest = None,
    form: Form = "blocks",
    shared_of_cross: SharedOfCross = "output",
    match_heads: Match = True,
    sentences: Sentences = 200,
    distillation: Distillation = 0.0,
    steps: Annotated[int, typer.Option(min=0, help="Updates of each model before it is judged; 0: none.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of timing; medians are kept.")] = 3,
    resume: Resume = False,
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads.")] = 1,
) -> None:
    """Measure decoding time and quality against the threshold, and name the models that no other one beats in both.

    Each policy that the thresholds give becomes a model (after --steps updates, if any), and all are timed side by side
    with the original, as `hasten bench decode` does.

    Example: hasten share sweep --model en-de-teacher --data data/en-de --thetas 0.6,0.55,0.5 --steps 300 --out sweep
    """
    from hasten.cli.bench import warn_if_busy
    from hasten.cli.files import write_text
    from hasten.sharing import sweep as sweeping
    from hasten.sharing.learn import Policy

    thresholds, names = _numbers(thetas), _names(kinds)
    with _resumable(out, resume):
        translator, spec = _load(model, threads)
        taught = _taught(spec, model, distillation)
        original = _original(translator, _overridden(taught, data, overrides or []), data, sentences)
        policy = Policy(thetas={}, form=form, largest=largest, shared_of_cross=shared_of_cross)
        trainer = _trainer(translator, original.spec) if steps else None
        made = sweeping.models(
            original, thresholds, names, policy, out, trainer, steps=steps, match=match_heads, note=_say
        )
        warn_if_busy()
        rows = sweeping.timed(model, made, data, sentences, threads, repeats, _say)
        write_text(out / "sweep.md", sweeping.markdown(rows))
        sweeping.write(rows, out / "sweep.jsonl")
        sweeping.picture(rows, out / "sweep.png")
    typer.echo(sweeping.markdown(rows))


def _say(text: str) -> None:
    typer.echo(text, err=True)


def given(theta: float | None, cross: float | None, encoder: float | None) -> dict[str, float]:
    """The thresholds that were given, by kind; "own" is the decoder or the refiner."""
    named = {"own": theta, "cross": cross, "encoder": encoder}
    given = {name: value for name, value in named.items() if value is not None}
    if not given:
        raise UserError("no threshold: give --theta, --theta-cross or --theta-encoder, for example --theta 0.6")
    for name, value in given.items():
        if not math.isfinite(value):
            option = "--theta" if name == "own" else f"--theta-{name}"
            raise UserError(f"{option}: the theta is {value}; give a number, for example 0.6 (2: none share, -1: all)")
    return given


def _policy(
    translator: "Translator", thetas: dict[str, float], largest: int | None, form: str, shared_of_cross: Any
) -> "Policy":
    from hasten.sharing.learn import Policy, maps_of

    own = "decoder" if "decoder" in maps_of(translator.model) else "refiner"
    named = {own if name == "own" else name: value for name, value in thetas.items()}
    return Policy(thetas=named, form=form, largest=largest, shared_of_cross=shared_of_cross)


def _numbers(text: str) -> list[float]:
    try:
        numbers = {float(part) for part in text.split(",")}
    except ValueError:
        numbers = set()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise UserError(f"--thetas: {text!r}; write numbers, for example 0.8,0.6,0.5")
    return sorted(numbers, reverse=True)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"--kinds: {text!r}; name one or more, for example decoder,cross")
    return names


def _claim(out: Path, resume: bool | None = None) -> None:
    """`UserError` unless `out` is new or empty, or `resume` and begun; None for a command that cannot resume."""
    from hasten.sharing.learn import BEGUN, HALF_BEGUN

    # A process that is killed as the very first thing is noted leaves nothing else.
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is no directory; choose another --out")
    if not out.exists() or not any(path.name != HALF_BEGUN for path in out.iterdir()):
        return
    begun = (out / BEGUN).exists()
    if resume and not begun:
        raise UserError(f"{out} holds nothing that --resume could go on with; choose another --out")
    if not resume:
        hint = "give --resume to go on with what was begun there, or " if begun and resume is False else ""
        raise UserError(f"{out} is not empty; {hint}choose another --out")


@contextmanager
def _resumable(out: Path, resume: bool) -> Iterator[None]:
    """Nobody else works in `out` meanwhile; whoever stops the work is told the command that goes on."""
    from hasten.training import checkpoint, loop

    _claim(out, resume)
    with checkpoint.held(out):
        try:
            yield
        except (loop.Interrupted, KeyboardInterrupt) as stop:
            typer.echo(f"{str(stop) or 'stopped'}; go on by {_resuming(sys.argv[1:])}", err=True)
            raise typer.Exit(130) from None


def _resuming(words: list[str]) -> str:
    """The command of these words, with --resume."""
    if "--resume" not in words:
        end = words.index("--") if "--" in words else len(words)
        words = [*words[:end], "--resume", *words[end:]]
    return shlex.join(["hasten", *words])


def _load(model: str, threads: int | None) -> "tuple[Translator, RunSpec]":
    import hasten

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    translator = hasten.load(model)
    assert translator.spec is not None
    return translator, translator.spec


def _original(translator: "Translator", spec: "RunSpec", data: Path, sentences: int) -> "Original":
    from hasten.data.corpus import Corpus
    from hasten.sharing.learn import Original
    from hasten.sharing.sample import in_batches

    pairs = sample(translator, *Corpus.open(data).pairs("valid"), sentences, f"{data} valid")
    return Original(spec, translator.model, translator.tokenizer, list(in_batches(pairs, 2048)))


def sample(translator: "Translator", sources: list[str], targets: list[str], wanted: int, name: str) -> "list[Pair]":
    """Encoded pairs that the model takes; says on stderr where some are left out."""
    from hasten.sharing.sample import encode, spread

    longest = min(translator.max_source_tokens, translator.model.longest or translator.max_source_tokens)
    texts = spread(sources, targets, wanted)
    pairs = encode(texts, translator.tokenizer, longest)
    if not pairs:
        raise UserError(f"{name} has no sentences of 1 to {longest} pieces on either side")
    if len(pairs) < len(texts):
        typer.echo(f"left out {len(texts) - len(pairs):,} with more than {longest} pieces on a side", err=True)
    return pairs


def _taught(spec: "RunSpec", model: str, share: float) -> "RunSpec":
    """The run in which `model` itself, as it is now, is the teacher; the same run where its share is 0."""
    from dataclasses import replace

    from hasten.models import AutoregressiveSpec
    from hasten.models.word_distillation import WordDistillationSpec

    if share == 0:
        return spec
    if not isinstance(spec.model, AutoregressiveSpec):
        raise UserError(f"--distillation: {spec.model.kind} models have no words to learn one by one; leave it out")
    # By a path that leads there from any directory: from another one the work may go on.
    place = str(Path(model).resolve()) if Path(model).is_dir() else model
    teacher = WordDistillationSpec(teacher=place, share=share)
    return replace(spec, model=replace(spec.model, distillation=teacher))


def _overridden(spec: "RunSpec", data: Path, overrides: list[str]) -> "RunSpec":
    """The model's own run on this data, with changes to its training."""
    from dataclasses import replace

    from hasten import spec as specs

    for override in overrides:
        if override.partition(".")[0].strip() not in _SECTIONS:
            raise UserError(f"{override!r}: here only {' and '.join(_SECTIONS)} can be changed")
    own = replace(spec, data=replace(spec.data, path=str(data)))
    return specs.changed(own, overrides, "the model's settings with these overrides")


def _trainer(translator: "Translator", spec: "RunSpec") -> "Train":
    """Training as `hasten train` does it, of runs with this one's text, on pairs that are encoded once."""
    from hasten.cli.progress import TrainingProgress
    from hasten.training import checkpoint, loop
    from hasten.training.card import write_card

    task = _task(translator, spec)

    def train(own: "RunSpec", directory: Path, resume: bool) -> None:
        with checkpoint.held(directory), TrainingProgress(None) as progress:
            made = loop.train(
                own,
                directory,
                translator.tokenizer,
                task,
                resume=resume,
                observe=progress.observe,
                announce=progress.announce,
                stop=progress.stop_requested,
            )
        write_card(directory, own, sum(parameter.numel() for parameter in made.parameters()))
        if progress.stop_requested():  # too late for the loop to have stopped
            raise loop.Interrupted(f"stopped when {directory} was trained")

    return train


def _task(translator: "Translator", spec: "RunSpec") -> "Task":
    """What is learnt from; `UserError` for whatever would keep a run from beginning, before anything is written."""
    from dataclasses import replace

    import torch

    from hasten.data.corpus import Corpus
    from hasten.training import finetune, prepare

    # Tokenizer and first weights are those of the model at hand, wherever it once had them from.
    tokenizer = replace(spec.tokenizer, from_model=None)
    prepare.check(replace(spec, tokenizer=tokenizer, training=replace(spec.training, init_from=None)))
    with torch.device("meta"):
        model = spec.model.build(translator.tokenizer.vocab_size)
    finetune.give_teacher(model, spec, translator.tokenizer)
    task = prepare.make_task(spec, Corpus.open(spec.data.path), translator.tokenizer)[0]
    task.check()
    return task
