"""Which machine may train in FP8, and what a run is said to compute in."""

import pytest
import torch

from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core import backends, precision_report
from megatron_fbt.errors import ConfigError


def make(**values):
    config = PretrainConfig()
    for name, value in values.items():
        section, field = name.split("__")
        setattr(getattr(config, section), field, value)
    return config


def pretend(monkeypatch, capability=None, cuda="12.9", engine=None, kernel="not installed"):
    """A machine with or without a GPU and libraries."""
    monkeypatch.setattr(backends, "on_gpu", lambda: capability is not None)
    monkeypatch.setattr(precision_report, "on_gpu", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(backends, "transformer_engine_problem", lambda: engine)
    monkeypatch.setattr(backends, "weight_gradient_kernel_problem", lambda: kernel)


@pytest.mark.parametrize(
    "recipe, machine, parts",
    [
        ("tensorwise", {}, ["there is no GPU"]),
        ("tensorwise", {"capability": (8, 0)}, ["GPU X", "capability 8.0", "tensorwise recipe needs 8.9"]),
        ("blockwise", {"capability": (8, 9)}, ["8.9", "needs 9.0"]),
        ("blockwise", {"capability": (9, 0), "cuda": "12.8"}, ["CUDA 12.9", "12.8"]),
        ("mxfp8", {"capability": (9, 0)}, ["9.0", "mxfp8 recipe needs 10.0"]),
        ("mxfp8", {"capability": (12, 0)}, ["12.0", "one below 12.0"]),
        ("delayed", {"capability": (9, 0), "engine": "not installed"}, ["Transformer Engine", "not installed"]),
    ],
)
def test_machines_without_a_recipe_are_refused(monkeypatch, recipe, machine, parts):
    pretend(monkeypatch, **machine)
    config = make(precision__fp8="hybrid", precision__fp8_recipe=recipe)
    with pytest.raises(ConfigError) as caught:
        backends.check_backend(config)
    install = 'pip install --no-build-isolation "megatron-fbt[gpu]"'
    for part in ["precision.fp8 = 'hybrid'", *parts, "fp8_emulated to true", install]:
        assert part in str(caught.value)
    config.precision.fp8_emulated = True
    backends.check_backend(config)
    assert backends.backend_of(config) == "torch"


@pytest.mark.parametrize("recipe, capability", [("tensorwise", (8, 9)), ("blockwise", (9, 0)), ("mxfp8", (10, 0))])
def test_machines_with_a_recipe(monkeypatch, recipe, capability):
    pretend(monkeypatch, capability)
    assert backends.backend_of(make(precision__fp8="e4m3", precision__fp8_recipe=recipe)) == "transformer_engine"


@pytest.mark.parametrize("wanted", [False, True])
def test_weight_gradients_are_fused_where_it_is_asked_for(monkeypatch, wanted):
    pretend(monkeypatch, (9, 0), kernel=None)
    assert backends.fuses_weight_gradients(make(precision__gradient_accumulation_fusion=wanted)) == wanted


@pytest.mark.parametrize("machine", [{}, {"capability": (9, 0), "kernel": "built without --cuda_ext"}])
def test_a_fusion_that_is_asked_for_must_be_there(monkeypatch, machine):
    pretend(monkeypatch, **machine)
    with pytest.raises(ConfigError, match="gradient_accumulation_fusion = true.*(no GPU|cuda_ext).*docs/precision.md"):
        backends.check_backend(make(precision__gradient_accumulation_fusion=True))


def test_the_report_names_each_part_and_pass(monkeypatch):
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(precision_report, "transformer_engine_problem", lambda: "not installed")
    config = make(
        model__num_layers=6,
        memory__recompute="full",
        precision__fp8="hybrid",
        precision__num_layers_at_start_in_bf16=1,
        precision__num_layers_at_end_in_bf16=2,
    )
    report = precision_report.precision_report(config)
    low = "fp8 hybrid, tensorwise"
    assert report.products == [
        ("layer 1", "bf16", "bf16", "bf16"),
        ("layers 2 to 4", low, low, low),
        ("layers 5 to 6", "bf16", "bf16", "bf16"),
        ("attention scores", "bf16", "bf16", "bf16"),
        ("fusion layer", "-", "bf16", "-"),
        ("output head", "bf16", "bf16", "-"),
    ]
    text = report.describe()
    for part in (
        "GPU X, compute capability 9.0",
        "Transformer Engine  not installed",
        "transformer_engine",
        "layers 2",
    ):
        assert part in text
    assert report.problem is None


@pytest.mark.parametrize(
    "values, kept",
    [
        ({"dtype": "fp32"}, "fp32"),
        ({}, "bf16; updated in fp32"),
        ({"fp8": "hybrid"}, "bf16; updated in fp32"),
        (
            {"fp8": "hybrid", "fp8_param_gather": True},
            "fp8 e4m3 where products are fp8, bf16 elsewhere; updated in fp32",
        ),
    ],
)
def test_the_report_says_what_weights_are_kept_in(monkeypatch, values, kept):
    pretend(monkeypatch, (9, 0))
    config = make(**{f"precision__{name}": value for name, value in values.items()})
    report = precision_report.precision_report(config)
    assert report.as_dict()["weights"] == kept
    assert ["weights", kept] in [line.split(maxsplit=1) for line in report.describe().splitlines()]


def test_the_report_of_a_machine_that_cannot_train(monkeypatch):
    pretend(monkeypatch)
    report = precision_report.precision_report(make(precision__fp8="e4m3", feedback__schedule="standard"))
    assert report.backend is None and "there is no GPU" in report.problem and "note: precision.fp8" in report.describe()
    assert all(later == "-" for _, _, later, _ in report.products)


@pytest.mark.parametrize(
    "backend, reuse, passes, told",
    [
        ("torch", None, "progressive", "what follows their plain prefix"),
        ("torch", False, "progressive", "whole rows"),
        ("transformer_engine", None, "progressive", "whole rows (feedback.prefix_reuse: Transformer Engine computes"),
        ("transformer_engine", True, "progressive", "what follows their plain prefix"),
        ("torch", None, "standard", "there are none"),
    ],
)
def test_the_report_says_what_extra_passes_compute(monkeypatch, backend, reuse, passes, told):
    config = PretrainConfig()
    config.feedback.schedule, config.feedback.prefix_reuse = passes, reuse
    pretend(monkeypatch, (9, 0) if backend == "transformer_engine" else None)
    report = precision_report.precision_report(config)
    assert report.extra_passes.startswith(told) and f"extra passes        {told}" in report.describe()


def test_a_plan_knows_what_this_machine_takes_for_auto(monkeypatch):
    config = make(training__train_steps=10)
    pretend(monkeypatch, (9, 0))
    plan = make_plan(backends.as_here(config), 1, 1000)
    assert plan.reused_share == 0 and any("on request" in note for note in plan.notes)
    assert config.model.transformer_impl == "auto" and backends.as_here(config).memory is config.memory
    config.feedback.prefix_reuse = True
    assert make_plan(backends.as_here(config), 1, 1000).reused_share == pytest.approx(0.5)
    backends.check_backend(config)
    pretend(monkeypatch)
    config.feedback.prefix_reuse = None
    assert make_plan(backends.as_here(config), 1, 1000).reused_share == pytest.approx(0.5)
    config.model.transformer_impl = "transformer_engine"
    assert backends.as_here(config) is config, "none can run it here"


def test_reuse_with_masked_documents_is_refused_where_auto_takes_transformer_engine(monkeypatch):
    config = make(data__reset_attention_mask=True, data__reset_position_ids=True, feedback__prefix_reuse=True)
    pretend(monkeypatch)
    backends.check_backend(config)
    pretend(monkeypatch, (9, 0))
    for check in (backends.check_backend, backends.check_reuse):
        with pytest.raises(ConfigError, match="feedback.prefix_reuse = true: data.reset_attention_mask = true gives"):
            check(config)
    config.feedback.prefix_reuse = None
    backends.check_backend(config)
