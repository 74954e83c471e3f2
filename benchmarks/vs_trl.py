"""grpofit and TRL's GRPOTrainer in turn, on the same work: time, memory, phases, and what the machine could do.

    python benchmarks/vs_trl.py                                         # three shapes, both of TRL's precisions
    python benchmarks/vs_trl.py --shapes demo --sides trl-bf16 grpofit --steps 3
    python benchmarks/vs_trl.py --trl-micro-batch 8 all --trl-checkpointing on off    # every way TRL has, where it fits
    python benchmarks/vs_trl.py --shapes guide_a --sides grpofit --set memory.packing=none --trl-from vs_trl.json
    python benchmarks/vs_trl.py --shapes --curves 1 2 3                 # only learning curves, three seeds

Model SmolLM2-135M, full fine-tuning, CPU, beta 0, one optimizer step per batch of rollouts, AdamW at a constant rate.
Every run is a process of its own; memory is that of the whole process. Each side's first step is warm-up. The ratios
are to the fastest of TRL's runs, in time and in memory. Exit code 1 if a goal is missed, 2 if a run failed.

Close other programs first: both sides lose when cores are shared, not by the same factor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from vs_trl_ours import model_size, run_ours
from vs_trl_process import ChildFailedError, run_watched
from vs_trl_rates import matmul_probe
from vs_trl_shapes import SHAPES, Shape, Work, prepare
from vs_trl_table import (
    HEADINGS,
    Verdict,
    better,
    compare,
    curve_gap,
    decode_bandwidth,
    row,
    same_work,
    summarise,
    training_rate,
    verdict,
)

from grpofit.units import GIB

HERE = Path(__file__).parent
SIDES = ("trl-fp32", "trl-bf16", "grpofit")
# Tokens in one forward and backward, and in one chunk of logprobs, at which the matmul rates are measured.
_RATE_TOKENS, _RATE_HEAD_TOKENS = 2048, 1024
# Rough, to leave out what would not fit: activations of a token in one of TRL's micro batches (measured, SmolLM2).
_TRL_TOKEN_BYTES = {"off": 2.2e6, "on": 0.9e6}
_TRL_FIXED_BYTES = {"float32": 2.9e9, "bfloat16": 1.8e9}
_STEADY = 1.25


class Session:
    """One call of this script: where files go, what is printed, how fast the machine was all along."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.probes: list[float] = []

    def work(self, shape: Shape, **changes: Any) -> Work:
        a = self.arguments
        options = {"steps": a.steps, "seed": a.seed, "lr": a.lr, "loss": a.loss, "temperature": a.temperature}
        return prepare(shape, self.folder / shape.name, **{**options, **changes})

    def probe(self) -> None:
        """Look how fast the machine is just now."""
        self.probes.append(matmul_probe())

    def child(self, script: str, spec: dict[str, Any], name: str) -> dict[str, Any]:
        """Run one of our scripts with SPEC and RESULT; its result with wall time and peak memory."""
        given, result, log = (self.folder / f"{name}.{ending}" for ending in ("spec.json", "json", "log"))
        given.write_text(json.dumps(spec | {"threads": self.arguments.threads}))
        environment = {"OMP_NUM_THREADS": str(self.arguments.threads)}
        ran = run_watched([sys.executable, str(HERE / script), str(given), str(result)], log, environment)
        given_back: dict[str, Any] = json.loads(result.read_text())
        return given_back | {
            "wall_s": ran.wall_s, "peak_rss_bytes": ran.peak_bytes, "helpers_bytes": ran.helpers_bytes,
        }  # fmt: skip

    def rates(self, work: Work) -> dict[str, Any]:
        spec = {"size": asdict(model_size(work.model)), "tokens": _RATE_TOKENS, "head_tokens": _RATE_HEAD_TOKENS}
        return self.child("vs_trl_rates.py", spec, "rates")


