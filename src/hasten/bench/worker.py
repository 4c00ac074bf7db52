"""One contestant in a process of its own: thread settings are set before torch starts, and peak memory is its own.

Run as `python -m hasten.bench.worker`; requests come as JSON lines on stdin, answers leave as JSON lines on stdout.
"""

import contextlib
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from hasten.bench.contestant import Contestant
from hasten.errors import UserError


class Decoder(Protocol):
    """What the worker asks of an engine. Sentences come and go as text: tokenisation is part of the work."""

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Decode all lines in one batch."""
        ...

    def outputs(self, lines: Sequence[str]) -> list[tuple[list[int], int | None]]:
        """Ids of every output, and the passes of the model that it took (None: not counted), in one batch."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the row of results says about the model."""
        ...


class HastenDecoder:
    """A model of hasten, by `hasten.load`."""

    def __init__(self, contestant: Contestant, threads: int):
        import torch

        import hasten
        from hasten.translator import drafter

        torch.set_num_threads(threads)
        self.beam = contestant.beam
        shortlist = contestant.shortlist or None
        self.translator = hasten.load(contestant.model, decoding=contestant.decoding, shortlist=shortlist)
        self.rescorer = hasten.load(contestant.rescorer) if contestant.rescorer else None
        self.draft = drafter(contestant.draft) if contestant.draft else None
        self.translate([])  # refuses what the models cannot do together

    def translate(self, lines: Sequence[str]) -> list[str]:
        """As users do, but with the whole batch at once."""
        return self.translator.translate(
            lines, beam=self.beam, rescorer=self.rescorer, draft=self.draft, batch_tokens=_UNLIMITED
        )

    def outputs(self, lines: Sequence[str]) -> list[tuple[list[int], int | None]]:
        """Ids from the decoding loop; those of the text where a beam search made it, which counts no passes."""
        import torch

        from hasten.data.batch import source_batch
        from hasten.decoding.exact import exact
        from hasten.decoding.refine import final, refine

        model, tokenizer, shortlist = self.translator.model, self.translator.tokenizer, self.translator.shortlist
        if self.beam > 1:
            return [(tokenizer.encode_target(text), None) for text in self.translate(lines)]
        sources = [tokenizer.encode(line.strip()) for line in lines]
        source, mask = source_batch(sources)
        if self.draft is None:
            lists = None if shortlist is None else [torch.from_numpy(shortlist.ids(ids)) for ids in sources]
            frames = refine(model, source, mask, lists=lists)
        else:
            drafts = [tokenizer.encode_target(text) for text in self.draft.translate(lines, batch_tokens=_UNLIMITED)]
            frames = exact(model, source, mask, drafts)  # type: ignore[arg-type]
        decoded = final(frames, len(lines))
        return [(model.output_ids(row.tokens), row.iterations) for row in decoded]

    def facts(self) -> dict[str, Any]:
        """Kind, parameters and the fingerprint of the weights' file."""
        model, directory = self.translator.model, self.translator.directory
        return {
            "kind": str(getattr(getattr(model, "spec", None), "kind", type(model).__name__)),
            "parameters": sum(p.numel() for p in model.parameters()),
            "fingerprint": _fingerprint(directory / "model.safetensors") if directory else None,
        }


