"""`python -m runtime.env_report`: what it finds, what it says of what is broken, its two forms."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends import registry
from graphs.op import OPS, find_op
from runtime import cli, env_report, installation
from runtime.env import EnvSettings, variable_name
from runtime.fields import fields_by_name

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("packages", "devices", "backends", "providers", "environment variables", "hub")


def run(*argv):
    """Run the command in this process; returns exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run_main(env_report.main, [str(word) for word in argv])
    return code, out.getvalue(), err.getvalue()


def report(*argv):
    code, out, err = run("--json", "-", *argv)
    assert (code, err) == (0, "")
    return json.loads(out)


class TestForms:
    def test_the_text_has_every_section(self):
        code, out, err = run()
        assert (code, err) == (0, "")
        for section in (*SECTIONS, "missing"):
            assert re.search(rf"^{section}", out, re.MULTILINE), section
        assert "ascend: UNVERIFIED ON HARDWARE" in out
        assert f"reference: {len(OPS)} ops" in out
        assert max(map(len, out.splitlines())) < 200

    def test_the_report_is_one_object(self, tmp_path):
        document = report()
        assert list(document) == ["schema", "config", "environment", "results"]
        assert document["schema"] == "flashreplay.env_report/1"
        results = document["results"]
        names = {"packages", "cpu", "capability", "devices", "backends", "providers", "variables"}
        assert results.keys() == names | {"torch_problem", "hub", "missing"}
        path = tmp_path / "report.json"
        code, out, err = run("--json", path)
        assert (code, err) == (0, "")
        assert json.loads(path.read_text()).keys() == document.keys()
        assert out.startswith("flashreplay ")  # the text too

    def test_it_ends_with_0_within_four_seconds(self):
        seconds = []
        for _ in range(3):  # the fastest counts: the machine may be busy
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "runtime.env_report"],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            seconds.append(time.perf_counter() - start)
            if seconds[-1] < 4:
                break
        assert (done.returncode, done.stderr) == (0, "")
        assert min(seconds) < 4

    def test_help_is_light_and_its_examples_parse(self):
        text = env_report.make_parser().format_help()
        examples = text.partition("\nexamples:\n")[2].splitlines()
        assert len(examples) == 2
        for line in examples:
            words = line.strip().removeprefix(env_report.PROG).split()
            env_report.make_parser().parse_args(words)
        code = (
            "import sys, runtime.env_report; print({'torch', 'huggingface_hub'} & {*sys.modules})"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "set()\n"

    @pytest.mark.parametrize(
        ("argv", "code", "part"),
        [
            (["--jsn"], 2, "UnknownFlag"),
            (["extra"], 2, "UnknownFlag"),
            (["--json"], 2, "BadArguments"),
            (["--json", "no/such/folder/report.json"], 1, "OutputUnwritable"),
        ],
    )
    def test_a_bad_command_line(self, tmp_path, monkeypatch, argv, code, part):
        monkeypatch.chdir(tmp_path)
        got, out, err = run(*argv)
        assert (got, out, err.count("\n")) == (code, "", 1)
        assert part in err


class TestFacts:
    def test_every_dependency_is_listed(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        wanted = [*project["dependencies"]]
        for extra in extras.keys() - {"test", "dev"}:
            wanted += extras[extra]
        names = {re.match(r"[\w.-]+", text)[0].replace("-", "_").lower() for text in wanted}
        assert names <= {package.module for package in installation.PACKAGES}
        for package in installation.PACKAGES:
            if extra := re.search(r"flashreplay\[(\w+)\]", package.remedy):
                assert extra[1] in extras

    def test_what_runs_here_is_installed(self):
        import torch

        packages = {p["name"]: p for p in report()["results"]["packages"]}
        assert packages["torch"]["version"] == torch.__version__
        for name in ("safetensors", "tokenizers", "numpy", "tqdm", "huggingface_hub"):
            assert packages[name]["is_installed"]
            assert packages[name]["version"]

    def test_a_module_without_metadata_is_installed(self, tmp_path, monkeypatch):
        name = "deep_ep"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(installation.importlib.metadata, "version", missing_metadata)
        results = report()["results"]
        (found,) = [p for p in results["packages"] if p["name"] == name]
        assert (found["is_installed"], found["version"]) == (True, None)
        assert name not in [row["what"] for row in results["missing"]]
        assert "installed, version unknown" in run()[1]

    def test_a_name_without_a_module_is_missing(self, monkeypatch):
        """Some names of kernel libraries are empty packages on the index."""
        monkeypatch.setattr(installation.importlib.util, "find_spec", lambda _: None)
        monkeypatch.setattr(installation.importlib.metadata, "version", lambda _: "0.0.1")
        results = report()["results"]
        assert {p["version"] for p in results["packages"]} == {None}
        assert results["hub"] is None
        missing = {row["what"]: row for row in results["missing"]}
        assert missing["torch"]["needed_for"] == "everything"
        assert missing["triton"]["needed_for"].endswith("not used by this version")
        assert missing["triton"]["remedy"] == "pip install 'flashreplay[gpu]'"
        assert run()[0] == 0

    def test_a_torch_that_cannot_be_imported_is_reported(self, monkeypatch):
        detail = "libhccl.so: cannot open shared object file\nmore"

        def fail():
            raise ImportError(detail)

        monkeypatch.setattr(installation, "_torch_facts", fail)
        results = report()["results"]
        assert results["torch_problem"].startswith("ImportError: libhccl.so")
        assert (results["capability"], results["providers"]) == (None, {})
        code, out, _ = run()
        assert code == 0
        assert "torch cannot be imported  ImportError: libhccl.so: cannot" in out

    def test_the_capability_and_the_backends(self):
        results = report()["results"]
        assert results["capability"]["backend"] == "cpu"
        assert results["capability"]["available_bytes"] > 0
        backends = {b["name"]: b for b in results["backends"]}
        assert [b["is_available"] for b in backends.values()] == [True, False, False]
        missing = {row["what"]: row["remedy"] for row in results["missing"]}
        assert missing["backend cuda"] == backends["cuda"]["reason"]

    def test_no_compiler(self, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        results = report()["results"]
        assert results["cpu"]["compiler"] is None
        (row,) = [row for row in results["missing"] if row["what"] == "C++ compiler"]
        assert "--kind inductor" in row["needed_for"]

    def test_devices_that_torch_sees(self, monkeypatch):
        h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 * 10**9)
        torch = SimpleNamespace(
            cuda=SimpleNamespace(
                is_available=lambda: True,
                device_count=lambda: 2,
                get_device_properties=lambda _: h200,
            ),
            version=SimpleNamespace(cuda="13.0"),
            npu=SimpleNamespace(
                is_available=lambda: True,
                device_count=lambda: 1,
                get_device_name=lambda _: "Ascend950",
            ),
        )
        devices = {
            "cuda": installation._cuda_devices(torch),
            "ascend": installation._ascend_devices(torch),
        }
        facts = installation._torch_facts() | {"devices": devices}
        monkeypatch.setattr(installation, "_torch_facts", lambda: facts)
        out = run()[1]
        assert re.search(r"cuda:1 +NVIDIA H200 +sm90 +150\.0 GB, CUDA 13\.0", out)
        assert re.search(r"npu:0 +Ascend950 +unverified on hardware", out)

    def test_a_provider_and_why_it_is_not_taken(self, monkeypatch):
        monkeypatch.setattr(registry, "_PROVIDERS", {})
        for name, refusal in (("slow", None), ("fast", "needs sm100, this is x86_64")):
            provider = registry.Provider(
                "rms_norm",
                name,
                10 if refusal else 5,
                find_op("rms_norm").overload,
                lambda _, refusal=refusal: refusal,
                lambda _: None,
            )
            registry.register_provider(provider)
        providers = report()["results"]["providers"]
        assert [p["name"] for p in providers["rms_norm"]] == ["fast", "slow", "reference"]
        assert providers.keys() == OPS.keys()
        out = run()[1]
        assert "fast (not here: needs sm100, this is x86_64), slow, reference: 1 ops" in out
        assert f"  reference: {len(OPS) - 1} ops" in out

    def test_our_variables_and_what_is_wrong_with_them(self, monkeypatch):
        monkeypatch.setenv("FLASHREPLAY_BACKEND", "cuda")
        monkeypatch.setenv("FLASHREPLAY_NUM_THREADS", "2")
        monkeypatch.setenv("FLASHREPLAY_LOGLEVEL", "info")
        document = report()
        rows = {row["name"]: row for row in document["results"]["variables"]}
        names = {variable_name(name) for name in fields_by_name(EnvSettings)}
        assert rows.keys() == names | {"FLASHREPLAY_LOGLEVEL"}
        assert rows["FLASHREPLAY_NUM_THREADS"]["problem"] is None
        assert "BackendUnavailable" in rows["FLASHREPLAY_BACKEND"]["problem"]
        assert "FLASHREPLAY_LOG_LEVEL?" in rows["FLASHREPLAY_LOGLEVEL"]["problem"]
        assert document["config"]["FLASHREPLAY_NUM_THREADS"] == "2"


def missing_metadata(name):
    raise installation.importlib.metadata.PackageNotFoundError(name)
