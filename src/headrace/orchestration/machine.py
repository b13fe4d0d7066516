"""What this machine has for a run: memory, within a container's limit, disk, and the first GPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import psutil

from headrace.memory_plan import Machine
from headrace.orchestration.gpu import may_have_gpu

CGROUPS = Path("/sys/fs/cgroup")


def this_machine(folder: str | Path, *, own_files: bool = False) -> Machine:
    """Without torch, and without a context on the GPU. `folder` is the run's, which need not be there yet. With
    `own_files` what it holds already counts as free: the run goes on with it or replaces it."""
    host = psutil.virtual_memory().available
    limit = container_room(CGROUPS, Path("/proc/self/cgroup"))
    total, free, name = _first_gpu() if may_have_gpu() else (0, 0, "")
    return Machine(
        host_bytes=host if limit is None else min(host, limit),
        disk_bytes=_disk_free(Path(folder)) + (_held(Path(folder)) if own_files else 0),
        device_bytes=free,
        device_total=total,
        device_name=name,
    )


def container_room(root: Path, own: Path) -> int | None:
    """Bytes that the tightest control group around this process has left; None where none has a limit. What its
    files' caches hold can be given up, and counts as free."""
    rooms = []
    for folder, limit, usage, cache in _groups(root, own):
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            lines = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # "max", or a group that has no memory controller
        if most < 1 << 60:
            rooms.append(max(0, most - used + int(lines.get(cache, 0))))
    return min(rooms, default=None)


def _groups(root: Path, own: Path) -> list[tuple[Path, str, str, str]]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top.parent:
            found.append((folder, *names))
            folder = folder.parent
    return found


def _disk_free(folder: Path) -> int:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def _held(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors") if file.is_file())


# ── The GPU ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _MemoryInfo(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _first_gpu() -> tuple[int, int, str]:
    """(all its memory, what is free now, its name), by the driver; zeros without one. Where only a context could
    tell what is free, all counts as free."""
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name, place = ctypes.create_string_buffer(96), ctypes.create_string_buffer(32)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        steps = (
            lambda: driver.cuInit(0),
            lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
            lambda: driver.cuDeviceTotalMem_v2(ctypes.byref(total), device),
            lambda: driver.cuDeviceGetName(name, len(name), device),
            lambda: driver.cuDeviceGetPCIBusId(place, len(place), device),
        )
        if any(step() for step in steps):
            return 0, 0, ""
    except (OSError, AttributeError):
        return 0, 0, ""
    free = _free_on(place)
    return total.value, total.value if free is None else min(free, total.value), name.value.decode()


def _free_on(place: ctypes.Array[ctypes.c_char]) -> int | None:
    """Free memory of the device at this place of the bus, by the management library, which needs no context."""
    handle, memory = ctypes.c_void_p(), _MemoryInfo()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        steps = (
            lambda: library.nvmlInit_v2(),
            lambda: library.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(handle)),
            lambda: library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        )
        return None if any(step() for step in steps) else int(memory.free)
    except (OSError, AttributeError):
        return None
