"""What is installed here and what it can do, as JSON values; `runtime.env_report` prints it.

A broken installation is reported instead of failed on. A package counts as installed when its
module is found; whether it works on this device is for its provider to say. What is said of Ascend
devices is unverified on hardware.
"""

import dataclasses
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphs.errors import EngineError
from runtime import cli
from runtime.env import PREFIX, EnvSettings, check_backend, read_environment, variable_name
from runtime.errors import BackendUnavailable
from runtime.fields import fields_by_name

BACKENDS = {"cpu": "", "cuda": "", "ascend": "UNVERIFIED ON HARDWARE"}
# Of the CPU flags that the system lists, those that make a difference to matrix products.
ISA_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)


@dataclass(frozen=True, slots=True)
class Package:
    """A package that something here can use.

    Args:
        module: what is imported; it decides whether the package is there.
        needed_for: what is lost without it.
        remedy: how to get it.
        distributions: names under which it may be installed, where they differ from the module's.
        is_used: this version has code that calls it.
    """

    module: str
    needed_for: str
    remedy: str
    distributions: tuple[str, ...] = ()
    is_used: bool = True


_BASE = "pip install flashreplay"
_SOURCE = "build it from source for this device and this torch"
PACKAGES = (
    Package("torch", "everything", _BASE),
    Package("safetensors", "checkpoints and scores", _BASE),
    Package("tokenizers", "text prompts", _BASE),
    Package("numpy", "mapped Engram tables", _BASE),
    Package("tqdm", "progress bars", _BASE),
    Package("huggingface_hub", "models by hub id", _BASE),
    Package(
        "deepseek_recipe", "chat messages", "pip install deepseek-recipe", ("deepseek-recipe",)
    ),
    Package("xgrammar", "constrained output", "pip install 'flashreplay[grammar]'", is_used=False),
    Package("triton", "kernels on NVIDIA GPUs", "pip install 'flashreplay[gpu]'", is_used=False),
    Package(
        "tilelang",
        "another kernel compiler",
        "pip install 'flashreplay[tilelang]'",
        is_used=False,
    ),
    Package(
        "flash_mla",
        "fast attention on NVIDIA GPUs",
        _SOURCE,
        ("flash_mla", "sgl-flash-mla"),
        is_used=False,
    ),
    Package(
        "deep_gemm",
        "fast linear layers on NVIDIA GPUs",
        _SOURCE,
        ("deep_gemm", "sgl-deep-gemm"),
        is_used=False,
    ),
    Package(
        "deep_ep",
        "expert parallelism on NVIDIA GPUs",
        _SOURCE,
        ("deep_ep", "sgl-deep-ep"),
        is_used=False,
    ),
    Package(
        "torch_npu",
        "Ascend devices",
        "pip install 'flashreplay[ascend]'",
        ("torch-npu",),
        is_used=False,
    ),
)


def describe_installation(environ: Mapping[str, str]) -> dict[str, Any]:
    """Collect everything as JSON values.

    Args:
        environ: the environment variables, usually os.environ.
    """
    packages = [_package(package) for package in PACKAGES]
    results: dict[str, Any] = {
        "packages": packages,
        "torch_problem": None,
        "cpu": {"model": cli.environment()["cpu"], "isa": _isa(), "compiler": _compiler(environ)},
        "capability": None,
        "devices": {"cuda": [], "ascend": []},
        "providers": {},
    }
    try:
        facts = _torch_facts()
        torch_version = facts.pop("torch_version")
        results |= facts
        packages[0]["version"] = torch_version if packages[0]["is_installed"] else None
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # A backend plug-in without its driver breaks the import of torch itself.
        first_line = str(error).partition("\n")[0]
        results["torch_problem"] = f"{type(error).__name__}: {first_line}"
    results["backends"] = [_backend(name) for name in BACKENDS]
    results["variables"] = _variables(environ)
    results["hub"] = _hub()
    results["missing"] = _missing(results)
    return results


