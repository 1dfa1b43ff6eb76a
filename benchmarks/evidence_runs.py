"""Trains one small model with the project's trainer, exports it, and measures it: what feedback_evidence.py runs."""

import contextlib
import dataclasses
import json
import os
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy
import torch
from transformers.utils import logging as transformers_logging

from megatron_fbt.analysis.accuracy import accuracy_by_passes, generation_accuracy
from megatron_fbt.analysis.fixed_point import iterate
from megatron_fbt.analysis.layer_inputs import layer_inputs
from megatron_fbt.analysis.probe import cross_validate, fold_numbers
from megatron_fbt.analysis.rows import indexed_rows
from megatron_fbt.analysis.run_fixed_point import FixedPointOptions
from megatron_fbt.analysis.run_fixed_point import measure as measure_fixed_point
from megatron_fbt.analysis.tasks import TASKS, TaskRows, write_rows
from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.indexed import IndexedWriter
from megatron_fbt.hf.convert import Conversion, convert_checkpoint
from megatron_fbt.inference.text import load_network
from megatron_fbt.pretrain import main as pretrain

BYTES = "bytes"
SHOWN_PASSES = (1, 2, 3, 5, 10)
TEST_SEED, LONG_SEED, PROBE_SEED = 10_001, 10_002, 10_003
"""Of rows that no model was trained on; the training rows have the runs' seeds."""
BYTE_VALUES = 128
"""Other bytes become the last one."""
VALIDATION_SHARE = 0.05

Schedule = Tuple[Tuple[float, Tuple[Tuple[int, float], ...]], ...]


