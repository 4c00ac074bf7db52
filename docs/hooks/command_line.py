"""Writes the command-line page from the commands themselves, so that it cannot fall behind them."""

from typing import Any

import typer

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put every verb's help in the place of the mark."""
    if MARK not in markdown:
        return markdown
    from hasten.cli import app

    return markdown.replace(MARK, "\n".join(describe(typer.main.get_command(app), "hasten")))


def describe(command: Any, name: str) -> list[str]:
    """One section a verb: what it does, an example, its arguments and options."""
    if inner := getattr(command, "commands", None):
        return [line for verb, one in inner.items() for line in describe(one, f"{name} {verb}")]
    text, _, example = (command.help or "").partition("Example:")
    lines = [f"## {name}", "", text.strip(), ""]
    if example:
        lines += ["```bash", example.strip(), "```", ""]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        names = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"
        required = " (required)" if parameter.required else ""
        default = parameter.default
        shown = "" if parameter.required or default in (None, False) or callable(default) else f" Default: `{default}`."
        lines.append(f"- {names}{required}: {getattr(parameter, 'help', '') or ''}{shown}")
    return [*lines, ""]
