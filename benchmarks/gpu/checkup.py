"""grpofit on a CUDA card: is it right there, how fast, how lean. Started by run.sh; no network, no model files.

    checkup.py                       everything, at most 8 minutes
    checkup.py --only packing decode
    checkup.py --cpu-dry             the same on tiny models without a GPU: exercises the logic, measures nothing

Every section is a process of its own under a cap of memory, so that one that fails or runs out of memory leaves the
others alone. Results go to results/. Exit code 1 if a check failed or a section broke, 0 if all passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src")]
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")
# As on a user's machine with a card of this size; the caching allocator then wastes less.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

BUDGET_S = 465.0  # of all sections: 8 minutes less the start
CAP_GIB = 24.0
_MARGIN_S = 3.0
_DRY_PATIENCE = 10  # a dry run measures nothing, and may share its cores


@dataclass(frozen=True)
class Section:
    """`function` of `module` gets a folder and whether models are tiny. A section of checks yields them; one that
    measures returns figures. `limit_s`: stopped after so long."""

    module: str
    function: str
    limit_s: float


SECTIONS = {
    "packing": Section("checks", "check_packing", 110),
    "logprobs": Section("checks", "check_logprobs", 50),
    "recompute": Section("checks", "check_recompute", 80),
    "decode": Section("checks", "check_decode", 90),
    "modes": Section("speed", "measure_modes", 70),
    "decode speed": Section("speed", "measure_decode", 90),
    "grpofit": Section("speed", "measure_ours", 90),
    "trl": Section("speed", "measure_trl", 120),
    "trl, liger": Section("speed", "measure_trl_liger", 120),
}


def run_section(name: str, tiny: bool, result: Path) -> None:
    """In the section's own process: cap the memory, run, write what came out."""
    import importlib

    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_GIB * 2**30 / total))
    section = SECTIONS[name]
    function: Callable[[Path, bool], Any] = getattr(importlib.import_module(section.module), section.function)
    record: dict[str, Any] = {"checks": [], "figures": {}}
    with tempfile.TemporaryDirectory() as folder:
        try:
            if section.module == "checks":
                for check in function(Path(folder), tiny):
                    record["checks"].append({**asdict(check), "passed": check.passed})
                    print(f"  {'ok  ' if check.passed else 'FAIL'} {check.name}: {check.value:.2e}, at most "
                          f"{check.limit:.2e}", flush=True)  # fmt: skip
                    result.write_text(json.dumps(record))
            else:
                record["figures"] = function(Path(folder), tiny)
        except Exception as error:
            record["broken"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    result.write_text(json.dumps(record))


def run_all(names: list[str], tiny: bool, folder: Path) -> dict[str, Any]:
    """Each section in turn while there is time; its record, or why there is none."""
    started = time.monotonic()
    patience = _DRY_PATIENCE if tiny else 1
    records: dict[str, Any] = {}
    for name in names:
        left = patience * BUDGET_S - (time.monotonic() - started)
        if left < _MARGIN_S:
            records[name] = {"broken": "not run: the time is up"}
            continue
        print(f"\n{name}", flush=True)
        result = folder / f"{name.replace(' ', '-').replace(',', '')}.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--result", str(result)]
        began = time.monotonic()
        limit = min(left, patience * SECTIONS[name].limit_s)
        try:
            code = subprocess.run(command + ["--cpu-dry"] * tiny, timeout=limit, check=False).returncode
            problem = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"stopped after {limit:.0f} s"
        record = json.loads(result.read_text()) if result.is_file() else {}
        if problem and "broken" not in record:
            record["broken"] = problem
        records[name] = record | {"seconds": time.monotonic() - began}
        show_figures(record.get("figures", {}))
    return records


def show_figures(figures: dict[str, Any]) -> None:
    """Plain numbers of a section that measures, one line each."""
    for key, value in figures.items():
        if isinstance(value, dict):
            known = {k: v for k, v in value.items() if isinstance(v, int | float | str)}
            parts = (f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in known.items())
            print(f"  {key}: " + ", ".join(parts))
        elif isinstance(value, int | float):
            print(f"  {key} {value:,.2f}")
        elif isinstance(value, str):
            print(f"  {key}: {value}")


