"""hasten train: any model by its TOML."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.data.tokenizer import Tokenizer
    from hasten.spec import RunSpec
    from hasten.training.loop import Task


def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file; with --resume it may be left as it was.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, in TOML notation.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default: runs/ and the config's name.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the state saved in the run directory.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing run.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all.")] = None,
) -> None:
    """Train a model. The run directory is complete: `hasten translate --model DIR` needs nothing else.

    Example: hasten train configs/en-de-teacher.toml training.steps=500 --out runs/teacher
    """
    from hasten import spec as specs
    from hasten.training import memory

    memory.keep_freed_memory()
    spec = specs.load(config, overrides or [])
    directory = out or Path("runs") / config.stem
    if (directory / "state").exists() and not resume and not force:
        raise UserError(f"{directory} holds a run; give --resume to go on with it or --force to write over it")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    tokenizer, task = _prepare(spec, directory, resume)
    _run(spec, directory, tokenizer, task, resume, tensorboard)


def _prepare(spec: "RunSpec", directory: Path, resume: bool) -> tuple["Tokenizer", "Task"]:
    from hasten.data.corpus import Corpus
    from hasten.data.tokenizer import Tokenizer
    from hasten.training import checkpoint, prepare

    corpus = Corpus.open(spec.data.path)
    if resume:
        if not (directory / checkpoint.STATE).exists():
            raise UserError(f"{directory} holds no saved state to resume from; start without --resume")
        tokenizer = Tokenizer.load(directory / checkpoint.TOKENIZER)
        checkpoint.write_run(directory, spec, tokenizer)
    else:
        tokenizer = prepare.make_tokenizer(spec.tokenizer, corpus)
        checkpoint.clear_run(directory)
        checkpoint.write_run(directory, spec, tokenizer)
    task, counts = prepare.make_task(spec, corpus, tokenizer)
    typer.echo("training pairs: " + ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items())), err=True)
    return tokenizer, task


def _run(
    spec: "RunSpec", directory: Path, tokenizer: "Tokenizer", task: "Task", resume: bool, tensorboard: bool
) -> None:
    from hasten.cli.progress import TrainingProgress
    from hasten.training import loop
    from hasten.training.card import write_card

    with TrainingProgress(directory, tensorboard) as progress:
        try:
            model = loop.train(
                spec,
                directory,
                tokenizer,
                task,
                resume=resume,
                observe=progress.observe,
                announce=progress.announce,
                stop=progress.stop_requested,
            )
        except loop.Interrupted as interruption:
            typer.echo(f"{interruption}; go on with --resume", err=True)
            raise typer.Exit(130) from None
    parameters = sum(p.numel() for p in model.parameters())
    write_card(directory, spec, parameters)
    typer.echo(str(directory))
