"""Every sharding of the optimizer takes the same steps, and their checkpoints are one another's."""

from pathlib import Path

import pytest
import torch

from megatron_fbt.hf.convert import Conversion, convert_checkpoint
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Grid
from tests.distributed.zero_case import MODELS, STEPS, Job, run_jobs, tensors
from tests.unit.hf.exports import LetterTokenizer, load

VOCAB = 1003

GRIDS = [
    Grid(data=2),
    Grid(tensor=2, data=2, sequence_parallel=True),
    Grid(pipeline=2, data=2),
    Grid(tensor=2, pipeline=2, data=2, sequence_parallel=True),
]


def shardings(grid: Grid) -> list:
    """What can be used in a layout, plain first."""
    return ["none", "megatron", "zero1"] + (["zero2", "zero3"] if grid.pipeline == 1 else [])


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """{(model, sharding): (one Outcome for each rank, folder of the checkpoint)} by grid; one launch for each."""
    found = {}

    def of(grid: Grid) -> dict:
        if grid not in found:
            root = tmp_path_factory.mktemp(f"zero_{grid}")
            keys = [(model, sharding) for model in MODELS for sharding in shardings(grid)]
            jobs = [Job(model, sharding, root / f"{model}_{sharding}") for model, sharding in keys]
            ranks = run_distributed(run_jobs, grid.world_size, grid, jobs, timeout=400)
            found[grid] = {key: ([rank[n] for rank in ranks], jobs[n].save) for n, key in enumerate(keys)}
        return found[grid]

    return of


