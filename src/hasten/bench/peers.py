"""Other engines in a comparison of decoders: who can hold a model, and the models exported for them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import hasten
from hasten.bench.contestant import Contestant
from hasten.errors import UserError
from hasten.export import ctranslate2, onnx
from hasten.export.engine import engine
from hasten.export.onnx_graph import onnx_package
from hasten.export.onnx_models import Holdable
from hasten.models.autoregressive import Autoregressive
from hasten.models.base import GenerationModel
from hasten.runtime.engine import onnxruntime
from hasten.translator import Translator


class Peer(NamedTuple):
    """An engine: its name, what fails where it is absent, the kinds of models it is for, a check and an export."""

    name: str
    needs: Sequence[Callable[[], object]]
    kinds: tuple[type[GenerationModel], ...]
    check: Callable[[GenerationModel], object]
    export: Callable[[Translator, Path, str], object]


def _to_ctranslate2(translator: Translator, directory: Path, compute: str) -> None:
    ctranslate2.export(translator.model, translator.tokenizer, directory, quantization=compute)


def _to_onnx(translator: Translator, directory: Path, compute: str) -> None:
    longest = translator.max_source_tokens
    onnx.export(translator.model, translator.tokenizer, directory, max_source_tokens=longest, compute=compute)


PEERS = {
    "ctranslate2": Peer("CTranslate2", (engine,), (Autoregressive,), ctranslate2.check_exportable, _to_ctranslate2),
    "onnx": Peer("ONNX Runtime", (onnx_package, onnxruntime), get_args(Holdable), onnx.check_holdable, _to_onnx),
}


def export_peers(
    contestants: Sequence[Contestant], peers: bool, exports: Path, note: Callable[[str], None]
) -> list[Contestant]:
    """Contestants that workers can start: models exported for the engines named, and, with `peers`, for all that can.

    `note` hears why an engine has no rows.
    """
    loaded = {entry.model: hasten.load(entry.model) for entry in contestants}
    found = list(contestants)
    for added in _added(loaded, note) if peers else []:
        if added.label not in [other.label for other in found]:
            found.append(added)
    ready = []
    for entry in found:
        if entry.engine in PEERS:
            translator, peer = loaded[entry.model], PEERS[entry.engine]
            directory = exports / f"{list(loaded).index(entry.model)}-{entry.engine}-{entry.compute}"
            if not directory.exists():
                peer.check(translator.model)
                peer.export(translator, directory, entry.compute)
            parameters = sum(p.numel() for p in translator.model.parameters())
            entry = dataclasses.replace(entry, directory=str(directory), parameters=parameters)
        ready.append(entry)
    return ready


def _added(loaded: Mapping[str, Translator], note: Callable[[str], None]) -> list[Contestant]:
    """Every model in every engine that is installed and can hold it."""
    found = []
    for key, peer in PEERS.items():
        try:
            for package in peer.needs:
                package()
        except UserError as error:
            note(f"no {peer.name} rows: {error}")
            continue
        for model, translator in loaded.items():
            if isinstance(translator.model, peer.kinds):
                try:
                    peer.check(translator.model)
                except UserError as error:
                    note(f"no {peer.name} rows of {model}: {error}")
                    continue
                found += [Contestant(model, key, compute) for compute in ("float32", "int8")]
    return found
