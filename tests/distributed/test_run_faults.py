"""Whole runs in real processes: moved between layouts, fed with bad numbers, stopped at awkward moments, damaged."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_fbt.config.load import dump_yaml
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import STEPS, checkpoint_of, rows_of, run, run_config, stop_before, write_corpus

SHARDED = {"optimizer__sharding": "megatron"}
# Runs that move: processes, (tensor, pipeline), settings, last step in this layout.
JOURNEYS = {
    "adamw": [
        (1, (1, 1), {}, 2),
        (2, (1, 1), SHARDED, 4),
        (2, (2, 1), {}, 6),
        (2, (1, 2), SHARDED, 8),
        (4, (2, 2), {}, 9),
        (4, (2, 1), SHARDED, 11),
        (4, (1, 2), {}, STEPS),
    ],
    "muon": [(1, (1, 1), {}, 3), (2, (1, 1), {}, 8), (2, (1, 2), {}, STEPS)],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def travel(rank, world_size, folder, corpus):
    """This world size's part of the journey; each leg first writes what it has loaded."""
    from megatron_fbt.training.checkpoint import Checkpointer
    from megatron_fbt.training.trainer import Trainer

    plain_resume = Trainer.resume
    legs = [(kind, *leg) for kind, journey in JOURNEYS.items() for leg in journey if leg[0] == world_size]
    for kind, _, layout, settings, last in legs:
        place = Path(folder) / kind

        def resume(trainer, checkpoint, copied=place / f"leg{last}"):
            plain_resume(trainer, checkpoint)
            copy = Checkpointer(copied / "checkpoints", None, trainer.layout)
            copy.save(trainer.stage, trainer.optimizer, trainer.state, "")

        if world_size == 1:
            assert run(run_config(place / "home", corpus, optimizer__type=kind)) == "finished"
        Trainer.resume = resume
        config = run_config(place / "away", corpus, layout, optimizer__type=kind, **settings)
        assert run(config, stop_before(last)) == ("finished" if last == STEPS else "StoppedBySignal")