CELLS = [
    pytest.param(grid, model, sharding, marks=[pytest.mark.slow] if grid.world_size > 4 else [])
    for grid in GRIDS
    for model in MODELS
    for sharding in shardings(grid)[1:]
]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return ((a - b).double().norm() / b.double().norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("grid, model, sharding", CELLS, ids=lambda value: str(value))
def test_steps_equal_plain_training(results, grid, model, sharding):
    expected, found = (results(grid)[model, name][0][0].reports for name in ("none", sharding))
    assert [len(report.loss_per_pass) for report in found] == list(STEPS)
    assert found[0].loss_per_pass == pytest.approx(expected[0].loss_per_pass, rel=1e-6)
    assert found[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-6)
    for a, b in zip(found, expected):
        assert a.loss_per_pass == pytest.approx(b.loss_per_pass, rel=1e-5)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
        assert a.loss_tokens == b.loss_tokens and not a.skipped
    assert max(b.grad_norm for b in expected) > 0.6 > min(b.grad_norm for b in expected)


@pytest.mark.parametrize("grid, model, sharding", CELLS, ids=lambda value: str(value))
def test_weights_and_states_equal_plain_training(results, grid, model, sharding):
    expected, found = (tensors(results(grid)[model, name][1]) for name in ("none", sharding))
    assert found.keys() == expected.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.fusion") for name in expected)
    for name, value in expected.items():
        assert relative(found[name], value) <= 1e-4, name


@pytest.mark.parametrize("grid, model, sharding", CELLS, ids=lambda value: str(value))
def test_exports_have_the_logits_of_the_training_model(results, tmp_path, grid, model, sharding):
    _, folder = results(grid)[model, sharding]
    (checkpoint,) = folder.glob("step_*")
    LetterTokenizer(VOCAB).save_for_huggingface(folder.parent / "tokenizer")
    report = convert_checkpoint(checkpoint, tmp_path / "export", Conversion(verify=True))
    assert report["vocab_size"] == VOCAB and report["verification"]["passed"], report
    found = load(tmp_path / "export").state_dict()
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"]) == (model == "tied")


@pytest.mark.parametrize("grid, model, sharding", CELLS, ids=lambda value: str(value))
def test_memory_is_what_the_report_expects(results, grid, model, sharding):
    plain = results(grid)[model, "none"][0]
    for rank, whole in zip(results(grid)[model, sharding][0], plain, strict=True):
        for part in ("weights", "master_weights", "moments"):
            assert getattr(rank.held, part) == pytest.approx(getattr(rank.expected, part), rel=0.05), part
        assert rank.held.moments == pytest.approx(whole.held.moments / grid.data, rel=0.05)


OFFLOAD = {"optimizer.offload": True}
FAULTS = {
    **{f"{fault} {sharding}": (sharding, fault, {}) for fault in ("nan", "spike") for sharding in shardings(Grid())},
    **{f"offload {sharding}": (sharding, None, OFFLOAD) for sharding in ("zero1", "zero2", "zero3")},
    "offload none": ("none", None, {}),
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """{name: (Outcome of rank 0, folder)} of four steps with two data-parallel ranks."""
    root = tmp_path_factory.mktemp("faults")
    jobs = [
        Job("tied", sharding, root / name.replace(" ", "_"), steps=4, fault=fault, more=more)
        for name, (sharding, fault, more) in FAULTS.items()
    ]
    ranks = run_distributed(run_jobs, 2, Grid(data=2), jobs, timeout=400)
    return {name: (ranks[0][number], jobs[number].save) for number, name in enumerate(FAULTS)}


@pytest.mark.parametrize("name", [name for name in FAULTS if not name.endswith("none")])
def test_steps_that_are_skipped_and_states_off_the_gpu(faults, name):
    kind = name.split()[0]
    (plain, expected), (outcome, folder) = faults[f"{kind} none"], faults[name]
    assert [report.skipped for report in outcome.reports] == [kind != "offload" and step == 2 for step in range(4)]
    assert [report.spike for report in outcome.reports] == [report.spike for report in plain.reports]
    for a, b in zip(outcome.reports, plain.reports, strict=True):
        if not (kind == "nan" and a.skipped):
            assert a.loss_per_pass == pytest.approx(b.loss_per_pass, rel=1e-5)
    found = tensors(folder)
    for key, value in tensors(expected).items():
        assert relative(found[key], value) <= 1e-4, key


LOW = [
    (Grid(data=2), ["none", "megatron", "zero1", "zero2", "zero3"]),
    (Grid(tensor=2, data=2, sequence_parallel=True), ["none", "zero1", "zero2", "zero3"]),
    pytest.param(Grid(tensor=2, pipeline=2, sequence_parallel=True), ["none", "zero1"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("grid, kinds", LOW, ids=lambda value: str(value) if isinstance(value, Grid) else "")
def test_low_precision_follows_plain_low_precision(tmp_path, grid, kinds):
    more = {"precision.dtype": "bf16"}
    jobs = [Job(model, kind, tmp_path / f"{model}_{kind}", more=more) for model in MODELS for kind in kinds]
    outcomes = run_distributed(run_jobs, grid.world_size, grid, jobs, timeout=400)[0]
    by_name = {job.save.name: (outcome, job.save) for job, outcome in zip(jobs, outcomes, strict=True)}
    for model in MODELS:
        plain, _ = by_name[f"{model}_none"]
        for kind in kinds[1:]:
            outcome, folder = by_name[f"{model}_{kind}"]
            for a, b in zip(outcome.reports, plain.reports, strict=True):
                assert a.loss_per_pass == pytest.approx(b.loss_per_pass, abs=5e-3), (model, kind)
            found = tensors(folder)
            for name, value in found.items():
                if name.startswith("optimizer.master."):
                    weight = found[name.removeprefix("optimizer.master.")]
                    assert torch.equal(weight, value.bfloat16()), (model, kind, name)
            assert any(name.startswith("optimizer.master.") for name in found)


MOVES = {
    1: [("zero3", "none"), ("megatron", "zero2"), ("zero1", "none")],
    3: [("none", "none"), ("none", "zero1"), ("zero2", "zero3"), ("zero3", "megatron")],
    4: [("none", "none"), ("none", "zero3"), ("zero3", "zero1"), ("zero1", "zero2")],
}
"""Number of data-parallel ranks -> (sharding that saved with two, sharding that loads)."""


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_states_move_to_another_sharding_and_another_number_of_ranks(results, tmp_path, model, ranks):
    def source(name: str) -> Path:
        (checkpoint,) = results(Grid(data=2))[model, name][1].glob("step_*")
        return checkpoint

    moved = [
        Job(model, after, tmp_path / f"moved{number}", source(before), steps=0)
        for number, (before, after) in enumerate(MOVES[ranks])
    ]
    further = [
        Job(model, after, tmp_path / f"further{number}", source(before), steps=3)
        for number, (before, after) in enumerate(MOVES[ranks])
    ]
    outcomes = run_distributed(run_jobs, ranks, Grid(data=ranks), [*moved, *further], timeout=400)[0]
    for (before, after), job in zip(MOVES[ranks], moved, strict=True):
        expected, found = tensors(source(before).parent), tensors(job.save)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (before, after, name)
    reports = [outcome.reports for outcome in outcomes[len(moved) :]]
    for other in reports[1:]:
        for a, b in zip(other, reports[0], strict=True):
            assert a.loss_per_pass == pytest.approx(b.loss_per_pass, rel=1e-5)