@dataclass(frozen=True)
class Size:
    """How much is trained and measured.

    Attributes:
        units: Passes forward and backward over one batch that a run of a task has, all its steps together.
        byte_units: The same of the byte model.
        length: Positions of a row of the tasks.
        batch: Rows of a batch.
        byte_length: Positions of a row of the byte model.
        byte_batch: Rows of its batch.
        warmup_steps: Of the learning rate.
        test_rows: Rows that are measured.
        byte_rows: Rows that the byte model's loss is measured on, and as many that it is iterated on.
        iterated_passes: Passes of the iteration to the fixed point.
    """

    units: int = 3000
    byte_units: int = 1600
    length: int = 32
    batch: int = 24
    byte_length: int = 160
    byte_batch: int = 8
    warmup_steps: int = 100
    test_rows: int = 512
    byte_rows: int = 48
    iterated_passes: int = 300

    def units_of(self, experiment: str) -> int:
        """Passes over a batch that a run of an experiment has."""
        return self.byte_units if experiment == BYTES else self.units

    @property
    def measured(self) -> Dict[str, int]:
        """What a result depends on, beside the run's steps."""
        return {name: value for name, value in dataclasses.asdict(self).items() if not name.endswith("units")}


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        experiment: A task, or BYTES.
        name: Of the model, in the table.
        schedule: Phases (from_fraction, ((passes, probability), ...)).
        seed: run.seed, and that of the training rows.
        steps: Optimizer steps.
    """

    experiment: str
    name: str
    schedule: Schedule
    seed: int
    steps: int

    @property
    def max_passes(self) -> int:
        """Largest pass count of the schedule."""
        return max(count for _, mix in self.schedule for count, _ in mix)

    @property
    def folder(self) -> str:
        """Name of the run folder."""
        return f"{self.experiment}-{self.name.replace(' ', '_').replace('/', '-')}-{self.seed}"


def mean_passes(schedule: Schedule) -> float:
    """Expected passes of a step."""
    ends = [begin for begin, _ in schedule[1:]] + [1.0]
    return sum((end - begin) * sum(k * share for k, share in mix) for (begin, mix), end in zip(schedule, ends))


def rows_file(folder: Path, experiment: str, seed: int) -> Path:
    """Where the training rows of an experiment are; the byte models share one text, in an order by their seeds."""
    return folder / (f"{BYTES}-rows.jsonl" if experiment == BYTES else f"{experiment}-rows-{seed}.jsonl")


def held_out_data(folder: Path) -> str:
    """Prefix of the data set with the bytes that no model is trained on, as tools/fixed_point.py --data reads it."""
    return str(folder / f"{BYTES}-held_out")


def prepare(folder: Path, experiment: str, seed: int, size: Size) -> None:
    """Write the training rows of an experiment, which every model with this seed reads, and the held-out bytes."""
    if experiment == BYTES:
        train, held_out = byte_rows(size.byte_length)
        rows = TaskRows(train[:, :-1], train[:, 1:])
        writer = IndexedWriter(held_out_data(folder), BYTE_VALUES)
        writer.add(held_out.flatten().numpy(), numpy.array([held_out.numel()]))
        writer.finish()
        writer.publish()
    else:
        generator = torch.Generator().manual_seed(seed)
        rows = TASKS[experiment].rows(size.units_of(experiment) * size.batch, size.length, generator)
    path = rows_file(folder, experiment, seed)
    unfinished = path.with_suffix(".part")
    write_rows(rows, unfinished)
    unfinished.rename(path)


def byte_rows(length: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library's top-level modules, [rows, length + 1]: for training, and held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    content = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    content = content.long().clamp(max=BYTE_VALUES - 1)
    rows = content[: len(content) // (length + 1) * (length + 1)].view(-1, length + 1)
    first_held_out = round(len(rows) * (1 - VALIDATION_SHARE))
    return rows[:first_held_out], rows[first_held_out:]


def configuration(folder: Path, run: Run, size: Size) -> PretrainConfig:
    """The trainer's configuration of a run."""
    config = PretrainConfig()
    is_bytes = run.experiment == BYTES
    batch = size.byte_batch if is_bytes else size.batch
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 2, 64, 4
    config.model.vocab_size = BYTE_VALUES if is_bytes else TASKS[run.experiment].vocab_size
    config.model.make_vocab_size_divisible_by = 8
    # Chosen on seeds 10 and 11. Larger: one pass alone learns more of the tasks. Smaller: cot5 is learned late.
    config.model.init_method_std = 0.09
    config.feedback.schedule = [PassPhase(begin, dict(mix)) for begin, mix in run.schedule]
    config.feedback.prefix.probability = 0.0
    config.feedback.prefix.granularity = "prompt" if run.experiment == "cot5" else "row"
    config.precision.dtype = "fp32"
    config.optimizer.lr, config.optimizer.lr_warmup_steps = 3e-3, min(size.warmup_steps, run.steps // 4)
    config.optimizer.adam_beta2, config.optimizer.weight_decay = 0.98, 0.05
    config.data.format, config.data.split = "labelled", "1,0,0"
    config.data.paths = [str(rows_file(folder, run.experiment, run.seed))]
    config.data.sequence_length = size.byte_length if is_bytes else size.length
    config.data.cache_dir = str(folder / "data_cache")
    config.training.train_steps, config.training.eval_iters = run.steps, 0
    config.training.micro_batch_size = config.training.global_batch_size = batch
    config.logging.log_interval, config.logging.diagnostics_interval = 200, None
    config.logging.tensorboard = False
    config.run.dir, config.run.seed = str(folder / run.folder), run.seed
    return config


def train_and_measure(folder: Path, run: Run, size: Size) -> Dict[str, Any]:
    """Train, export, measure; what the trainer prints goes to a file beside the run folder.

    The result is kept there too; a run that has one of as many steps, measured alike, is not repeated, and one that was
    cut off goes on.

    Raises:
        RuntimeError: Training has failed.
    """
    kept = folder / f"{run.folder}.json"
    if kept.exists():
        result = json.loads(kept.read_text(encoding="utf-8"))
        if (result["steps"], result["measured"]) == (run.steps, size.measured):
            return result
    result = {**_train_and_measure(folder, run, size), "measured": size.measured}
    kept.write_text(json.dumps(result), encoding="utf-8")
    return result


def _train_and_measure(folder: Path, run: Run, size: Size) -> Dict[str, Any]:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    began, cpu_began = time.perf_counter(), time.process_time()
    config = configuration(folder, run, size)
    config_file, log = folder / f"{run.folder}.yaml", folder / f"{run.folder}.log"
    config_file.write_text(dump_yaml(config), encoding="utf-8")
    with open(log, "w", encoding="utf-8") as output, contextlib.redirect_stdout(output):
        with contextlib.redirect_stderr(output):
            code = pretrain(["--config", str(config_file)])
            if code != 0:
                raise RuntimeError(f"training {run.folder} ended with exit code {code}; see {log}")
            trained_s = time.perf_counter() - began
            convert_checkpoint(config.run.dir, export_of(folder, run), Conversion(format="fbt", force=True))
            measured = (measure_bytes if run.experiment == BYTES else measure_task)(folder, run, size)
    tokens = run.steps * config.training.global_batch_size * config.data.sequence_length
    return {
        **dataclasses.asdict(run),
        "tokens": tokens,
        "token_equivalents": token_equivalents(Path(config.run.dir)),
        "train_seconds": trained_s,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        **measured,
    }


def token_equivalents(run_folder: Path) -> int:
    """Of a finished run, as it counted them itself."""
    return json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])["token_equivalents"]


