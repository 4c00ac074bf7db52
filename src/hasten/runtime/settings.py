"""What an exported directory says about itself."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hasten.errors import UserError

SETTINGS = "hasten.json"
_FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """kind: "ctc" or "autoregressive". compute: how weights are held. max_source_tokens: the longest source, without
    its end symbol. upsample: frames of a source token. parameters: of the model that was exported."""

    kind: str
    compute: str
    max_source_tokens: int
    upsample: int
    parameters: int

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
            return Settings(**found)
        except OSError as error:
            advice = "write such a directory with: hasten export --to onnx"
            raise UserError(f"{directory} holds no model for ONNX Runtime ({error.strerror}); {advice}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is damaged: {error}; export the model again") from error
