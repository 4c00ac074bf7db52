"""The processes of a run (one, or several under `accelerate launch`) and the arithmetic its device is good at."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, broadcast_object_list
from torch import nn

from hasten.errors import UserError

T = TypeVar("T")

_COPIES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
)


def make_accelerator() -> Accelerator:
    """One process, or one of several that each hold a copy of the model.

    Raises `UserError` where the launcher asks to cut the model itself into pieces: checkpoints here hold whole tensors.
    """
    accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())
    if accelerator.distributed_type not in _COPIES:
        raise UserError(
            f"accelerate is set to {accelerator.distributed_type.value}; hasten trains in one process or in copies of "
            "the model (data parallel): choose that with `accelerate config`, or start with torchrun"
        )
    return accelerator


def keep_buffers_apart(model: nn.Module) -> None:
    """Buffers are constants that every process has: copies of the model must not send them around before each step.

    A table of positions may also have grown further in one process than in another.
    """
    names = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[arg-type]


def is_main() -> bool:
    """Whether this process writes and speaks for all."""
    return PartialState(cpu=not torch.cuda.is_available()).is_main_process


def from_main(make: Callable[[], T]) -> T:
    """What the main process makes, in every process; the others wait for it."""
    state = PartialState(cpu=not torch.cuda.is_available())
    made: list[T | None] = [make() if state.is_main_process else None]
    if state.num_processes > 1:
        broadcast_object_list(made)
    (result,) = made
    assert result is not None
    return result


def multiplies_in_bfloat16(wanted: str, device: torch.device) -> bool:
    """Whether matrix products are computed in bfloat16; "auto": where the device does it natively."""
    if wanted != "auto":
        return wanted == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and cpu_multiplies_bfloat16()


def cpu_multiplies_bfloat16(cpuinfo: str | Path = "/proc/cpuinfo") -> bool:
    """Whether this processor has bfloat16 dot products (AVX512-BF16, AMX or the Arm extension)."""
    try:
        first = Path(cpuinfo).read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(first.split())
