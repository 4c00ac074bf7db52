"""`hasten share`: which layers may use the attention of others."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.cli import share_train
from hasten.cli.limits import MOST_THREADS
from hasten.cli.share_train import sample
from hasten.directories import made
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.nn.sharing import SourceMap
    from hasten.sharing.divergence import Similarity
    from hasten.sharing.record import Record

PICTURE = "similarity.png"

app = typer.Typer(help="Let layers use the attention of others.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Let layers use the attention of others."""


@app.command(short_help="Measure how alike the layers of a model attend.")
def analyse(
    model: Annotated[str, typer.Option(help="A bundled model, a run directory or a hub id.", show_default=False)],
    data: Annotated[Path, typer.Option(help="A data directory by `hasten data`.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory for similarity.json and .png.", show_default=False)],
    split: Annotated[str, typer.Option(help="Which part of --data.")] = "valid",
    sentences: Annotated[int, typer.Option(min=1, help="How many, spread evenly over the split.")] = 1000,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Padded pieces of a batch, of the longer side.")] = 2048,
    device: Annotated[str, typer.Option(help="Where the model computes.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="CPU threads; all.", show_default=False)
    ] = None,
) -> None:
    """Measure how alike the layers of a model attend: 1 minus the Jensen-Shannon divergence, from 0 to 1.

    The model reads sentences and their references; the weights of each head are compared with those of the same head in
    every other layer. Layers that attend alike may share: see `hasten share policy`.

    Example: hasten share analyse --model en-de-teacher --data data/en-de --out similarity
    """
    import hasten
    from hasten.data.corpus import Corpus
    from hasten.sharing.divergence import measure
    from hasten.sharing.picture import picture
    from hasten.sharing.record import Record, write
    from hasten.sharing.sample import in_batches

    sources, targets = Corpus.open(data).pairs(split)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    translator = hasten.load(model, device=device)
    pairs = sample(translator, sources, targets, sentences, f"{data} {split}")
    with made(out):
        typer.echo(f"{model}: reading {len(pairs):,} sentences", err=True)
        kinds = measure(translator.model, in_batches(pairs, batch_tokens))
        record = Record(kinds, model, str(data), split, len(pairs), _versions())
        path = write(record, out)
        picture(record, out / PICTURE)
    _print_similarities(record)
    typer.echo(f"wrote {path} and {PICTURE}", err=True)


@app.command(short_help="Choose which layers share, by a threshold.")
def policy(
    directory: Annotated[Path, typer.Argument(help="What `hasten share analyse` wrote.", show_default=False)],
    theta: share_train.Theta = None,
    theta_cross: share_train.ThetaCross = None,
    theta_encoder: share_train.ThetaEncoder = None,
    largest: share_train.Largest = None,
    form: share_train.Form = "blocks",
) -> None:
    """Choose which layers use the attention of which, from a measurement, by a threshold.

    For blocks, the first layer is joined by as many next ones as keep the mean similarity within above the threshold,
    and so on from the layer after them. For a map, each layer uses the most similar earlier layer that computes its
    own. Kinds of attention without a threshold stay as they are. Printed are the layer that each layer uses, and
    settings for a configuration; one trains with them, since a trained model does not put up with them as it is.

    Example: hasten share policy similarity --theta 0.7 --theta-cross 0.8
    """
    from hasten.sharing.policy import blocks, source_map
    from hasten.sharing.record import read

    given = share_train.given(theta, theta_cross, theta_encoder)
    record = read(directory)
    own = "decoder" if "decoder" in record.kinds else "refiner"
    thetas = {own if name == "own" else name: value for name, value in given.items()}
    for name in reversed(thetas):
        if name not in record.kinds:
            option = "--theta" if name == own else f"--theta-{name}"
            raise UserError(f"{option}: {directory} has {', '.join(record.kinds)}; leave the option out")
    search = {"blocks": blocks, "map": source_map}[form]
    overrides = []
    for name in (name for name in record.kinds if name in thetas):
        similarity = record.kinds[name]
        plan = search(similarity.mu, thetas[name], largest)
        _print_plan(name, plan, similarity, thetas[name])
        overrides.append(f"model.{name}_sharing={_list(plan)}")
    typer.echo("settings: " + " ".join(map(shlex.quote, overrides)))


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in ("hasten", "torch")}


def _print_similarities(record: "Record") -> None:
    from hasten.sharing.record import TITLES

    for name, own in record.kinds.items():
        n_layers, width = len(own.mu), len(str(len(own.mu)))
        typer.echo(f"{TITLES.get(name, name)}: similarity of layers")
        typer.echo(" " * width + "".join(f"{j + 1:>6}" for j in range(n_layers)))
        for i, row in enumerate(own.mu):
            typer.echo(f"{i + 1:>{width}}" + "".join(f"{value:6.2f}" for value in row))
        typer.echo(_summary(own))
        typer.echo("")
    typer.echo(f"{record.model}, {record.data} {record.split}: {record.sentences:,} sentences")


def _summary(own: "Similarity") -> str:
    from hasten.sharing.policy import group_similarity

    if len(own.mu) == 1:
        return "one layer: nothing to share"
    rows = max(map(max, own.counts))
    return f"mean of different layers {group_similarity(own.mu, range(len(own.mu))):.3f}, over {rows:,} rows of heads"


def _print_plan(name: str, plan: "SourceMap", own: "Similarity", theta: float) -> None:
    from hasten.sharing.policy import group_similarity, groups, is_blocks, sizes
    from hasten.sharing.record import TITLES

    form = f", blocks {{{','.join(map(str, sizes(plan)))}}}" if is_blocks(plan) else ""
    typer.echo(f"{TITLES.get(name, name)}, theta {theta:g}: {_list(plan)}{form}")
    for group in groups(plan):
        if len(group) == 1:
            typer.echo(f"  layer {group[0] + 1}: alone")
        else:
            typer.echo(f"  layers {_ranges(group)}: similarity {group_similarity(own.mu, group):.3f}")


def _list(plan: "SourceMap") -> str:
    return f"[{','.join(map(str, plan.numbers))}]"


def _ranges(layers: tuple[int, ...]) -> str:
    """Numbers from 1, runs of them as first-last: 1, 3-6."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0] + 1) if len(run) == 1 else f"{run[0] + 1}-{run[-1] + 1}" for run in runs)


app.command(short_help="Let the layers of a trained model share, without training.")(share_train.retrofit)
app.command(short_help="Learn who shares together with the model.")(share_train.train)
app.command(short_help="Time and quality against the threshold.")(share_train.sweep)