def test_rows(experiment: str, count: int, length: int, seed: int) -> TaskRows:
    """Fresh rows of a task."""
    return TASKS[experiment].rows(count, length, torch.Generator().manual_seed(seed))


def export_of(folder: Path, run: Run) -> Path:
    """Folder of a run's exported model."""
    return folder / run.folder / "export"


def measure_task(folder: Path, run: Run, size: Size) -> Dict[str, Any]:
    """Accuracy by passes at the trained length, at twice that length, of free generation; the probe of fsm."""
    model, found = load_network(export_of(folder, run), "cpu"), {}
    single = run.max_passes == 1
    kinds = [("trained_length", size.length, TEST_SEED), ("double_length", 2 * size.length, LONG_SEED)]
    for name, length, seed in kinds[: 1 if run.experiment == "cot5" else 2]:
        rows = test_rows(run.experiment, size.test_rows, length, seed)
        passes = [1] if single else sorted({*(k for k in SHOWN_PASSES if k < length), length})
        accuracy = accuracy_by_passes(model, rows, passes)
        found[name] = {str(k): dataclasses.asdict(value) for k, value in accuracy.items()}
    if run.experiment == "cot5":
        rows = test_rows(run.experiment, size.test_rows, size.length, TEST_SEED)
        regimes = ["standard"] if single else ["standard", "soft"]
        found["generation"] = {name: dataclasses.asdict(generation_accuracy(model, rows, name)) for name in regimes}
    if run.experiment == "fsm" and not single:
        found["probe"] = probe_state(model, run.experiment, size)
    return found


def probe_state(model: Any, experiment: str, size: Size) -> Dict[str, float]:
    """Can the state before a position be read off what the first layer gets there? By fused passes over the prompt."""
    rows = test_rows(experiment, size.test_rows, size.length, PROBE_SEED)
    states = rows.labels[:, :-1]
    _, facts = states.flatten().unique(return_inverse=True)
    folds = fold_numbers(torch.arange(len(states)).repeat_interleave(states.shape[1]), 2, seed=0)
    read = layer_inputs(model, rows.input_ids, [0], ["plain", "fused1"])
    found = {}
    for (_, regime), vectors in read.items():
        result = cross_validate(vectors[:, 1:].flatten(0, 1), facts, folds, l2=1.0)
        found.update({regime: result.accuracy, "majority": result.majority})
    return found


def measure_bytes(folder: Path, run: Run, size: Size) -> Dict[str, Any]:
    """Loss on held-out bytes by passes; with more than one, all that tools/fixed_point.py finds and draws."""
    options = FixedPointOptions(
        str(export_of(folder, run)),
        data=held_out_data(folder),
        passes=size.iterated_passes,
        rows=size.byte_rows,
        batch=16,
        device="cpu",
        output=str(folder / f"{run.folder}-fixed_point"),
    )
    if run.max_passes == 1:  # nothing to iterate, but the same rows
        model = load_network(options.model, "cpu")
        rows = indexed_rows(options.data, BYTE_VALUES, None, None, options.rows, size.byte_length, options.seed)
        series = iterate(model, rows.input_ids, passes=1, batch=16, document_starts=rows.document_starts)
        return {"losses": series.losses, "update_norms": series.update_norms}
    report = measure_fixed_point(options)
    kept = {name: report[name] for name in ("trained_passes", "contraction", "gap", "alarm", "verdict")}
    return {"losses": report["loss"], "update_norms": report["update_norm"], "stability": kept}


def environment() -> None:
    """One thread for each process that is started from here; quiet libraries."""
    os.environ.update(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", TOKENIZERS_PARALLELISM="false")
