"""The process of one contestant of `hasten bench attention`: builds it size after size, times it, tells its memory.

Run by its path: `python attention_worker.py FACTORY.py`. It needs torch and nothing of hasten, so that the environment
of a peer runs the very loop that measures hasten. Requests come as JSON lines on stdin, answers leave as JSON lines on
stdout. What is measured is made by the functions of FACTORY.py:

    names() -> dict       every contestant it has, with what is worth knowing of it
    facts(name) -> dict   what the rows of results say of one
    check(name, sizes)    the parity check: "" or what is wrong
    build(name, sizes)    a module from (B, N, d_model) to the same, or at the level "core" from q, k, v (B, H, N, D)
    REFUSALS              the exceptions that mean: not made for such sizes

sizes: level, causal, batch, length, heads, width. Answers: the figures, or `refused` (not made for that) or `failed`.
"""

import contextlib
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TURN = 0.05  # seconds that a turn lasts at least, so that calls of a millisecond are measured more than once
_SLACK = 2**30  # bytes that a process may take beyond its tensors
Answer = dict[str, Any]


class Stand:
    """A contestant at one size, with its inputs and the gradient that arrives at its output."""

    def __init__(self, module: nn.Module, sizes: dict[str, Any]):
        batch, heads, length, width = (sizes[name] for name in ("batch", "heads", "length", "width"))
        generator = torch.Generator().manual_seed(0)
        shape = (batch, heads, length, width) if sizes["level"] == "core" else (batch, length, heads * width)
        n_inputs = 3 if sizes["level"] == "core" else 1
        self.module = module
        self.inputs = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(n_inputs)]
        self.cotangent = torch.randn(shape, generator=generator)

    def ready(self, what: str) -> Callable[[], None]:
        """The call to be measured, `forward` without gradients or `training` with them, in the module's mode for it."""
        self.module.train(what == "training")
        return {"forward": self._forward, "training": self._training}[what]

    def _forward(self) -> None:
        with torch.no_grad():
            self.module(*self.inputs)

    def _training(self) -> None:
        self.module(*self.inputs).backward(self.cotangent)

    def forget(self) -> None:
        """Drop the gradients of the last call."""
        gone: list[Tensor] = [*self.inputs, *self.module.parameters()]
        for tensor in gone:
            tensor.grad = None


def timed(stand: Stand, what: str) -> Answer:
    """A turn: seconds of call after call until it has lasted `TURN`."""
    call, seconds = stand.ready(what), []
    while not seconds or sum(seconds) < TURN:
        stand.forget()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    stand.forget()
    return {"seconds": seconds}


def memory(stand: Stand, what: str) -> Answer:
    """The most MiB of tensors that one call held at once, beyond module and inputs; and its seconds, watched.

    By the record of torch's allocator, which repeats exactly and knows no lazily loaded library.
    """
    call = stand.ready(what)
    stand.forget()
    start = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    seconds = time.perf_counter() - start
    stand.forget()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    held = most = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return {"peak_mib": most / 2**20, "seconds": seconds}


def limit_memory(mib: float) -> None:
    """Let an allocation fail that takes this process over its present size by more than `mib` and some slack."""
    status = Path("/proc/self/statm")
    if status.exists():
        size = int(status.read_text(encoding="utf-8").split()[5]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(size + mib * 2**20 + _SLACK), hard))


class Server:
    """Answers requests with the contestants of a factory."""

    def __init__(self, factory: Any):
        self.factory = factory
        self.stand: Stand | None = None

    def answer(self, request: Answer) -> Answer:
        """Serve one request; what the contestant cannot do or did wrong is an answer as well."""
        try:
            return self._answer(request)
        except self.factory.REFUSALS as error:
            return {"refused": str(error)}
        except MemoryError:
            return {"failed": "needs more memory than allowed"}
        except Exception as error:
            text = " ".join(str(error).split()) or "no message"
            if "allocate memory" in text:
                return {"failed": "needs more memory than allowed"}
            return {"failed": f"{type(error).__name__}: {text[:200]}"}

    def _answer(self, request: Answer) -> Answer:
        what = request["do"]
        if what == "start":
            torch.set_num_threads(request["threads"])
            limit_memory(request["memory_mib"])
            return self.factory.facts(request["name"])
        if what == "names":
            return self.factory.names()
        if what == "check":
            return {"wrong": self.factory.check(request["name"], request["sizes"])}
        if what == "build":
            self.stand = None  # the old one goes before the new one comes
            torch.manual_seed(0)
            module = self.factory.build(request["name"], request["sizes"])
            self.stand = Stand(module, request["sizes"])
            return {"parameters": sum(parameter.numel() for parameter in module.parameters())}
        if what == "leave":
            self.stand = None
            return {}
        assert self.stand is not None
        return {"memory": memory, "time": timed}[what](self.stand, request["what"])


def load(path: str) -> Any:
    """The factory, from its file."""
    spec = importlib.util.spec_from_file_location("factory", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["factory"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Answer request after request until stdin ends."""
    # The folder of this file is no place to import from: its names are those of other packages too.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    # Whatever a library prints must not get between the answers; the profiler writes to stderr as well.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.environ["KINETO_LOG_LEVEL"] = "99"
    server = Server(load(sys.argv[1]))
    for line in sys.stdin:
        replies.write(json.dumps(server.answer(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # the bench itself says that it was interrupted
        main()
