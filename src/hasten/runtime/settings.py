"""What an exported directory says about itself."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hasten.data.parts import FEWEST_SOURCE_TOKENS
from hasten.data.tokenizer import SPECIAL_IDS
from hasten.errors import UserError

SETTINGS = "hasten.json"
_FORMAT = 5
_MOST_UPSAMPLE = 1000
_MOST_BETA = 1e30


@dataclass(frozen=True)
class Settings:
    """kind: "ctc", "dag" or "autoregressive". compute: how weights are held. max_source_tokens: the longest source,
    without its end symbol. upsample: frames of a source token. vocabulary: pieces of the output layer. parameters: of
    the model that was exported. tokenizer: the fingerprint of its tokenizer. graphs: the name that each of its graphs
    keeps. beta: of dag, the weight of a word's log probability beside that of the edge to it."""

    kind: str
    compute: str
    max_source_tokens: int
    upsample: int
    vocabulary: int
    parameters: int
    tokenizer: str
    graphs: str
    beta: float

    def write(self, directory: Path) -> None:
        """Write them into a directory."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)
        (directory / SETTINGS).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def read(directory: Path) -> "Settings":
        """What `write` wrote; `UserError` where it is missing, damaged or of another format."""
        path = directory / SETTINGS
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if (version := found.pop("format")) != _FORMAT:
                raise UserError(f"{path} has format {version}, this hasten reads {_FORMAT}; export the model again")
            settings = Settings(**found)
            settings.check()
            return settings
        except OSError as error:
            advice = "write such a directory with: hasten export --to onnx"
            raise UserError(f"{directory} holds no model for ONNX Runtime ({error.strerror}); {advice}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is damaged: {error}; export the model again") from error

    def check(self) -> None:
        """ValueError for what is of another type or out of range."""
        for name in ("kind", "compute", "tokenizer", "graphs"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name} is {value!r}, no text")
        ranges = {
            "max_source_tokens": (FEWEST_SOURCE_TOKENS, 2**31),
            "upsample": (1, _MOST_UPSAMPLE),
            "vocabulary": (len(SPECIAL_IDS), 2**31),
            "parameters": (0, 2**62),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}, allowed {least} to {most}")
        if not isinstance(self.beta, int | float) or isinstance(self.beta, bool) or not 0 <= self.beta <= _MOST_BETA:
            raise ValueError(f"beta is {self.beta!r}, allowed 0 to {_MOST_BETA:g}")
