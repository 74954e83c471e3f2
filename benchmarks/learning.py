"""Does it learn? Trains a packaged recipe with several seeds, one after the other, as a user would.

    python benchmarks/learning.py                          # smollm2-arithmetic, seeds 1 2 3
    python benchmarks/learning.py --recipe NAME --seeds 1 2 3 --json learning.json

For each seed: held-out accuracy before and after with its 95% Wilson interval, wall time of the whole process
(loading, evaluation and compilation included), steps, peak resident memory. Exit code 1 if a seed misses a goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train(recipe: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Summary of one run in a process of its own, with its wall time."""
    run_dir = folder / f"{recipe}-seed-{seed}"
    command = [sys.executable, "-m", "grpofit", "train", recipe, "--plain", "--out", str(run_dir)]
    for override in [f"run.seed={seed}", *overrides]:
        command += ["--set", override]
    started = time.perf_counter()
    with (folder / f"seed-{seed}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    summary = json.loads((run_dir / "summary.json").read_text())
    return {**summary, "process_s": time.perf_counter() - started}


def missed(result: dict[str, Any], goals: argparse.Namespace) -> list[str]:
    """Which goals a run missed, in words."""
    checks = {
        f"start under {goals.start_below}": result["accuracy_start"] < goals.start_below,
        f"end at least {goals.end_at_least}": result["accuracy_end"] >= goals.end_at_least,
        f"at most {goals.minutes} min": result["process_s"] <= 60 * goals.minutes,
    }
    return [goal for goal, met in checks.items() if not met]


def main() -> int:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--start-below", type=float, default=0.45)
    parser.add_argument("--end-at-least", type=float, default=0.85)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    results = []
    print(f"{args.recipe}, {os.cpu_count()} cores")
    print("seed  start        end   95% interval   process_s  step_s  peak_gib  goals", flush=True)
    with tempfile.TemporaryDirectory(prefix="grpofit-learning-") as folder:
        for seed in args.seeds:
            result = train(args.recipe, seed, Path(folder), args.overrides)
            result["missed"] = missed(result, args)
            results.append(result)
            print(
                f"{seed:4}  {result['accuracy_start']:.3f}  ->  {result['accuracy_end']:.3f}"
                f"   {result['accuracy_end_low']:.3f}-{result['accuracy_end_high']:.3f}"
                f"  {result['process_s']:10.0f}  {result['step_s_median']:6.1f}"
                f"  {result['peak_rss_bytes'] / 1024**3:8.2f}  {'; '.join(result['missed']) or 'met'}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"recipe": args.recipe, "results": results}, indent=1))
    return 1 if any(result["missed"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