@pytest.fixture(scope="module")
def journeys(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("journeys")
    for world_size in (1, 2, 4):
        run_distributed(travel, world_size, str(folder), corpus, timeout=300, init_group=False)
    return folder


@pytest.mark.parametrize("kind", JOURNEYS)
def test_a_run_goes_on_in_any_layout_and_sharding(journeys, kind):
    folder, journey = journeys / kind, JOURNEYS[kind]
    home, away = rows_of(folder / "home"), rows_of(folder / "away")
    assert len(away) == STEPS
    for expected, found in zip(home, away, strict=True):
        exact = ("step", "passes", "lr", "tokens", "token_equivalents", "loss_tokens", "skipped")
        assert [found[name] for name in exact] == [expected[name] for name in exact]
        for name in expected.keys() - set(exact):
            scale = expected["loss"] if name.startswith("gain_") else expected[name]  # a gain is a difference of losses
            tolerance = (1e-4 if name == "grad_norm" else 1e-5) * abs(scale)
            assert found[name] == pytest.approx(expected[name], abs=tolerance), (name, found)
    for (*_, before), (*_, leg) in zip(journey, journey[1:]):
        written, loaded = checkpoint_of(folder / "away", before), checkpoint_of(folder / f"leg{leg}", before)
        assert written.keys() == loaded.keys()
        assert [name for name in written if not torch.equal(written[name], loaded[name])] == []
    last = [checkpoint_of(folder / name, STEPS) for name in ("home", "away")]
    tolerance = 3e-2 if kind == "muon" else 1e-3  # Newton-Schulz in bf16 makes much of a gradient's weak directions
    for name, expected in last[0].items():
        assert (last[1][name] - expected).norm() <= tolerance * expected.norm(), name


class Faults:
    """Puts NaN where it is told to, on the rank that has it there, and sees what a step changes.

    Args:
        plan: {step counted from 1: "gradient", "loss" or "batch"}.
    """

    def __init__(self, plan):
        from megatron_fbt.training import buffer_optimizer, trainer

        self.plan, self.kind, self.changed = plan, None, {}
        self.rank = int(os.environ["RANK"])
        self.plain = (buffer_optimizer.reduce_gradients, trainer.run_passes)
        buffer_optimizer.reduce_gradients, trainer.run_passes = self.reduce_gradients, self.run_passes

    def undo(self):
        from megatron_fbt.training import buffer_optimizer, trainer

        buffer_optimizer.reduce_gradients, trainer.run_passes = self.plain

    def __call__(self, trainer):
        step = trainer.state.step + 1
        self.kind = self.plan.get(step)
        before = self.bits(trainer)

        def after():
            self.changed[step] = [name for name, value in self.bits(trainer).items() if value != before[name]]

        return after

    def bits(self, trainer):
        from tests.distributed.states import whole_state

        found = {}
        for name, param in trainer.stage.named_parameters():
            found[name] = param.detach().float().numpy().tobytes()
            for kind, value in whole_state(trainer.optimizer.megatron, param, trainer.layout.data_group).items():
                found[f"{kind} {name}"] = value.numpy().tobytes()
        return found

    def reduce_gradients(self, model):
        if self.kind == "gradient" and self.rank == 1:
            model.module.decoder.layers[0].mlp.linear_fc1.weight.main_grad.view(-1)[3] = float("nan")
        return self.plain[0](model)

    def run_passes(self, stage, micro_batches, *arguments, **options):
        here = stage.pre_process and (self.rank == 1 or stage.layout.data_size == 1)
        plain, calls = stage.run_layers, iter(range(1000))

        def run_layers(hidden, *arguments):
            if self.kind == "batch" and here and next(calls) == 1:
                hidden = hidden.clone()
                hidden[0, 0, 0] = float("nan")
            return plain(hidden, *arguments)

        stage.run_layers = run_layers
        totals = self.plain[1](stage, micro_batches, *arguments, **options)
        del stage.run_layers
        if self.kind == "loss" and stage.layout.is_last_stage and stage.layout.tensor_rank == 0:
            totals.nll[0] = float("nan")
        return totals


def run_with_faults(rank, world_size, folder, corpus):
    plan = {2: "gradient", 5: "loss", 8: "batch", 9: "gradient"}
    cases = {"data": ((1, 1), SHARDED), "tensor": ((2, 1), {}), "pipeline": ((1, 2), {"precision__dtype": "bf16"})}
    changed = {}
    for name, (layout, settings) in cases.items():
        faults = Faults(plan)
        assert run(run_config(Path(folder) / name, corpus, layout, **settings), faults) == "finished"
        faults.undo()
        changed[name] = faults.changed
    many = dict.fromkeys([*range(2, 11), *range(12, 22)], "loss")
    faults = Faults(many)
    config = run_config(Path(folder) / "many", corpus, training__train_steps=40)
    assert run(config, faults) == "BadNumbersError"
    faults.undo()
    return changed


def test_bad_numbers_are_skipped_by_all_ranks_and_ten_in_a_row_end_the_run(tmp_path, corpus):
    results = run_distributed(run_with_faults, 2, str(tmp_path), corpus, timeout=300, init_group=False)
    for name in ("data", "tensor", "pipeline"):
        for changed in results:
            assert [step for step, names in changed[name].items() if not names] == [2, 5, 8, 9], name
        rows = rows_of(tmp_path / name)
        assert [row["skipped"] for row in rows] == [0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4]
        assert rows[4]["loss"] is None and rows[4]["loss_pass_1"] is None and rows[1]["grad_norm"] is None
        state = json.loads((tmp_path / name / "checkpoints" / f"step_{STEPS:08d}" / "trainer_state.json").read_text())
        assert (state["updates"], state["skipped"], state["bad_in_a_row"]) == (8, 4, 0)
    rows = rows_of(tmp_path / "many")
    assert [row["step"] for row in rows] == list(range(1, 22)) and rows[-1]["skipped"] == 19
    assert not (tmp_path / "many" / "checkpoints").exists()
    assert json.loads((tmp_path / "many" / "status.json").read_text())["state"] == "failed"


def stop_at_awkward_moments(rank, world_size, folder, corpus):
    from megatron_fbt.training import session
    from megatron_fbt.training.checkpoint import Checkpointer
    from megatron_fbt.training.validation import Validator

    def interrupted(plain, rank_hit):
        def call(*arguments, **options):
            if rank == rank_hit:
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(*arguments, **options)

        return call

    options = {"training__eval_iters": 1, "training__eval_interval": 5, "checkpoint__save_interval": 3}
    for name, place, attribute in (
        ("building", session, "build_datasets"),
        ("saving", Checkpointer, "save"),
        ("validating", Validator, "run"),
    ):
        config = run_config(Path(folder) / name, corpus, (1, 2), checkpoint__keep_last=2, **options)
        plain = getattr(place, attribute)
        setattr(place, attribute, interrupted(plain, rank_hit=1 if name != "building" else 0))
        assert run(config) == "StoppedBySignal"
        setattr(place, attribute, plain)
        assert run(config) == "finished"
    config = run_config(Path(folder) / "due", corpus, (1, 2), **options)
    saves = []
    plain = Checkpointer.save
    Checkpointer.save = lambda *arguments: (saves.append(arguments[3].step), plain(*arguments))[1]
    assert run(config, stop_before(6, rank=1)) == "StoppedBySignal"
    assert run(config, stop_before(STEPS)) == "finished"
    longer = run_config(Path(folder) / "due", corpus, (1, 2), **{**options, "training__train_steps": STEPS + 1})
    assert run(longer) == "finished"
    return saves


def test_signals_while_building_saving_and_validating(tmp_path, corpus):
    saves = run_distributed(stop_at_awkward_moments, 2, str(tmp_path), corpus, timeout=300, init_group=False)
    assert saves == [[3, 6, 9, 12, 13]] * 2
    due = rows_of(tmp_path / "due")
    for name in ("building", "saving", "validating"):
        assert rows_of(tmp_path / name) == due[:STEPS]
        kept = {path.name for path in (tmp_path / name / "checkpoints").iterdir()}
        assert kept == {"step_00000009", "step_00000012", "latest"}
    assert [row["step"] for row in due if "validation_loss_pass_3" in row] == [5, 10, 12, 13]


def load_damaged(rank, world_size, folder, corpus):
    short = {"training__train_steps": 4, "optimizer__lr_warmup_steps": 0, "checkpoint__save_interval": 3}
    config = run_config(Path(folder) / "run", corpus, **short)
    assert run(config) == "finished"
    checkpoints = Path(config.run.dir) / "checkpoints"
    shutil.rmtree(checkpoints / "step_00000004")
    (checkpoints / "latest").write_text("step_00000003")
    good = Path(folder) / "good"
    shutil.copytree(checkpoints / "step_00000003", good)
    found = {}
    for path in sorted(good.iterdir()):
        for damage in ("gone", "half", "empty"):
            damaged = checkpoints / "step_00000003"
            shutil.rmtree(damaged)
            shutil.copytree(good, damaged)
            if damage == "gone":
                (damaged / path.name).unlink()
            else:
                os.truncate(damaged / path.name, path.stat().st_size // 2 if damage == "half" else 0)
            found[path.name, damage] = outcome(config)
    return found


def outcome(config):
    from megatron_fbt.errors import CheckpointError
    from tests.distributed import run_case

    messages = []
    plain = CheckpointError.__init__
    CheckpointError.__init__ = lambda self, text: (messages.append(text), plain(self, text))[1]
    try:
        return run_case.run(config), messages[-1] if messages else ""
    finally:
        CheckpointError.__init__ = plain


def test_every_damaged_file_of_a_checkpoint_is_named(tmp_path, corpus):
    (found,) = run_distributed(load_damaged, 1, str(tmp_path), corpus, timeout=300, init_group=False)
    assert {".metadata", "__0_0.distcp", "config.yaml", "trainer_state.json"} <= {name for name, _ in found}
    for (name, damage), (ended, message) in found.items():
        assert ended.endswith("CheckpointError"), (name, damage, ended)
        assert f"checkpoints/step_00000003/{name}" in message or "not a complete" in message, (name, damage, message)


WORKER = """
import os, sys
from megatron_fbt import pretrain
from tests.distributed.run_case import VOCAB
from tests.unit.data.corpus import PlainTokenizer
pretrain.run_tokenizer = lambda config: PlainTokenizer(VOCAB)
if len(sys.argv) > 2:
    from megatron_fbt.training.trainer import Trainer
    plain = Trainer._step
    def step(trainer, signals):
        if trainer.state.step == 2 and os.environ["RANK"] == "1":
            if sys.argv[2] == "die":
                os.kill(os.getpid(), 9)
            raise RuntimeError("a broken rank")
        return plain(trainer, signals)
    Trainer._step = step
sys.exit(pretrain.main(["--config", sys.argv[1]]))
"""


def start(folder, corpus, repository, *arguments, **settings):
    """A run of two processes under the launcher."""
    config = run_config(folder / "run", corpus, (1, 2), **settings)
    (folder / "config.yaml").write_text(dump_yaml(config))
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "megatron_fbt.launch", "--nproc_per_node", "2", str(folder / "worker.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    environment.update(PYTHONPATH=str(repository), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [*command, str(folder / "config.yaml"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("fault, code", [("raise", 1), ("die", 137)])
def test_a_failed_rank_ends_the_run_and_one_rank_tells_of_it(tmp_path, corpus, repository, fault, code):
    launcher = start(tmp_path, corpus, repository, fault)
    wait_for_rows(tmp_path, launcher, 2)
    began = time.monotonic()
    _, errors = launcher.communicate(timeout=120)
    assert time.monotonic() - began < 60 and launcher.returncode == code
    assert errors.count("Traceback") == 1 and ("RuntimeError: a broken rank" in errors) == (fault == "raise")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_a_stop_through_the_launcher_leaves_one_checkpoint_and_a_quiet_console(tmp_path, corpus, repository):
    launcher = start(tmp_path, corpus, repository, training__train_steps=100_000, training__eval_iters=1)
    wait_for_rows(tmp_path, launcher, 3)
    launcher.send_signal(signal.SIGTERM)
    output, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 75
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == checkpoint.name
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "stopped" and status["last_checkpoint"] == checkpoint.name
    assert len(rows_of(tmp_path / "run")) == status["step"] == int(checkpoint.name[5:])
    assert all(line.startswith("megatron_fbt.launch:") for line in errors.splitlines()), errors
    ours = ("opening the data", "building the model", "training from", "memory of this process", "step ", "saved ")
    ours += ("stopped by a signal", "source ", f"{corpus} ")
    table = output.index("opening the data")
    assert all(line.startswith(ours) for line in output[table:].splitlines()), output
    assert output.count("stopped by a signal") == 1


def wait_for_rows(folder, launcher, count):
    deadline = time.monotonic() + 120
    while len(rows_of(folder / "run")) < count:
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()
        time.sleep(0.1)