class PeerDecoder:
    """An exported model in CTranslate2."""

    def __init__(self, contestant: Contestant, threads: int):
        from hasten.data.tokenizer import Tokenizer
        from hasten.export.engine import CTranslate2Model

        directory = Path(contestant.directory)
        self.tokenizer, self.beam = Tokenizer.load(directory / "tokenizer.model"), contestant.beam
        self.model = CTranslate2Model(directory, self.tokenizer, threads=threads, compute=contestant.compute)
        self.file, self.parameters = directory / "model.bin", contestant.parameters

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Tokenise, decode, join."""
        return [self.tokenizer.decode(ids) for ids, _ in self.outputs(lines)]

    def outputs(self, lines: Sequence[str]) -> list[tuple[list[int], int | None]]:
        """Ids; a pass for each token and one for the end symbol, not counted for a beam."""
        sources = [self.tokenizer.encode(line.strip()) for line in lines]
        # The longest that hasten's own autoregressive models allow themselves: 2 (S + 1) + 20 for S pieces. The engine
        # has one limit for the whole batch, so an output that does not end by itself is cut at its own.
        limits = [2 * len(source) + 22 for source in sources]
        found = self.model.decode(sources, beam=self.beam, limit=max(limits))
        cut = [ids[:limit] for ids, limit in zip(found, limits, strict=True)]
        passes = [min(len(ids) + 1, limit) if self.beam == 1 else None for ids, limit in zip(cut, limits, strict=True)]
        return list(zip(cut, passes, strict=True))

    def facts(self) -> dict[str, Any]:
        """The fingerprint of the exported file."""
        return {"kind": "autoregressive", "parameters": self.parameters, "fingerprint": _fingerprint(self.file)}


class RuntimeDecoder:
    """An exported model in ONNX Runtime; PyTorch is not loaded."""

    def __init__(self, contestant: Contestant, threads: int):
        from hasten.runtime import load

        self.directory = Path(contestant.directory)
        self.translator = load(self.directory, threads=threads, shortlist=contestant.shortlist or None)

    def translate(self, lines: Sequence[str]) -> list[str]:
        """As users do, but with the whole batch at once."""
        return self.translator.translate(lines, batch_tokens=_UNLIMITED)

    def outputs(self, lines: Sequence[str]) -> list[tuple[list[int], int | None]]:
        """Ids, and the passes of the decoder."""
        encode = self.translator.tokenizer.encode
        return [
            (row.ids, row.passes) for row in self.translator.engine.decode([encode(line.strip()) for line in lines])
        ]

    def facts(self) -> dict[str, Any]:
        """What the directory says, and the fingerprint of the graph that says words."""
        settings = self.translator.engine.settings
        [file] = (path for path in self.directory.glob("*.onnx") if path.name in ("output.onnx", "steps.onnx"))
        return {"kind": settings.kind, "parameters": settings.parameters, "fingerprint": _fingerprint(file)}


_UNLIMITED = 10**9
_ENGINES: dict[str, Callable[[Contestant, int], Decoder]] = {
    "hasten": HastenDecoder,
    "ctranslate2": PeerDecoder,
    "onnx": RuntimeDecoder,
}


def _fingerprint(file: Path) -> str:
    """The start of the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def timed(decoder: Decoder, lines: Sequence[str]) -> dict[str, Any]:
    """Texts of one batch, and the seconds from text to text."""
    start = time.perf_counter()
    texts = decoder.translate(lines)
    return {"seconds": time.perf_counter() - start, "texts": texts}


def counted(decoder: Decoder, lines: Sequence[str]) -> dict[str, Any]:
    """Ids and passes of one batch."""
    found = decoder.outputs(lines)
    return {"ids": [ids for ids, _ in found], "passes": [passes for _, passes in found]}


def peak_mib() -> float:
    """The most memory this process has held, in MiB."""
    # Not by getrusage where it can be helped: Linux hands a parent's peak down to the programs it starts.
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
        return int(fields["VmHWM"].split()[0]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def answer(decoder: Decoder, request: dict[str, Any]) -> dict[str, Any]:
    """Serve one request."""
    if request["do"] == "facts":
        return decoder.facts()
    if request["do"] == "memory":
        return {"peak_mib": round(peak_mib(), 1)}
    return (timed if request["do"] == "translate" else counted)(decoder, request["lines"])


def main() -> None:
    """Build the contestant named on the first line, then answer request after request until stdin ends."""
    # Whatever a library prints must not get between the answers.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    decoder: Decoder | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if decoder is None:
                contestant = Contestant(**request["contestant"])
                decoder = _ENGINES[contestant.engine](contestant, request["threads"])
                reply: dict[str, Any] = decoder.facts()
            else:
                reply = answer(decoder, request)
        except UserError as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # the bench itself says that it was interrupted
        main()
