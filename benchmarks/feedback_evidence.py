"""What feedback is good for and what not, at a size that two CPU cores train: standard transformers against FBT.

    OMP_NUM_THREADS=1 python benchmarks/feedback_evidence.py        (less than 40 minutes on 2 idle cores)

Needs the extra `plots`: the byte models that are trained with feedback are iterated by what tools/fixed_point.py does.

Every model has 2 layers of width 64 and is trained by this project's trainer; within an experiment all have the same
number of token-equivalents (tokens x passes), so that FBT sees fewer tokens. Seeds 0, 1 and 2 are all printed; a bar
holds for the median of the three. The exit code is 1 if one is missed.

Columns p=k: accuracy (for bytes: loss in nats) of k parallel passes on fresh rows; p=T is the recurrence that decoding
follows. 2T: the recurrence (for a standard transformer, its one pass) on rows of twice the trained length.

The tasks are short of compute on purpose: with more of it and larger initial weights, one standard transformer in a
trial learned the parity of 32 bits as well; and with 4000 passes over a batch instead of 3000, STANDARD was only 0.073
behind SOFT in cot5 (median of seeds 0, 1, 2: 0.132, 0.073, 0.062).
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent))

from evidence_runs import (  # noqa: E402
    BYTES,
    SHOWN_PASSES,
    Run,
    Schedule,
    Size,
    environment,
    mean_passes,
    prepare,
    rows_file,
    train_and_measure,
)

from megatron_fbt.analysis.plots import require_matplotlib  # noqa: E402
from megatron_fbt.errors import ConfigError  # noqa: E402

ONE: Schedule = ((0.0, ((1, 1.0),)),)
THREE: Schedule = ((0.0, ((3, 1.0),)),)
TWO: Schedule = ((0.0, ((2, 1.0),)),)
SEVENTY_FIVE_25: Schedule = ((0.0, ((1, 1.0),)), (0.75, ((2, 1.0),)))
SEVENTY_FIVE_22_3: Schedule = ((0.0, ((1, 1.0),)), (0.75, ((2, 0.88), (3, 0.12))))
HALF_TWO_THREE: Schedule = ((0.0, ((1, 1.0),)), (0.5, ((2, 0.5), (3, 0.5))))

STANDARD, FBT, FEWER_TOKENS = "standard", "FBT", "standard, FBT's tokens"
TWO_ONLY, NO_THIRD, PROGRESSIVE = "2 passes only", "FBT 75/25/0", "FBT 75/22/3"
MODELS: Dict[str, Dict[str, Schedule]] = {
    "parity": {STANDARD: ONE, FBT: THREE},
    "fsm": {STANDARD: ONE, FBT: THREE},
    "cot5": {STANDARD: ONE, FBT: HALF_TWO_THREE},
    BYTES: {STANDARD: ONE, FEWER_TOKENS: ONE, TWO_ONLY: TWO, NO_THIRD: SEVENTY_FIVE_25, PROGRESSIVE: SEVENTY_FIVE_22_3},
}
QUICK = Size(24, 16, 8, 4, 16, 4, 4, 16, 4, 6)

Result = Dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """A number that the median over the seeds must reach.

    Attributes:
        text: What is measured.
        experiment: Which results.
        model: Their model.
        value: Takes the number from a result.
        at_least: Lower limit; None = there is none.
        at_most: Upper limit; None = there is none.
    """

    text: str
    experiment: str
    model: str
    value: Callable[[Result], float]
    at_least: float = float("-inf")
    at_most: float = float("inf")


def _accuracy(kind: str, passes: str = "last") -> Callable[[Result], float]:
    return lambda result: _pick(result[kind], passes)["tokens"]


def _pick(by_passes: Dict[str, Any], passes: str) -> Any:
    return by_passes[max(by_passes, key=int) if passes == "last" else passes]


def _generated(regime: str) -> Callable[[Result], float]:
    return lambda result: result["generation"][regime]["tokens"]


BARS = (
    Bar("parity, RECURRENT, T", "parity", FBT, _accuracy("trained_length"), at_least=0.95),
    Bar("parity, RECURRENT, 2T", "parity", FBT, _accuracy("double_length"), at_least=0.75),
    Bar("parity, standard, T", "parity", STANDARD, _accuracy("trained_length"), at_most=0.72),
    Bar("fsm, RECURRENT, T", "fsm", FBT, _accuracy("trained_length"), at_least=0.97),
    Bar("fsm, standard, T", "fsm", STANDARD, _accuracy("trained_length"), at_most=0.90),
    Bar("fsm, layer-0 probe, plain pass", "fsm", FBT, lambda r: r["probe"]["plain"], at_most=0.4),
    Bar("fsm, layer-0 probe, one fused pass", "fsm", FBT, lambda r: r["probe"]["fused1"], at_least=0.6),
    Bar("cot5, SOFT, tokens", "cot5", FBT, _generated("soft"), at_least=0.93),
    Bar(
        "cot5, SOFT above STANDARD, same weights",
        "cot5",
        FBT,
        lambda r: _generated("soft")(r) - _generated("standard")(r),
        at_least=0.10,
    ),
)


def plan_runs(experiments: Sequence[str], seeds: Sequence[int], size: Size) -> List[Run]:
    """All runs; within an experiment each has the same expected token-equivalents, unless its name says otherwise."""
    runs = []
    for experiment in experiments:
        units = size.units_of(experiment)
        for seed in seeds:
            for name, schedule in MODELS[experiment].items():
                reference = SEVENTY_FIVE_22_3 if name == FEWER_TOKENS else schedule
                runs.append(Run(experiment, name, schedule, seed, int(units / mean_passes(reference))))
    return runs


def execute(folder: Path, runs: Sequence[Run], size: Size, workers: int) -> List[Result]:
    """Run everything in processes side by side; results in the order of the runs."""
    environment()
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        sources = {rows_file(folder, run.experiment, run.seed): (run.experiment, run.seed) for run in runs}
        missing = [source for path, source in sources.items() if not path.exists()]
        for done in [pool.submit(prepare, folder, *source, size) for source in missing]:
            done.result()
        submitted = {pool.submit(train_and_measure, folder, run, size): run for run in runs}
        results = {}
        for number, done in enumerate(as_completed(submitted), start=1):
            run = submitted[done]
            results[run] = done.result()
            place, seconds = f"[{time.monotonic() - began:5.0f} s] {number}/{len(runs)}", results[run]["seconds"]
            line = f"{place} {run.experiment}, {run.name}, seed {run.seed}: {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)
    return [results[run] for run in runs]


def table_row(result: Result) -> List[str]:
    """Cells of one run."""
    head = [result["experiment"], result["name"], str(result["seed"]), f"{result['steps']:,}"]
    head += [f"{result[name] / 1e6:.2f}" for name in ("tokens", "token_equivalents")]
    if result["experiment"] == BYTES:
        losses, norms = result["losses"], result["update_norms"]
        cells = [f"{losses[k - 1]:.3f}" if k <= len(losses) else "" for k in SHOWN_PASSES]
        cells += [f"{losses[-1]:.3f}" if len(losses) > 1 else "", ""]
        shown = [k for k in (2, 3, 10, 30, 100) if k <= len(norms) and norms[k - 1] is not None]
        notes = "update norm " + ", ".join(f"{norms[k - 1]:.1e} ({k})" for k in shown) if shown else ""
        rate = result.get("stability", {}).get("contraction", {}).get("rate")
        return [*head, *cells, notes + (f"; factor {rate:.2f} a pass" if rate else "")]
    by_passes = result["trained_length"]
    cells = [_percent(by_passes[str(k)]["tokens"]) if str(k) in by_passes else "" for k in SHOWN_PASSES]
    cells.append(_percent(_pick(by_passes, "last")["tokens"]) if len(by_passes) > 1 else "")
    double = result.get("double_length")
    cells.append(_percent(_pick(double, "last")["tokens"]) if double else "")
    notes = [
        f"{regime.upper()} {_percent(found['tokens'])} (whole rows {_percent(found['whole'])})"
        for regime, found in result.get("generation", {}).items()
    ]
    if "probe" in result:
        probe = {name: _percent(value) for name, value in result["probe"].items()}
        notes.append(f"probe {probe['plain']} plain, {probe['fused1']} fused once (majority {probe['majority']})")
    return [*head, *cells, "; ".join(notes)]


def _percent(share: float) -> str:
    return f"{share:.3f}"


def format_table(results: Sequence[Result]) -> str:
    """All runs."""
    header = [
        "experiment",
        "model",
        "seed",
        "steps",
        "Mtokens",
        "Mtok-eq",
        *(f"p={k}" for k in SHOWN_PASSES),
        "p=T",
        "2T",
    ]
    rows = [[*header, "generation, probe, stability"], *map(table_row, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for previous, row in zip([rows[0], *rows], rows):
        if previous[0] != row[0]:
            lines.append("")
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join([*cells[:-1], row[-1]]).rstrip())
    return "\n".join(lines)


def judge(results: Sequence[Result]) -> List[Dict[str, Any]]:
    """The bars whose experiments were run, with the median of the seeds."""
    found = []
    for bar in BARS:
        values = [
            bar.value(result)
            for result in results
            if (result["experiment"], result["name"]) == (bar.experiment, bar.model)
        ]
        if values:
            median = statistics.median(values)
            limit = f">= {bar.at_least:g}" if bar.at_least > float("-inf") else f"<= {bar.at_most:g}"
            holds = bar.at_least <= median <= bar.at_most
            found.append({"bar": bar.text, "values": values, "median": median, "limit": limit, "holds": holds})
    return found


def byte_summary(results: Sequence[Result]) -> List[Dict[str, Any]]:
    """For each byte model, the medians over the seeds: best loss, loss at the trained depth and at the last pass."""
    found = []
    for name in MODELS[BYTES]:
        runs = [result for result in results if (result["experiment"], result["name"]) == (BYTES, name)]
        if not runs:
            continue
        depth = max(count for _, mix in MODELS[BYTES][name] for count, _ in mix)
        losses = [run["losses"] for run in runs]
        found.append(
            {
                "model": name,
                "best": statistics.median(min(values) for values in losses),
                "trained_depth": depth,
                "trained": statistics.median(values[depth - 1] for values in losses),
                "passes": len(losses[0]),
                "last": statistics.median(values[-1] for values in losses),
                "gap": statistics.median(values[-1] - values[depth - 1] for values in losses),
                "verdicts": [run["stability"]["verdict"].split(":")[0] for run in runs if "stability" in run],
            }
        )
    return found


def conclusions(results: Sequence[Result], judged: Sequence[Dict[str, Any]]) -> str:
    """Bars, and what the byte models say."""
    lines = ["", "bars, on the median of the seeds:"]
    for bar in judged:
        values = ", ".join(_percent(value) for value in bar["values"])
        state = "holds " if bar["holds"] else "MISSED"
        lines.append(f"  {state}  {bar['bar']}: {_percent(bar['median'])} {bar['limit']}  ({values})")
    summary = byte_summary(results)
    if summary:
        lines += ["", "language modelling on bytes, nats per byte, medians of the seeds; verdicts of each (no bars):"]
    for row in summary:
        text = f"  {row['model']}: best pass {row['best']:.3f}"
        if row["passes"] > 1:
            text += (
                f"; trained depth of {row['trained_depth']} passes {row['trained']:.3f}, after {row['passes']} passes "
                f"{row['last']:.3f}: gap {row['gap']:+.3f}, {', '.join(row['verdicts'])}"
            )
        lines.append(text)
    cpu_s = sum(result["cpu_seconds"] for result in results)
    lines += ["", f"{len(results)} runs, {cpu_s:,.0f} CPU seconds: {cpu_s / 120:.0f} minutes on 2 idle cores"]
    return "\n".join(lines)


def main() -> int:
    """Run and print; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", action="append", default=[], choices=list(MODELS), help="this experiment only")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="0 1 2 unless for a quick look")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side")
    parser.add_argument("--output", type=Path, help="keep the runs here, and go on here later (default: none is kept)")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that the script runs; no bars")
    parser.add_argument("--json", action="store_true", help="results and bars as one JSON object")
    parser.add_argument("--units", type=int, help="passes over a batch in each run, for trials")
    args = parser.parse_args()
    size = QUICK if args.quick else Size()
    if args.units:
        size = replace(size, units=args.units, byte_units=args.units)
    experiments = args.only or list(MODELS)
    if BYTES in experiments:
        try:
            require_matplotlib()
        except ConfigError as error:
            parser.error(str(error))
    runs = plan_runs(experiments, args.seeds, size)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = execute(folder, runs, size, args.workers)
    judged = [] if args.quick else judge(results)
    if args.json:
        content = {"size": asdict(size), "runs": results, "bars": judged, "bytes": byte_summary(results)}
        print(json.dumps(content, indent=1))
    else:
        print(format_table(results))
        print(conclusions(results, judged), flush=True)
    return 0 if all(bar["holds"] for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