def trl_runs(work: Work, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The ways in which TRL is run, by name; what cannot fit into free memory is said and left out."""
    runs = {}
    free = int(next(x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x).split()[1]) * 1024
    for weights in ("float32", "bfloat16"):
        side = "trl-fp32" if weights == "float32" else "trl-bf16"
        for given in arguments.trl_micro_batch if side in arguments.sides else ():
            rows = work.shape.rows if given == "all" else min(int(given), work.shape.rows)
            for checkpointing in arguments.trl_checkpointing:
                name = f"{side} {rows} rows{', ckpt' if checkpointing == 'on' else ''}"
                tokens = rows * (work.shape.prompt_tokens + work.shape.completion_tokens)
                needed = tokens * _TRL_TOKEN_BYTES[checkpointing] + _TRL_FIXED_BYTES[weights]
                if needed > 0.9 * free:
                    print(f"{name:<28} not run: needs about {needed / GIB:.0f} GiB, {free / GIB:.0f} GiB are free")
                    continue
                runs[name] = work.as_dict() | {
                    "weights": weights, "autocast": True, "micro_batch": rows, "checkpointing": checkpointing == "on",
                    "device": "cpu",
                }  # fmt: skip
    return runs


def run_sides(session: Session, work: Work, cached: dict[str, Any]) -> dict[str, Any]:
    """Every side once a round, in turn; per side its records [round][step], settings, largest memory, wall time."""
    arguments = session.arguments
    calls: dict[str, Callable[[], dict[str, Any]]] = {}
    rates: list[dict[str, Any]] = []

    def ours() -> dict[str, Any]:
        rates.append(session.rates(work))
        result = run_ours(
            work, session.folder / work.shape.name / "ours", threads=arguments.threads, overrides=arguments.set
        )
        rates.append(session.rates(work))
        return result

    if not cached:
        for name, spec in trl_runs(work, arguments).items():
            label = f"{work.shape.name} {name}".replace(" ", "-").replace(",", "")
            calls[name] = partial(session.child, "vs_trl_theirs.py", spec, label)
    if "grpofit" in arguments.sides:
        calls["grpofit"] = ours
    runs: dict[str, Any] = dict(cached)
    for _ in range(arguments.rounds):
        for name, call in calls.items():
            session.probe()
            result = call()
            session.probe()
            run = runs.setdefault(name, {**result, "rounds": [], "wall_s": 0.0})
            run["rounds"].append(result["records"])
            run["wall_s"] += result["wall_s"] / arguments.rounds
            run["peak_rss_bytes"] = max(run["peak_rss_bytes"], result["peak_rss_bytes"])
            run.pop("records", None)
    return {"runs": runs, "rates": rates}


def run_shape(session: Session, shape: Shape, cached: dict[str, Any]) -> tuple[dict[str, Any], list[Verdict]]:
    """All sides of a shape, printed; the record for JSON, and the verdicts."""
    print(f"\n{shape.name}: {shape.prompts} prompts x {shape.group_size}, prompts of {'' if shape.fixed else 'up to '}"
          f"{shape.prompt_tokens} tokens, completions of {'' if shape.fixed else 'up to '}{shape.completion_tokens}, "
          f"reward {shape.reward}, {session.arguments.loss}")  # fmt: skip
    work = session.work(shape)
    record = run_sides(session, work, cached)
    runs = record["runs"]
    for problem in same_work(shape, runs):
        raise ChildFailedError(f"{shape.name}: the sides did not do the same work: {problem}")
    print(HEADINGS)
    summaries = {name: summarise(run, shape) for name, run in runs.items()}
    for name, summary in summaries.items():
        print(row(name, summary))
    for name, run in runs.items():
        print(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in run["settings"].items()))
    verdicts = compare(shape, summaries)
    say_best(summaries)
    if "grpofit" in runs:
        verdicts += own_rates(session, work, record)
    for line in verdicts:
        print(line.line())
    return record | {"summaries": summaries}, verdicts


def say_best(summaries: dict[str, dict[str, float]]) -> None:
    """Which of TRL's ways is fastest, which leanest."""
    fastest, leanest = better(summaries, "step_s"), better(summaries, "peak_bytes")
    if fastest and leanest:
        print(f"  fastest of TRL: {fastest} ({summaries[fastest]['step_s']:.2f} s a step), leanest: {leanest} "
              f"({summaries[leanest]['peak_bytes'] / GIB:.2f} GiB); compared with: {fastest}")  # fmt: skip


def own_rates(session: Session, work: Work, record: dict[str, Any]) -> list[Verdict]:
    """How much of the machine grpofit used, printed and put into the record."""
    run, size = record["runs"]["grpofit"], model_size(work.model)
    bandwidth = decode_bandwidth(run, run["state_bytes"]["weights"], record["rates"])
    print(f"  grpofit: sampling reads weights at {bandwidth['reached_bytes'] / 1e9:.2f} GB/s, "
          f"{bandwidth['share']:.0%} of a copy's {bandwidth['copy_bytes'] / 1e9:.1f} GB/s (read plus write); "
          f"helper processes {run['helpers_bytes'] / GIB:.2f} GiB of the peak")  # fmt: skip
    record["bandwidth"] = bandwidth
    rate = training_rate(run, size, record["rates"])
    if rate is None:
        return []
    record["matmul"] = rate
    trained = [r["trained"] for records in run["rounds"] for r in records[1:]]
    tokens, batches = (median(t[key] for t in trained) for key in ("tokens", "micro_batches"))
    print(f"  grpofit: {tokens:,.0f} tokens a step in {batches:.0f} micro batches, at "
          f"{rate['reached_flops'] / 1e12:.3f} TFLOP/s; matmuls of its shapes run at "
          f"{rate['matmul_flops'] / 1e12:.3f} TFLOP/s here")  # fmt: skip
    return [verdict(work.shape.name, "matmul", rate["share"])]


def run_decode(session: Session) -> tuple[dict[str, Any], list[Verdict]]:
    """Decoding against `model.generate`: the demo's own rollouts, and 32 rows of fixed length."""
    print("\ndecoding, tokens/s of completions, in turn in one process")
    demo, fixed = session.work(SHAPES["demo"]), session.work(SHAPES["decode_fixed"])
    record, verdicts = {}, []
    for name, work in (("decode demo", demo), ("decode fixed", fixed)):
        shape = work.shape
        spec = work.as_dict() | {
            "completion_tokens": shape.completion_tokens, "prompts": shape.prompts, "group_size": shape.group_size,
            "turns": session.arguments.decode_turns, "device": "cpu",
        }  # fmt: skip
        session.probe()
        result = session.child("vs_trl_decode.py", spec, name.replace(" ", "-"))
        rates = {side: f"{value:,.0f}" for side, value in result["tokens_per_s"].items()}
        print(f"  {name}: {result['rows']} rows, grpofit {rates['grpofit']}, generate {rates['generate']}; first call "
              f"{result['first_s']['grpofit']:.1f} s and {result['first_s']['generate']:.1f} s")  # fmt: skip
        record[name] = result
        verdicts.append(verdict(name, "decode", result["ratio"]))
        print(verdicts[-1].line())
    return record, verdicts


def run_curves(session: Session) -> tuple[dict[str, Any], bool]:
    """Rewards of both sides over the demo task, seed by seed; TRL with float32 weights, as our masters."""
    a = session.arguments
    print(f"\nlearning curves: demo, {a.curve_steps} steps, mean reward of each step")
    rewards: dict[str, list[list[float]]] = {"trl": [], "grpofit": []}
    for seed in a.curves:
        work = session.work(SHAPES["demo"], steps=a.curve_steps, seed=seed)
        spec = work.as_dict() | {
            "weights": "float32", "autocast": True, "micro_batch": 8, "checkpointing": False, "device": "cpu",
        }  # fmt: skip
        results = {
            "trl": session.child("vs_trl_theirs.py", spec, f"curve-{seed}"),
            "grpofit": run_ours(work, session.folder / f"curve-{seed}", threads=a.threads, overrides=a.set),
        }
        for side, result in results.items():
            rewards[side].append([record["logs"]["reward"] for record in result["records"]])
            print(f"  seed {seed} {side:<8} " + " ".join(f"{value:.2f}" for value in rewards[side][-1]))
    gap = curve_gap(rewards["grpofit"], rewards["trl"])
    print(f"  mean reward: grpofit {gap['grpofit']:.3f}, TRL {gap['trl']:.3f}, gap {gap['gap']:+.3f}, standard error "
          f"{gap['standard_error']:.3f} over {len(a.curves)} seeds: "
          + ("agree within noise" if gap["agree"] else "DIFFER"))  # fmt: skip
    return {"rewards": rewards, "seeds": a.curves, **gap}, bool(gap["agree"])


def cached_runs(arguments: argparse.Namespace, shape: str) -> dict[str, Any]:
    """TRL's runs of an earlier result; only for trying things out."""
    if arguments.trl_from is None:
        return {}
    earlier = json.loads(arguments.trl_from.read_text())
    for key in ("lr", "loss", "temperature", "seed", "threads"):
        if earlier["arguments"][key] != getattr(arguments, key):
            raise SystemExit(f"--trl-from: {arguments.trl_from} was made with --{key} {earlier['arguments'][key]}")
    if shape not in earlier["shapes"]:
        return {}
    print(f"NOTE: TRL's figures are from {arguments.trl_from} ({earlier['date']}), not from this run")
    return {name: run for name, run in earlier["shapes"][shape]["runs"].items() if name != "grpofit"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=("demo", "guide_a", "long_prompt"), default=None)
    parser.add_argument("--signal", choices=("task", "all", "both"), default="both", help="demo's reward: its own, "
                        "whose groups without signal grpofit skips; one that gives all a signal; or both")  # fmt: skip
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--steps", type=int, default=6, help="per run; the first is warm-up (default 6)")
    parser.add_argument("--rounds", type=int, default=1, help="all sides in turn, so often; steps are pooled")
    parser.add_argument("--trl-micro-batch", nargs="+", default=["8"], metavar="ROWS|all", help="TRL's default is 8")
    parser.add_argument("--trl-checkpointing", nargs="+", choices=("on", "off"), default=["on"])
    parser.add_argument("--trl-from", type=Path, metavar="FILE", help="take TRL's runs from an earlier --json FILE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for grpofit's side")
    parser.add_argument("--no-decode", action="store_true", help="leave the comparison with model.generate out")
    parser.add_argument("--decode-turns", type=int, default=5)
    parser.add_argument("--curves", nargs="*", type=int, default=[], metavar="SEED", help="learning curves, seeds")
    parser.add_argument("--curve-steps", type=int, default=20)
    parser.add_argument("--loss", choices=("grpo", "dapo"), default="grpo")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep specs, logs and prompts here")
    arguments = parser.parse_args(argv)
    if arguments.shapes is None:
        arguments.shapes = ["demo", "guide_a", "long_prompt"]
    variants = {"task": ["demo"], "all": ["demo_all"], "both": ["demo", "demo_all"]}[arguments.signal]
    arguments.shapes = [n for shape in arguments.shapes for n in (variants if shape == "demo" else [shape])]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    given = {key: value for key, value in vars(arguments).items() if key not in ("json", "keep", "trl_from")}
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"), "arguments": given, "torch": torch.__version__, "shapes": {}
    }  # fmt: skip
    verdicts: list[Verdict] = []
    agree = True
    with tempfile.TemporaryDirectory() as folder:
        session = Session(arguments, arguments.keep or Path(folder))
        session.folder.mkdir(parents=True, exist_ok=True)
        try:
            for name in arguments.shapes:
                record["shapes"][name], found = run_shape(session, SHAPES[name], cached_runs(arguments, name))
                verdicts += found
            if "grpofit" in arguments.sides and not arguments.no_decode:
                record["decode"], found = run_decode(session)
                verdicts += found
            if arguments.curves:
                record["curves"], agree = run_curves(session)
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            return 2
    finish(record, session, verdicts, arguments.json)
    return 0 if agree and all(v.met for v in verdicts) else 1


def finish(record: dict[str, Any], session: Session, verdicts: list[Verdict], file: Path | None) -> None:
    """The summary, whether the machine was steady, the JSON file."""
    print("\nsummary")
    for line in verdicts:
        print("  " + line.line())
    if session.probes:
        low, high = min(session.probes), max(session.probes)
        unsteady = "; NOT STEADY: ratios may be off by that factor" if high > _STEADY * low else ""
        print(f"  machine: a large bfloat16 matmul ran at {low / 1e12:.2f} to {high / 1e12:.2f} TFLOP/s{unsteady}")
    record["probes"] = session.probes
    record["verdicts"] = [{**asdict(v), "met": v.met} for v in verdicts]
    if file is not None:
        file.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
