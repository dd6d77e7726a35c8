"""python -m runtime.env_report: versions, devices, capabilities, providers, and what is missing."""

import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime import cli
from runtime.installation import describe_installation

PROG = "python -m runtime.env_report"
SCHEMA = "flashreplay.env_report/1"
_WIDTH = 100


def make_parser() -> cli.CommandParser:
    """Return the command's parser."""
    parser = cli.CommandParser(
        prog=PROG,
        description="Print versions, devices, capabilities, providers, and what is missing for "
        "what. Ends with 0 whatever it finds.",
        examples=(PROG, f"{PROG} --json report.json"),
    )
    parser.add_argument(
        "--json",
        dest="json_path",
        metavar="PATH|-",
        help="write the report as one JSON object; - is stdout, in place of the text "
        "(default: text alone)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = make_parser().parse_args(argv)
    results = describe_installation(os.environ)
    if args.json_path is not None:
        settings = {v["name"]: v["value"] for v in results["variables"]}
        cli.write_json(
            args.json_path,
            {
                "schema": SCHEMA,
                "config": settings,
                "environment": cli.environment(),
                "results": results,
            },
        )
    if args.json_path != "-":
        sys.stdout.write("\n".join(report_lines(results)) + "\n")
    return cli.EXIT_DONE


def report_lines(results: Mapping[str, Any]) -> list[str]:
    """Return the report as text."""
    environment = cli.environment()
    lines = [
        f"flashreplay {environment['flashreplay'] or '(not installed, run from a checkout)'}, "
        f"Python {environment['python']}, {environment['system']}",
        *("", "packages"),
        *_table((p["name"], _version(p), p["needed_for"]) for p in results["packages"]),
        *("", "devices"),
        *_table(_device_rows(results)),
        *("", "backends"),
        *_table(
            (b["name"], "available" if b["is_available"] else b["reason"])
            for b in results["backends"]
        ),
        *(f"  {b['name']}: {b['note']}" for b in results["backends"] if b["note"]),
        *("", "providers (the first that takes a call runs it)"),
        *_provider_lines(results["providers"]),
        *("", "environment variables"),
        *_table(
            (v["name"], "not set" if v["value"] is None else ascii(v["value"]), v["problem"] or "")
            for v in results["variables"]
        ),
    ]
    if results["hub"] is not None:
        hub = results["hub"]
        mode = "offline" if hub["is_offline"] else hub["endpoint"]
        lines += [
            "",
            "hub",
            f"  {mode}, cache {hub['cache']}, {_gigabytes(hub['free_bytes'])} free",
        ]
    lines += ["", "missing"]
    lines += _table((m["what"], f"for {m['needed_for']}", m["remedy"]) for m in results["missing"])
    return lines


def _version(package: Mapping[str, Any]) -> str:
    if not package["is_installed"]:
        return "not installed"
    return package["version"] or "installed, version unknown"


def _device_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    cpu, capability = results["cpu"], results["capability"]
    rows: list[tuple[str, ...]] = [
        ("cpu", cpu["model"], f"{cli.available_cores()} cores", " ".join(cpu["isa"]))
    ]
    if capability is not None:
        memory = (
            f"{_gigabytes(capability['available_bytes'])} of "
            f"{_gigabytes(capability['total_bytes'])} available"
        )
        verified = "verified" if capability["verified"] else "unverified on hardware"
        rows.append(("", capability["arch"], memory, verified))
    rows.append(("", "C++ compiler", cpu["compiler"] or "none", ""))
    for index, device in enumerate(results["devices"]["cuda"]):
        memory = f"{_gigabytes(device['total_bytes'])}, CUDA {device['cuda']}"
        rows.append((f"cuda:{index}", device["name"], device["arch"], memory))
    for index, device in enumerate(results["devices"]["ascend"]):
        rows.append((f"npu:{index}", device["name"], "", "unverified on hardware"))
    if results["torch_problem"] is not None:
        rows.append(("", "torch cannot be imported", results["torch_problem"], ""))
    else:
        rows += [
            (name, "none that torch can see", "", "")
            for name, found in results["devices"].items()
            if not found
        ]
    return rows


def _provider_lines(providers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Group ops whose providers are the same, as almost all are."""
    groups: dict[str, list[str]] = {}
    for op, known in providers.items():
        text = ", ".join(
            p["name"] + (f" (not here: {p['refusal']})" if p["refusal"] else "") for p in known
        )
        groups.setdefault(text, []).append(op)
    lines = []
    for text, ops in groups.items():
        lines.append(f"  {text}: {len(ops)} ops")
        names = textwrap.fill(", ".join(ops), _WIDTH - 4)
        lines += textwrap.indent(names, "    ").splitlines()
    return lines


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with aligned columns."""
    cells = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


if __name__ == "__main__":
    sys.exit(cli.run_main(main))
