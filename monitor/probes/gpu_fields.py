"""What a GPU is asked for: field of ``monitor.facts.Gpu`` -> call of the bindings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monitor.facts import Process

_MAX_PROCESSES = 200

FIELDS = ("memory_reserved", "memory_used", "utilization", "power_watts", "power_limit_watts", "sm_clock_hertz",
          "temperature_celsius", "ecc_uncorrected", "processes", "name")
"""Names under which a GPU may be said not to answer."""


def memory_asks(nvml: Any, handle: Any) -> tuple[tuple[str, Callable[[], Any]], ...]:
    """Forms of the question for memory, best first. The last counts what the driver reserves for itself as used; the
    first tells it apart."""
    return (("memory_reserved", lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)),
            ("memory_used", lambda: nvml.nvmlDeviceGetMemoryInfo(handle)))


def asks(nvml: Any, handle: Any) -> dict[str, Callable[[], Any]]:
    """All other fields, in base units. Blocking, each; what the driver raises goes through."""
    return {
        "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "power_limit_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "sm_clock_hertz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        "temperature_celsius": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        "processes": lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)[:_MAX_PROCESSES],
        "graphics": lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)[:_MAX_PROCESSES],
    }


def processes_of(compute: list[Any] | None, graphics: list[Any] | None) -> tuple[Process, ...] | None:
    """Processes on a GPU, one that both computes and draws once; None where those that compute are not listed."""
    if compute is None:
        return None
    found = {process.pid: process.usedGpuMemory for process in [*(graphics or ()), *compute]}
    return tuple(Process(pid=pid, gpu_bytes=used) for pid, used in sorted(found.items()))
