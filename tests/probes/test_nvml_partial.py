"""The GPU probe where a driver answers in part: single fields, GPUs, slices, bindings that are odd."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from monitor.facts import GpuState
from monitor.probes.node import NodeProbe
from monitor.probes.nvml import Nvml
from tests.helpers import REPOSITORY
from tests.probes.fakenvml import Driver, environment

NOT_SUPPORTED, NO_PERMISSION, UNKNOWN = 3, 4, 999
FIELDS = (
    "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")


def test_51_one_field_that_fails_in_an_unknown_way_is_no_lost_gpu(fake: Driver) -> None:
    fake.set(f"nvmlDeviceGetPowerUsage {UNKNOWN}")  # as the power of some GPUs does
    facts = fake.read()
    [gpu] = facts["gpus"]
    assert (facts["gpu_state"], gpu["lost"], gpu["unsupported"]) == ("ok", "", ["power_watts"])
    assert (gpu["memory_used"], gpu["utilization"], gpu["power_watts"]) == (30000, 0.5, None)


def test_48_all_fields_that_fail_in_an_unknown_way_are_a_lost_driver(fake: Driver) -> None:
    assert fake.read()["gpu_state"] == "ok"
    fake.set(*(f"{symbol} {UNKNOWN}" for symbol in FIELDS))  # its name and uuid are known without the device
    lost = fake.read()
    assert (lost["gpu_state"], lost["gpus"]) == ("lost", [])
    fake.set()
    [gpu] = fake.read(61)["gpus"]
    assert (gpu["memory_used"], gpu["unsupported"]) == (30000, [])  # all of it is asked for again at once


@pytest.mark.parametrize("state", [f"handle {NO_PERMISSION}", "count 0"])
def test_48_gpus_that_were_there_and_may_not_be_asked_any_more_are_lost(fake: Driver, state: str) -> None:
    fake.set(state)
    never = fake.read()
    assert (never["gpu_state"], never["gpus"], fake.log) == ("none", [], "")  # nothing was ever there: no fault
    fake.set()
    assert fake.read(61)["gpu_state"] == "ok"
    fake.set(state)
    lost = fake.read()
    assert (lost["gpu_state"], lost["gpus"]) == ("lost", [])
    assert "recreate the container" in lost["detail"]


def test_53_a_gpu_that_leaves_the_list_is_lost(fake: Driver) -> None:
    fake.set("count 3")
    fake.read()
    fake.set("count 2")
    assert [(gpu["uuid"], gpu["lost"]) for gpu in fake.read()["gpus"]] == [
        ("GPU-0", ""), ("GPU-1", ""), ("GPU-2", "the driver does not list it any more")]
    fake.set("count 3")
    assert [gpu["lost"] for gpu in fake.read()["gpus"]] == ["", "", ""]


@pytest.mark.parametrize("refused", ["nvmlDeviceGetUUID@0", "nvmlDeviceGetMigMode@0", "nvmlDeviceGetPowerUsage@0"])
def test_50_slices_are_told_without_permission_to_their_gpu(fake: Driver, refused: str) -> None:
    fake.set("mig 2", f"{refused} {NO_PERMISSION}", f"nvmlDeviceGetUtilizationRates@101 {NOT_SUPPORTED}")
    for _ in range(3):
        facts = fake.read()
        assert [(gpu["uuid"], gpu["lost"], gpu["utilization"], gpu["memory_used"]) for gpu in facts["gpus"]] == [
            ("MIG-0", "", 0.5, 30000), ("MIG-1", "", None, 30000)]
    assert (facts["gpu_state"], fake.log) == ("ok", "")
    calls = fake.calls
    fake.read()
    each, calls = fake.calls - calls, fake.calls
    fake.read()
    assert fake.calls - calls == each < 60


def test_53_a_slice_has_its_gpus_xid(fake: Driver) -> None:
    fake.set("mig 2", "xid 94")
    assert [gpu["xid"] for gpu in fake.read()["gpus"]] == [94, 94]


def test_a_process_that_computes_and_draws_is_told_once(fake: Driver) -> None:
    fake.set("proc 999998 5", "graphics 999998 5", "graphics 999999 7")
    [gpu] = fake.read()["gpus"]
    assert [(process["pid"], process["gpu_bytes"]) for process in gpu["processes"]] == [(999998, 5), (999999, 7)]
    fake.set("proc 999998 5", f"nvmlDeviceGetGraphicsRunningProcesses_v3 {NOT_SUPPORTED}")
    [gpu] = fake.read()["gpus"]
    assert ([process["pid"] for process in gpu["processes"]], gpu["unsupported"]) == ([999998], [])


def test_memory_of_zero_bytes_is_no_answer(fake: Driver) -> None:
    fake.set("total 0", "used 0", "reserved 0")
    [gpu] = fake.read()["gpus"]
    assert (gpu["memory_total"], gpu["memory_used"], gpu["utilization"]) == (None, None, 0.5)


def test_54_a_hang_is_logged_once(fake: Driver) -> None:
    fake.read()
    fake.set(f"hang {fake.calls + 1}")
    details = set()
    for _ in range(4):
        details.add(fake.read()["detail"])
        time.sleep(0.6)
    assert len(details) > 1  # how long it has hung, which is another each time
    assert fake.log.count("\n") == 1
    assert "no answer" in fake.log


def test_51_bindings_that_lack_a_call_cost_that_field(library: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    program = """
import pynvml, time
from monitor.probes.nvml import Nvml
for name in ("nvmlMemory_v2", "nvmlEventSetCreate", "nvmlDeviceGetMigMode", "nvmlDeviceGetTotalEccErrors"):
    delattr(pynvml, name)
state, (gpu,), detail = Nvml(time.monotonic).read()
print(state.value, gpu.memory_used, gpu.ecc_uncorrected, *gpu.unsupported)
"""
    told = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=environment(library, tmp_path),
                          capture_output=True, text=True, timeout=30, check=True).stdout
    assert told.split() == ["ok", "30600", "None", "ecc_uncorrected", "memory_reserved"]


def test_52_a_module_that_is_something_else_costs_the_gpus_alone(caplog: pytest.LogCaptureFixture) -> None:
    probe = NodeProbe("a", lambda: 0.0, nvml=Nvml(lambda: 0.0, lambda: types.ModuleType("pynvml")))
    with caplog.at_level(logging.INFO, "monitor.probes"):
        for _ in range(3):
            facts = probe.read()
    assert (facts.gpu_state, facts.gpus) == (GpuState.NONE, ())
    assert "could not be read" in facts.detail
    assert facts.host_memory_total
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_54_closing_waits_for_a_look_that_ends_soon_and_none_is_begun_after_it(fake: Driver) -> None:
    assert fake.read()["gpu_state"] == "ok"
    assert fake.close() < 1.0
    calls = fake.calls
    facts = fake.read(100)
    assert (facts["gpu_state"], fake.calls) == ("none", calls)

    begun, closed = threading.Event(), []

    class Slow(Nvml):
        def read(self) -> tuple[GpuState, tuple[()], str]:
            begun.set()
            time.sleep(0.2)
            return GpuState.NONE, (), ""

        def close(self) -> None:
            closed.append(True)

    probe = NodeProbe("a", lambda: 0.0, nvml=Slow(lambda: 0.0))
    threading.Thread(target=probe.read, daemon=True).start()
    assert begun.wait(5)
    probe.close()
    assert closed == [True]
