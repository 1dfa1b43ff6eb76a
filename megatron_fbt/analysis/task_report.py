"""The same weights decoded with and without feedback, beside a standard transformer: tools/task_accuracy.py."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from megatron_fbt.analysis.accuracy import Accuracy, accuracy_by_passes, generation_accuracy
from megatron_fbt.analysis.plots import COLORS, new_figure, output_folder, require_matplotlib, save, save_report
from megatron_fbt.analysis.tasks import TASKS, TaskRows
from megatron_fbt.errors import BadNumbersError, CheckpointError, ConfigError
from megatron_fbt.inference.text import check_model_folder, load_network

PASSES = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass
class TaskReportOptions:
    """The command line; see tools/task_accuracy.py --help."""

    model: str
    baseline: Optional[str] = None
    task: str = "cot5"
    rows: int = 1000
    length: int = 32
    seed: int = 10_001
    output: str = "."


def measure(options: TaskReportOptions) -> Dict[str, Any]:
    """Let the models write answers, write task_accuracy.json and task_accuracy.png, return the report.

    Raises:
        ConfigError: An option without a meaning, or matplotlib is missing.
        CheckpointError: No exported model, one of another vocabulary than the task's, or a baseline with feedback.
        BadNumbersError: A model's logits are not finite.
    """
    rows = make_rows(options.task, options.rows, options.length, options.seed)
    require_matplotlib()
    for model in (options.model, options.baseline):
        if model is not None:
            check_model_folder(model)
    feedback = _load(options.model, options)
    baseline = None if options.baseline is None else _load(options.baseline, options)
    if baseline is not None and baseline.config.passes > 1:
        raise CheckpointError(
            f"baseline {options.baseline}: it was trained with {baseline.config.passes} passes, a standard transformer "
            "has one; if the two folders are swapped, give this one as --model"
        )
    by_passes = accuracy_by_passes(feedback, rows, [k for k in PASSES if k < options.length] + [options.length])
    folder = output_folder(options.output)
    found = {
        "FBT, SOFT": generation_accuracy(feedback, rows, "soft"),
        "FBT, STANDARD": generation_accuracy(feedback, rows, "standard"),
    }
    if baseline is not None:
        found["standard transformer"] = generation_accuracy(baseline, rows, "standard")
    report = {
        "task": options.task,
        "rows": options.rows,
        "length": options.length,
        "generated": {name: asdict(accuracy) for name, accuracy in found.items()},
        "given_answers": {str(k): asdict(accuracy) for k, accuracy in by_passes.items()},
    }
    save_report(report, folder / "task_accuracy.json")
    draw(options, found, folder / "task_accuracy.png")
    return report


def _load(folder: str, options: TaskReportOptions) -> Any:
    model, needed = load_network(folder).float(), TASKS[options.task].vocab_size
    if model.config.vocab_size != needed:
        raise CheckpointError(
            f"model {folder}: its vocabulary of {model.config.vocab_size} ids is not that of the task {options.task}, "
            f"which has {needed}; give a model that was trained on rows of this task"
        )
    if (trained := model.config.max_position_embeddings) < options.length:
        print(f"warning: rows of {options.length}, model {folder} was trained on rows of {trained}", file=sys.stderr)
    with torch.no_grad():
        if not model(torch.zeros(1, 2, dtype=torch.int64), regime="standard").logits.isfinite().all():
            raise BadNumbersError(f"model {folder}: its logits are not finite; its weights are bad")
    return model


def make_rows(task: str, rows: int, length: int, seed: int) -> TaskRows:
    """Rows of a task.

    Raises:
        ConfigError: There are none such.
    """
    if task not in TASKS:
        raise ConfigError(f"task={task}: there is no such task; give one of {', '.join(TASKS)}")
    for name, value, low in (("rows", rows, 1), ("length", length, 2), ("seed", seed, 0)):
        if value < low:
            raise ConfigError(f"{name}={value}: must be at least {low}")
    try:
        return TASKS[task].rows(rows, length, torch.Generator().manual_seed(seed))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def draw(options: TaskReportOptions, found: Dict[str, Accuracy], path: Path) -> None:
    """Accuracy along the answer, and whole answers."""
    length = len(next(iter(found.values())).by_position)
    title = f"{options.task}: {options.rows:,} answers of {length} tokens, written freely after a plain prompt"
    figure, (along, whole) = new_figure(2, title)
    for color, (name, accuracy) in zip(COLORS, found.items()):
        along.plot(range(1, length + 1), accuracy.by_position, color=color, marker="o", markersize=4, label=name)
    along.set(xlabel="token of the answer", ylabel="right tokens", ylim=(0, 1.04), title="token by token")
    along.legend(loc="lower left")
    shares = [accuracy.whole for accuracy in found.values()]
    bars = whole.bar(list(found), shares, color=COLORS[: len(found)], width=0.6)
    whole.bar_label(bars, fmt="{:.1%}", padding=2)
    whole.set(ylabel="answers without a mistake", ylim=(0, 1.08), title="whole answers")
    save(figure, path)


def describe(report: Dict[str, Any]) -> str:
    """A table for a person."""
    width = max(map(len, report["generated"]))
    lines: List[str] = [f"{'':<{width}}  right tokens  whole answers right"]
    for name, accuracy in report["generated"].items():
        lines.append(f"{name:<{width}}  {accuracy['tokens']:>12.1%}  {accuracy['whole']:>19.1%}")
    shown = ", ".join(f"{passes}: {accuracy['tokens']:.1%}" for passes, accuracy in report["given_answers"].items())
    lines.append(f"FBT reading the true answers, right tokens by parallel passes: {shown}")
    return "\n".join(lines)