def _package(package: Package) -> dict[str, Any]:
    is_installed = importlib.util.find_spec(package.module) is not None
    version = None
    for name in package.distributions or (package.module,):
        try:
            version = version or importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "name": package.module,
        "is_installed": is_installed,
        "version": version if is_installed else None,
        "needed_for": package.needed_for,
        "remedy": package.remedy,
        "is_used": package.is_used,
    }


def _isa() -> list[str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return []
    words: set[str] = set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.lower().startswith(("flags", "features")):
            words |= set(line.partition(":")[2].split())
            break
    return [flag for flag in ISA_FLAGS if flag in words]


def _compiler(environ: Mapping[str, str]) -> str | None:
    """Return the C++ compiler that compiled units on the CPU would be made with."""
    return shutil.which(environ.get("CXX") or "g++")


def _torch_facts() -> dict[str, Any]:
    """Return what only torch can tell; its import is most of the time of this command."""
    import torch

    import graphs.ops  # noqa: F401 - registers the ops
    from backends.capability import probe_cpu
    from backends.registry import candidates
    from graphs.op import OPS

    capability = probe_cpu()
    providers = {
        op: [
            {"name": p.name, "priority": p.priority, "refusal": p.available(capability)}
            for p in candidates(op)
        ]
        for op in sorted(OPS)
    }
    devices = {"cuda": _cuda_devices(torch), "ascend": _ascend_devices(torch)}
    return {
        "torch_version": str(torch.__version__),  # with the build, which the metadata may lack
        "capability": dataclasses.asdict(capability),
        "devices": devices,
        "providers": providers,
    }


def _cuda_devices(torch: Any) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": device.name,
            "arch": f"sm{device.major}{device.minor}",
            "total_bytes": device.total_memory,
            "cuda": torch.version.cuda,
        }
        for device in properties
    ]


def _ascend_devices(torch: Any) -> list[dict[str, Any]]:
    """List what torch_npu sees; torch loads that plug-in by itself. Unverified on hardware."""
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return []
    return [{"name": npu.get_device_name(i)} for i in range(npu.device_count())]


def _backend(name: str) -> dict[str, Any]:
    reason = None
    try:
        check_backend(name, "a report")
    except BackendUnavailable as error:
        reason = error.fields["reason"]
    return {"name": name, "is_available": reason is None, "reason": reason, "note": BACKENDS[name]}


def _variables(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    known = {variable_name(name): field for name, field in fields_by_name(EnvSettings).items()}
    set_here = {name for name in environ if name.startswith(PREFIX)}
    rows = []
    for name in sorted(known | dict.fromkeys(set_here)):
        problem = None
        try:
            read_environment({name: environ[name]} if name in environ else {})
        except EngineError as error:
            problem = str(error)
        rows.append({"name": name, "value": environ.get(name), "problem": problem})
    return rows


def _hub() -> dict[str, Any] | None:
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import constants

    cache = folder = Path(constants.HF_HUB_CACHE)
    while not folder.is_dir():
        folder = folder.parent
    return {
        "cache": str(cache),
        "free_bytes": shutil.disk_usage(folder).free,
        "is_offline": constants.HF_HUB_OFFLINE,
        "endpoint": constants.ENDPOINT,
    }


def _missing(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """List what is absent, what for, and what to do."""
    rows = [
        {"what": p["name"], "needed_for": _needed_for(p), "remedy": p["remedy"]}
        for p in results["packages"]
        if not p["is_installed"]
    ]
    if results["cpu"]["compiler"] is None:
        remedy = "install g++, or name another compiler in CXX"
        needed_for = "compiled units on the CPU (--kind inductor)"
        rows.append({"what": "C++ compiler", "needed_for": needed_for, "remedy": remedy})
    for backend in results["backends"]:
        if not backend["is_available"]:
            what, needed_for = f"backend {backend['name']}", f"{backend['name']} devices"
            rows.append({"what": what, "needed_for": needed_for, "remedy": backend["reason"]})
    return rows


def _needed_for(package: Mapping[str, Any]) -> str:
    unused = "" if package["is_used"] else "; not used by this version"
    return package["needed_for"] + unused
