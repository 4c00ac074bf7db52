"""hasten train: any model by its TOML."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.cli.limits import MOST_THREADS

if TYPE_CHECKING:
    from hasten.data.tokenizer import Tokenizer
    from hasten.spec import RunSpec
    from hasten.training.loop import Task


def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value in TOML notation, in place of what the file says.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default: runs/ and the config's name.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the state that the run directory holds, to the same result.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard files to the run directory's tensorboard/.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over the run that the directory holds.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=MOST_THREADS, help="CPU threads; default: all.")] = None,
) -> None:
    """Train a model.

    Settings come from CONFIG, a TOML file with the sections [data], [tokenizer], [model] and [training]. The run
    directory is complete: `hasten translate --model DIR` needs nothing else. Its path goes to standard output. Ctrl-C
    saves and stops; --resume goes on. Several devices: `accelerate launch -m hasten train ...`, or torchrun.

    Example: hasten train configs/en-de-teacher.toml training.steps=500 --out runs/teacher
    """
    from hasten import spec as specs
    from hasten.cli.progress import require_tensorboard
    from hasten.training import checkpoint, memory, processes

    spec = specs.load(config, overrides or [])
    directory = out or Path("runs") / config.stem
    checkpoint.claim(directory, resume=resume, force=force)
    if tensorboard:
        require_tensorboard()
    memory.keep_freed_memory()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with checkpoint.held(directory) if processes.is_main() else nullcontext():
        tokenizer, task = _prepare(spec, directory, resume)
        _run(spec, directory, tokenizer, task, resume, tensorboard)


def _prepare(spec: "RunSpec", directory: Path, resume: bool) -> tuple["Tokenizer", "Task"]:
    from hasten.data.corpus import Corpus
    from hasten.data.tokenizer import Tokenizer
    from hasten.training import checkpoint, prepare, processes

    if resume:
        prepare.check_places(spec.data)
    prepare.check(spec)
    if spec.training.warmup >= spec.training.steps and processes.is_main():
        shown = f"training.warmup {spec.training.warmup}, training.steps {spec.training.steps}"
        typer.echo(f"warning: the run ends before the learning rate has risen ({shown}); lower the warm-up", err=True)
    corpus = Corpus.open(spec.data.path)
    if resume:
        tokenizer = Tokenizer.load(directory / checkpoint.TOKENIZER)
    else:
        tokenizer = processes.from_main(lambda: prepare.make_tokenizer(spec.tokenizer, corpus))
    task, counts = prepare.make_task(spec, corpus, tokenizer)
    if processes.is_main():
        order = sorted(counts.items(), key=lambda item: (item[0] != "kept", item[0]))
        typer.echo("training pairs: " + ", ".join(f"{n:,} {reason}" for reason, n in order), err=True)
    return tokenizer, task


def _run(
    spec: "RunSpec", directory: Path, tokenizer: "Tokenizer", task: "Task", resume: bool, tensorboard: bool
) -> None:
    from hasten.cli.progress import TrainingProgress
    from hasten.training import loop, processes
    from hasten.training.card import write_card

    main = processes.is_main()
    with TrainingProgress(directory / "tensorboard" if tensorboard else None, quiet=not main) as progress:
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
            if main:
                typer.echo(f"{interruption}; go on with --resume", err=True)
            raise typer.Exit(130) from None
    if main:
        write_card(directory, spec, sum(p.numel() for p in model.parameters()))
        typer.echo(str(directory))
