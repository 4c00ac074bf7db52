"""Which arithmetic a device is given, and who speaks for a run."""

from pathlib import Path

import pytest
import torch

from hasten.errors import UserError
from hasten.training import processes

FLAGS = "processor : 0\nflags : fpu sse2 {}\n\nprocessor : 1\nflags : fpu avx512_bf16\n"


@pytest.mark.parametrize(
    ("flags", "able"),
    [("avx512_bf16", True), ("amx_bf16 amx_tile", True), ("bf16", True), ("avx512f avx2", False), ("bf16x", False)],
)
def test_bfloat16_needs_a_flag_of_the_processor(flags, able, tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(FLAGS.format(flags))
    assert processes.cpu_multiplies_bfloat16(path) is able


def test_a_system_without_cpuinfo_gets_float32(tmp_path):
    assert not processes.cpu_multiplies_bfloat16(tmp_path / "nothing")


def test_a_wish_is_granted_and_auto_asks_the_device(monkeypatch):
    cpu = torch.device("cpu")
    for able in (True, False):
        monkeypatch.setattr(processes, "cpu_multiplies_bfloat16", lambda able=able: able)
        assert processes.multiplies_in_bfloat16("bfloat16", cpu)
        assert not processes.multiplies_in_bfloat16("float32", cpu)
        assert processes.multiplies_in_bfloat16("auto", cpu) is able
    assert not processes.multiplies_in_bfloat16("auto", torch.device("mps"))


def test_one_process_is_the_main_one_and_gets_what_it_makes():
    assert processes.is_main()
    assert processes.from_main(lambda: Path("x")) == Path("x")


def test_a_launcher_that_cuts_the_model_is_refused(monkeypatch):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType.FSDP))
    with pytest.raises(UserError, match="accelerate is set to FSDP; hasten trains in one process or in copies"):
        processes.make_accelerator()
