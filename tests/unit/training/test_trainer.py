"""The order of things in the training loop, with a step, a validation and a checkpoint that only leave marks."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.schedule import Recipe
from megatron_fbt.errors import BadNumbersError, StoppedBySignal
from megatron_fbt.training import trainer as trainer_module
from megatron_fbt.training.optimizer import StepReport
from megatron_fbt.training.reporter import Reporter
from megatron_fbt.training.run_folder import TrainerState, step_folder
from megatron_fbt.training.trainer import Trainer


class MarkedTrainer(Trainer):
    """Six steps of one second each; validation takes a hundred.

    Args:
        stops: steps in which a stop is asked for.
        bad: steps with bad numbers.
    """

    def __init__(self, stops=(), bad=(), begin=0, eval_interval=None, save_interval=None):
        config = PretrainConfig()
        config.training.eval_interval, config.checkpoint.save_interval = eval_interval, save_interval
        config.training.max_bad_steps = 3
        self.config, self.plan = config, SimpleNamespace(train_steps=6, sequence_length=10)
        self.folder, self.state, self.last_saved = Path("run"), TrainerState(begin, begin * 8), None
        if begin:
            self.last_saved = Path(step_folder(begin))
        self.validator = SimpleNamespace(run=self._validate)
        self.checkpointer = SimpleNamespace(pending=False, facts={})
        self.stragglers = SimpleNamespace(look=lambda step, say: None)
        self.ahead, self.data_wait_s = None, 0.0
        self.optimizer = SimpleNamespace(scaler=None)
        self.stops, self.bad, self.marks, self.clock = stops, bad, [], 0.0

    def _step(self, signals):
        self.clock += 1.0
        skipped = self.state.step + 1 in self.bad
        loss = float("nan") if skipped else 2.0
        report = StepReport([loss], 1.0, 80, skipped, self.state.step + 1 in self.stops)
        self.state.step += 1
        self.state.consumed_samples += 8
        self.state.skipped += skipped
        self.state.bad_in_a_row = self.state.bad_in_a_row + 1 if skipped else 0
        return self._row(1, 0.1, report, Recipe(self.config.feedback, 0, True)), report

    def _validate(self, sequential):
        assert not sequential, "the fusion layer is untrained"
        self.clock += 100.0
        self.marks.append(f"validate {self.state.step}")
        return {"validation_loss_pass_1": 2.5}

    def _save(self, reporter, background=False):
        self.marks.append(f"save {self.state.step}")
        self.last_saved = Path(step_folder(self.state.step))


class MarkedReporter:
    """Keeps (step, tokens, seconds) and the rows."""

    def __init__(self):
        self.steps, self.rows, self.skips = [], [], []

    def step(self, row, tokens, seconds, state):
        self.steps.append((row["step"], tokens, seconds))
        self.rows.append(row)

    def say(self, message):
        raise AssertionError(f"nothing is to be said: {message}")

    def skipped(self, step, reason, first_sample, last_sample):
        self.skips.append((step, first_sample, last_sample))


@pytest.fixture
def train(monkeypatch):
    def run(trainer):
        reporter = MarkedReporter()
        monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: trainer.clock)
        try:
            trainer.train(reporter, None)
        finally:
            trainer.reporter = reporter
        return reporter

    return run


def test_validation_takes_no_part_in_a_steps_time(train):
    trainer = MarkedTrainer(eval_interval=4)
    reporter = train(trainer)
    assert reporter.steps == [(step, 80, 1.0) for step in range(1, 7)]
    assert trainer.marks == ["validate 4", "validate 6", "save 6"]
    assert [row["step"] for row in reporter.rows if "validation_loss_pass_1" in row] == [4, 6]


@pytest.mark.parametrize("stop, saves", [(2, ["save 2"]), (3, ["save 3"]), (5, ["save 3", "save 5"])])
def test_a_stop_saves_once_whether_a_save_is_due_or_not(train, stop, saves):
    trainer = MarkedTrainer(stops=[stop], save_interval=3)
    with pytest.raises(StoppedBySignal, match=f"after step {stop}; {step_folder(stop)} was written"):
        train(trainer)
    assert trainer.marks == saves


def test_a_stop_in_the_last_step_is_an_ordinary_end(train):
    trainer = MarkedTrainer(stops=[6], save_interval=6)
    train(trainer)
    assert trainer.marks == ["validate 6", "save 6"]


@pytest.mark.parametrize("begin, marks", [(5, ["validate 6", "save 6"]), (6, []), (9, [])])
def test_a_run_goes_on_to_its_end_and_not_beyond(train, begin, marks):
    trainer = MarkedTrainer(begin=begin)
    train(trainer)
    assert trainer.marks == marks and trainer.state.step == max(begin, 6)


def test_bad_steps_in_a_row_end_the_run_after_their_rows_and_without_a_checkpoint(train):
    trainer = MarkedTrainer(bad=[2, 3, 5, 6, 7])
    trainer.plan.train_steps = 20
    with pytest.raises(BadNumbersError, match="3 steps in a row .*step 7; no checkpoint was written"):
        train(trainer)
    assert trainer.marks == [] and [row["step"] for row in trainer.reporter.rows] == list(range(1, 8))
    assert trainer.reporter.skips == [(step, 8 * step - 8, 8 * step - 1) for step in (2, 3, 5, 6, 7)]


def test_status_and_rows_after_a_resume(tmp_path, capsys):
    config = PretrainConfig()
    config.run.dir, config.logging.tensorboard = str(tmp_path), False
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": {n}.5}}\n' for n in (1, 2, 3, 4)) + '{"st')
    plan = SimpleNamespace(train_steps=6, sequence_length=10, phase_start_steps=(0, 4))
    state = TrainerState(step=2, consumed_samples=16, phase_start_steps=[0, 4], pass_counts=[1, 0, 1])
    reporter = Reporter(config, plan, active=True)
    changes = ["training.train_steps: 5 -> 6"]
    reporter.resuming(tmp_path / "checkpoints" / "step_00000002", state, changes)
    reporter.begin(state)
    reporter.end("failed")
    assert [row.split(",")[0] for row in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        '{"step": 1',
        '{"step": 2',
    ]
    status = json.loads((tmp_path / "status.json").read_text())
    expected = {"state": "failed", "step": 2, "loss": 2.5, "tokens": 160, "last_checkpoint": "step_00000002"}
    assert expected.items() <= status.items()
    shown = capsys.readouterr().out
    assert "changed since then: training.train_steps: 5 -> 6" in shown and "the learning rate and the order" in shown
    assert "feedback.schedule start at steps 0, 4, as stored; a new run has 0, 5" in shown
    assert "steps by passes so far: 1: 1 (50.00%), 3: 1 (50.00%); mean passes 2.0000" in shown
    Reporter(config, plan, active=False).begin(state)
    assert capsys.readouterr().out == ""
