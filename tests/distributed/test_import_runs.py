"""Imported models on the training side: native logits, weights in split layouts, and two steps with feedback."""

from pathlib import Path

import pytest
import torch

from megatron_fbt.config.feedback import JitterConfig, PrefixConfig
from megatron_fbt.config.load import load_yaml
from megatron_fbt.core.parallel import initialize_parallel
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.core.tensor_reader import TensorReader
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.hf.import_hf import import_model
from megatron_fbt.training.checkpoint import Checkpointer
from tests.distributed.launch import run_distributed
from tests.distributed.run_case import VOCAB, checkpoint_of, rows_of, run, run_config, write_corpus
from tests.unit.data.corpus import PlainTokenizer
from tests.unit.hf.sources import FAMILIES, make_source, write_source

IDS = torch.randint(0, 60, (2, 40), generator=torch.Generator().manual_seed(4))
RUNS = {(2, 1): "qwen2 tied", (1, 2): "llama tied"}
"""{(tensor, pipeline) parallel sizes: what is trained on in that layout}."""


@torch.no_grad()
def native_logits(rank, world_size, folders):
    """{family: logits [b, s, v] of one plain pass of the model that training builds}."""
    found = {}
    layout = None
    for family, folder in folders.items():
        config = load_yaml(f"{folder}/config.yaml")
        layout = layout or initialize_parallel(config.parallel, config.run.seed)
        stage = FBTStage(config, layout, 60, 128).eval()
        reader = TensorReader(Path(folder))
        for name, param in stage.named_parameters():
            rows = reader.rows(name, 0, reader.shapes[name][0])
            param.zero_()[: len(rows)] = rows
        starts = torch.zeros(IDS.shape, dtype=torch.bool)
        starts[:, 0] = True
        states = stage.run_layers(stage.first_inputs(IDS, None, None), starts)
        found[family] = stage.logits(states).transpose(0, 1).contiguous()[..., :60]
    return found


def test_native_logits_are_the_sources(tmp_path):
    sources = {family: make_source(family) for family in FAMILIES}
    folders = {}
    for number, (family, source) in enumerate(sources.items()):
        write_source(tmp_path / f"source{number}", source)
        import_model(tmp_path / f"source{number}", tmp_path / f"made{number}")
        folders[family] = str(tmp_path / f"made{number}")
    (found,) = run_distributed(native_logits, 1, folders, timeout=120)
    with torch.no_grad():
        for family, source in sources.items():
            expected = source(IDS).logits
            assert expected.std() > 0.5 and (found[family] - expected).abs().max() < 1e-5, family


def continued_config(folder, layout, corpus):
    """Two steps of three passes from an imported model, with its own configuration of model and feedback."""
    source, name = Path(folder) / "made" / RUNS[layout].replace(" ", "-"), f"run{layout[0]}{layout[1]}"
    imported = load_yaml(str(source / "config.yaml"))
    config = run_config(
        Path(folder) / name,
        corpus,
        layout,
        training__train_steps=2,
        training__rampup_batch_size=None,
        optimizer__lr_warmup_steps=0,
        checkpoint__init_from=str(source),
    )
    config.model, config.feedback = imported.model, imported.feedback
    config.model.make_vocab_size_divisible_by = 2
    config.feedback.schedule = "full"
    config.feedback.prefix, config.feedback.jitter = PrefixConfig(probability=0.0), JitterConfig(0.0)
    return config


def train(rank, world_size, folder, corpus):
    """Both layouts, one after the other; what each holds before its first step is saved."""

    def keep(trainer):
        if trainer.state.step == 0:
            copy = Checkpointer(Path(f"{trainer.config.run.dir}-loaded") / "checkpoints", None, trainer.layout)
            copy.save(trainer.stage, trainer.optimizer, trainer.state, "")

    for layout in RUNS:
        assert run(continued_config(folder, layout, corpus), keep) == "finished"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the runs have been."""
    folder = tmp_path_factory.mktemp("imported")
    for family in RUNS.values():
        name = family.replace(" ", "-")
        source = write_source(folder / "source" / name, make_source(family, vocab_size=VOCAB), entries=0)
        import_model(source, folder / "made" / name)
    run_distributed(train, 2, str(folder), write_corpus(folder), timeout=200, init_group=False)
    return folder


@pytest.mark.parametrize("layout", RUNS)
def test_weights_arrive_in_a_split_layout_bit_for_bit(folder, layout):
    reader = TensorReader(folder / "made" / RUNS[layout].replace(" ", "-"), without="-")
    loaded = checkpoint_of(folder / f"run{layout[0]}{layout[1]}-loaded", 0)
    weights = {name: name.removeprefix("optimizer.master.") for name in reader.shapes}
    assert set(weights.values()) == {name for name in loaded if not name.startswith("optimizer.")}
    for name, weight in weights.items():
        assert torch.equal(loaded[weight], reader.rows(name, 0, reader.shapes[name][0])), name


@torch.no_grad()
@pytest.mark.parametrize("layout", RUNS)
def test_training_goes_on_where_the_source_is(folder, layout):
    config = continued_config(folder, layout, str(folder / "corpus"))
    data = build_datasets(config, PlainTokenizer(VOCAB), 16, 0).train
    rows = [data[index] for index in range(8)]
    tokens, labels = (torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("tokens", "labels"))
    logits = make_source(RUNS[layout], vocab_size=VOCAB)(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten()).item()
    first, second = rows_of(folder / f"run{layout[0]}{layout[1]}")
    assert first["loss_pass_1"] == pytest.approx(expected, rel=1e-5)
    assert first["passes"] == second["passes"] == 3 and first["loss_pass_3"] != pytest.approx(expected, rel=1e-3)
    assert second["loss_pass_1"] != first["loss_pass_1"]
