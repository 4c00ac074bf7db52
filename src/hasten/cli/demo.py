"""hasten demo: the teacher and its one-pass student side by side."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hasten.translator import Translator

TEACHER, STUDENT = "en-de-teacher", "en-de-ctc"
SENTENCES = (
    "Click the button to open a new document.",
    "This package contains the documentation and some examples.",
    "You can change the size of the window in the settings.",
    "If you want to delete the selected files, press the Delete key.",
    "The program reads the configuration file and shows a list of all users.",
    "Make sure that your computer is connected to the network before you install the update.",
)


def demo() -> None:
    """Translate some English sentences to German with two of the models that ship with hasten.

    Example: hasten demo
    """
    import torch

    from hasten.pretrained import names
    from hasten.translator import load

    missing = {TEACHER, STUDENT} - set(names())
    if missing:
        typer.echo(f"error: this installation lacks the bundled models {sorted(missing)}", err=True)
        raise typer.Exit(1)
    torch.set_num_threads(1)
    models = {name: load(name) for name in (TEACHER, STUDENT)}
    outputs = {name: _timed(model) for name, model in models.items()}
    for i, sentence in enumerate(SENTENCES):
        typer.echo(f"English        {sentence}")
        for name, (translations, milliseconds) in outputs.items():
            typer.echo(f"{name:<14} {translations[i]}  ({milliseconds[i]:.0f} ms)")
        typer.echo("")
    mean = {name: sum(milliseconds) / len(milliseconds) for name, (_, milliseconds) in outputs.items()}
    typer.echo("Mean per sentence, one at a time, one CPU thread:")
    for name, milliseconds in mean.items():
        typer.echo(f"  {name:<14} {milliseconds:6.1f} ms")
    typer.echo(f"  {STUDENT} writes all words in one pass: {mean[TEACHER] / mean[STUDENT]:.1f} times as fast here.")
    typer.echo(
        "\nNext:\n"
        f"  echo 'Save the file.' | .venv/bin/hasten translate --model {STUDENT}\n"
        "  .venv/bin/hasten data debian en-de --out data/en-de     # a real corpus, in two minutes\n"
        f"  .venv/bin/hasten bench decode --models {TEACHER},{STUDENT} --data data/en-de\n"
        "  .venv/bin/hasten --help"
    )


def _timed(model: "Translator") -> tuple[list[str], list[float]]:
    """Translations and milliseconds of each sentence, after a warm-up; the median of three runs."""
    from statistics import median
    from time import perf_counter

    translations = [model.translate([sentence])[0] for sentence in SENTENCES]
    milliseconds = []
    for sentence in SENTENCES:
        runs = []
        for _ in range(3):
            began = perf_counter()
            model.translate([sentence])
            runs.append(1000 * (perf_counter() - began))
        milliseconds.append(median(runs))
    return translations, milliseconds
