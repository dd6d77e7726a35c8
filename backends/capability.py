"""What this device and installation can do, as one frozen record."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """Facts that providers, passes and the memory plan ask for.

    Args:
        backend: "cpu".
        arch: instruction set or compute capability, for example "avx512" or "sm90".
        num_cores: cores this process may use.
        total_bytes, available_bytes: memory of the device; the limit of the control group counts.
        verified: this project's tests ran on such hardware.
    """

    backend: str
    arch: str
    num_cores: int
    total_bytes: int
    available_bytes: int
    verified: bool


def probe_cpu() -> Capability:
    """Describe the processor and the memory this process may use."""
    total, available = _host_memory()
    return Capability(
        backend="cpu",
        arch=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}".lower(),
        num_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        total_bytes=total,
        available_bytes=available,
        verified=True,
    )


def _host_memory() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = total
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    group = _control_group()
    if group is not None:
        limit, used = group
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _control_group() -> tuple[int, int] | None:
    """Return (limit, bytes in use) of the control group, None without a limit."""
    for limit_file, use_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, used = Path(limit_file), Path(use_file)
        if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
            return int(limit.read_text()), int(used.read_text())
    return None