def expectations(records: dict[str, Any]) -> list[dict[str, Any]]:
    """What figures of different runs must satisfy on a card: a mode that saves nothing there is a failure."""
    found = []

    def expect(name: str, value: float | None, limit: float | None) -> None:
        if value is not None and limit is not None:
            found.append({"name": name, "value": value, "limit": limit, "passed": value <= limit})

    modes = {name: f.get("allocated_gib") for name, f in records.get("modes", {}).get("figures", {}).items()}
    order = ("none", "selective", "full", "offload")
    for more, less in pairwise(order):
        expect(f"peak of checkpointing {less} against {more}, GiB", modes.get(less), modes.get(more))
    expect("peak packed against plain rows, GiB", modes.get("full"), modes.get("plain rows, full logits, full"))
    decode = records.get("decode speed", {}).get("figures", {})
    if decode and modes.get("none") is not None:
        expect("model.generate's tokens/s against ours", decode["generate_tokens_per_s"], decode["engine_tokens_per_s"])
    return found


def compared(records: dict[str, Any]) -> list[str]:
    """grpofit beside TRL, one line a TRL run."""
    ours = records.get("grpofit", {}).get("figures", {})
    lines = []
    for name in ("trl", "trl, liger"):
        theirs = records.get(name, {}).get("figures", {})
        if "skipped" in theirs:
            lines.append(f"{name}: not compared, {theirs['skipped']}")
        elif ours and theirs:
            line = f"step {ours['step_s'] / theirs['step_s']:.2f} of {name}'s ({theirs['step_s']:.2f} s)"
            for key in ("allocated_gib", "reserved_gib"):
                if ours[key] is not None:
                    line += f", {key.removesuffix('_gib')} {ours[key]:.2f} against {theirs[key]:.2f} GiB"
            lines.append(line)
    return lines


def environment() -> dict[str, Any]:
    """Versions and the device."""
    import importlib.metadata as metadata

    import torch

    versions = {}
    for package in ("torch", "transformers", "trl", "liger_kernel", "triton", "flash_attn"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "-"
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if cuda else "CPU",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))) if cuda else "",
        "cap_gib": CAP_GIB,
        "cuda": torch.version.cuda,
        **versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--cpu-dry", action="store_true", help="tiny models, on the CPU where there is no GPU")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        run_section(arguments.section, arguments.cpu_dry, arguments.result)
        return 0
    described = environment()
    tiny = arguments.cpu_dry
    if described["device"] == "CPU" and not tiny:
        print("torch sees no GPU here: tiny models on the CPU instead, which checks the logic and measures nothing")
        tiny = True
    print(", ".join(f"{key} {value}" for key, value in described.items() if value))
    with tempfile.TemporaryDirectory() as folder:
        records = run_all(arguments.only, tiny, Path(folder))
    return finish(described, records, tiny, arguments.out)


def finish(described: dict[str, Any], records: dict[str, Any], tiny: bool, out: Path) -> int:
    """Write the results, print the summary; the exit code."""
    expected = expectations(records)
    checks = [check for record in records.values() for check in record.get("checks", [])] + expected
    failed = [check for check in checks if not check["passed"]]
    broken = {name: record["broken"] for name, record in records.items() if "broken" in record}
    # A run of some sections must not take the place of a whole one.
    partial = "" if set(records) == set(SECTIONS) else "-" + "-".join(records).replace(", ", "-").replace(" ", "-")
    device = described["device"].lower().replace(" ", "-") + ("-dry" if tiny else "") + partial
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{device}.json"
    record = {"date": time.strftime("%Y-%m-%d %H:%M"), "environment": described, "tiny": tiny}
    path.write_text(json.dumps(record | {"sections": records, "expectations": expected}, indent=1) + "\n")
    print(f"\nsummary: {len(checks) - len(failed)} of {len(checks)} checks passed, in "
          f"{sum(r.get('seconds', 0.0) for r in records.values()):.0f} s")  # fmt: skip
    for check in failed:
        print(f"  FAIL    {check['name']}: {check['value']:.3g}, at most {check['limit']:.3g}")
    for name, reason in broken.items():
        print(f"  BROKEN  {name}: {reason}")
    for line in compared(records):
        print(f"  {line}")
    print(f"  results: {path}")
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
