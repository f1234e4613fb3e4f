"""The GPU probe through NVIDIA's own bindings on a fake driver: what was reported in public (cases 48 to 54)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY
from tests.probes.fakenvml import Driver, build, driver, environment

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 4, 9, 15, 999


def test_a_gpu_that_answers(fake: Driver) -> None:
    fake.set("count 2", "total 80000000000", "used 30000000000", "reserved 600000000", "util 97", "power 412500",
             "temp 61", "clock 1980", "ecc 3", f"proc {os.getpid()} 29000000000")
    facts = fake.read()
    assert (facts["gpu_state"], facts["detail"]) == ("ok", "")
    assert [gpu["uuid"] for gpu in facts["gpus"]] == ["GPU-0", "GPU-1"]
    gpu = facts["gpus"][0]
    told = {key: gpu[key] for key in (
        "memory_total", "memory_used", "memory_reserved", "memory_free", "utilization", "power_watts",
        "power_limit_watts", "temperature_celsius", "sm_clock_hertz", "ecc_uncorrected", "unsupported")}
    assert told == {
        "memory_total": 80000000000, "memory_used": 30000000000, "memory_reserved": 600000000,
        "memory_free": 49400000000, "utilization": 0.97, "power_watts": 412.5, "power_limit_watts": 700.0,
        "temperature_celsius": 61.0, "sm_clock_hertz": 1.98e9, "ecc_uncorrected": 3, "unsupported": []}
    [process] = gpu["processes"]
    assert (process["pid"], process["gpu_bytes"], process["role"]) == (os.getpid(), 29000000000, "other")
    assert "python" in process["title"]


def test_an_old_driver_counts_its_reserve_as_used(tmp_path: Path) -> None:
    with driver(build(tmp_path / "old", "-DOLD_DRIVER"), tmp_path) as fake:
        fake.set("total 80000", "used 30000", "reserved 600")
        [gpu] = fake.read()["gpus"]
        assert (gpu["memory_used"], gpu["memory_reserved"]) == (30600, None)
        assert gpu["unsupported"] == ["memory_reserved"]


def test_48_a_driver_that_fails_for_good_is_lost_and_its_values_are_gone(fake: Driver) -> None:
    for _ in range(5):
        assert fake.read()["gpu_state"] == "ok"
    fake.set(f"all {UNKNOWN}", f"init {UNKNOWN}")
    lost = fake.read()
    assert (lost["gpu_state"], lost["gpus"]) == ("lost", [])
    assert "recreate the container" in lost["detail"]
    assert "fallen off" not in lost["detail"]
    before = fake.calls
    for _ in range(100):  # tried again, and ever more seldom
        assert fake.read()["gpu_state"] == "lost"
    assert 4 <= fake.calls - before < 20
    fake.set()
    assert fake.read(61)["gpu_state"] == "ok"


def test_49_processes_of_another_namespace_are_unattributed_and_not_available_is_not_zero(fake: Driver) -> None:
    fake.set("used 60000000000", "total 80000000000", "proc 28290 -", "proc 999999 5000000000")
    [gpu] = fake.read()["gpus"]
    assert [(p["pid"], p["title"], p["role"], p["gpu_bytes"]) for p in gpu["processes"]] == [
        (28290, "", "unattributed", None), (999999, "", "unattributed", 5000000000)]
    from monitor.facts import Gpu, Role
    from monitor.probes.exchange import build as build_facts

    assert build_facts(Gpu, gpu).memory_of(Role.UNATTRIBUTED) == 60000000000


def test_50_slices_are_named_by_their_own_uuid_and_have_no_utilisation(fake: Driver) -> None:
    fake.set("mig 2", f"nvmlDeviceGetUtilizationRates {NOT_SUPPORTED}")
    gpus = fake.read()["gpus"]
    assert [(gpu["uuid"], gpu["parent"], gpu["utilization"]) for gpu in gpus] == [
        ("MIG-0", "GPU-0", None), ("MIG-1", "GPU-0", None)]
    assert all(gpu["memory_used"] == 30000 and gpu["unsupported"] == ["utilization"] for gpu in gpus)


@pytest.mark.parametrize(("refused", "code", "unsupported"), [
    (("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), NOT_SUPPORTED, ["memory_reserved", "memory_used"]),
    (("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors"), NO_PERMISSION, ["ecc_uncorrected", "power_watts"]),
    (("nvmlDeviceGetComputeRunningProcesses_v3",), NO_PERMISSION, ["processes"]),
])
def test_51_a_field_that_is_refused_costs_itself(fake: Driver, refused: tuple[str, ...], code: int,
                                                  unsupported: list[str]) -> None:
    fake.set(*(f"{symbol} {code}" for symbol in refused))
    [gpu] = fake.read()["gpus"]
    assert gpu["unsupported"] == unsupported
    others = {"memory_used", "utilization", "power_watts", "temperature_celsius", "processes"} - set(unsupported)
    assert all(gpu[name] is not None for name in others)
    asked = fake.calls
    fake.read()
    each = fake.calls - asked
    fake.set()
    for _ in range(57):
        assert fake.read()["gpus"][0]["unsupported"] == unsupported
    assert fake.calls - asked == 58 * each  # not asked again at each read
    fake.read()
    assert fake.read()["gpus"][0]["unsupported"] == []  # but now and then


def test_52_no_driver_is_one_line_and_no_fault(tmp_path: Path) -> None:
    with driver(tmp_path, tmp_path) as fake:  # pynvml is there, a driver is not
        facts = fake.read()
        assert (facts["gpu_state"], facts["gpus"]) == ("none", [])
        assert "no NVIDIA driver here" in facts["detail"]
        assert facts["host_memory_total"] > 0


def test_52_a_driver_without_devices_is_no_fault(fake: Driver) -> None:
    fake.set(f"init {DRIVER_NOT_LOADED}")
    assert fake.read()["gpu_state"] == "none"
    fake.set("count 0")
    facts = fake.read(61)
    assert (facts["gpu_state"], facts["detail"]) == ("none", "the NVIDIA driver has no GPU here (none listed)")


def test_52_without_the_bindings_nothing_is_looked_at() -> None:
    from monitor.facts import GpuState
    from monitor.probes.nvml import Nvml

    def load() -> object:
        raise ImportError

    state, gpus, detail = Nvml(lambda: 0.0, load).read()
    assert (state, gpus) == (GpuState.NONE, ())
    assert "pip install nvidia-ml-py" in detail


@pytest.mark.parametrize("symbol", ["handle", "nvmlDeviceGetUUID", "nvmlDeviceGetPowerUsage"])
def test_53_one_gpu_that_is_lost_does_not_hide_the_others(fake: Driver, symbol: str) -> None:
    fake.set("count 2")
    fake.read()
    fake.set("count 2", f"{symbol}@0 {GPU_IS_LOST}")
    facts = fake.read()
    assert facts["gpu_state"] == "ok"
    assert [(gpu["uuid"], gpu["lost"], gpu["memory_used"]) for gpu in facts["gpus"]] == [
        ("GPU-0", "GPU is lost", None), ("GPU-1", "", 30000)]
    fake.set("count 2")
    assert [gpu["lost"] for gpu in fake.read()["gpus"]] == ["", ""]


def test_53_the_only_gpu_may_be_lost_while_the_driver_is_not(fake: Driver) -> None:
    fake.read()
    fake.set(f"handle {GPU_IS_LOST}")
    facts = fake.read()
    assert (facts["gpu_state"], [gpu["lost"] for gpu in facts["gpus"]]) == ("ok", ["GPU is lost"])


def test_53_the_last_xid_stays(fake: Driver) -> None:
    assert fake.read()["gpus"][0]["xid"] is None
    fake.set("xid 79")
    assert fake.read()["gpus"][0]["xid"] == 79
    assert fake.read()["gpus"][0]["xid"] == 79


def test_54_a_call_that_hangs_is_left_alone_and_holds_nothing_up(fake: Driver) -> None:
    fake.set("used 4")
    assert fake.read()["gpus"][0]["memory_used"] == 4
    fake.set(f"hang {fake.calls + 4}")
    facts = fake.read()
    assert (facts["gpu_state"], facts["gpus"]) == ("hung", [])
    assert 0.4 < facts["seconds"] < 1.5
    calls = fake.calls
    for _ in range(3):
        facts = fake.read()
        assert facts["gpu_state"] == "hung"
        assert facts["seconds"] < 1.0
        assert facts["host_memory_total"] > 0  # the rest of the node goes on
    assert fake.calls == calls  # one outstanding, and no other
    assert fake.close() < 1.0


def test_54_a_service_ends_while_its_driver_hangs(library: Path, tmp_path: Path) -> None:
    import signal
    import time

    from tests.helpers import free_port, wait_for
    from tests.servers import get, get_json

    (tmp_path / "state").write_text("hang 5\n")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "monitor.cli", "node", "--listen", f"127.0.0.1:{port}"], cwd=REPOSITORY,
        env=environment(library, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: b'verl_gpu_state{node="' in get(f"{url}/metrics")[1], 20, "the node's facts")
        wait_for(lambda: "hung" in str(get_json(f"{url}/api/v1/machine")), 20, "the hang")
        slowest = 0.0
        for _ in range(30):
            begun = time.monotonic()
            assert get(f"{url}/metrics")[0] == 200
            slowest = max(slowest, time.monotonic() - begun)
        assert slowest < 1.0
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - begun < 5
    finally:
        process.kill()
        process.wait()
