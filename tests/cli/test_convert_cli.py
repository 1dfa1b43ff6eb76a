"""tools/convert_to_hf.py on checkpoint folders."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_fbt.config.load import dump_yaml
from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.exports import LetterTokenizer, load
from tests.unit.hf.reference import Reference, random_weights, tiny_config

IDS = torch.arange(3, 12)


@pytest.fixture(scope="module")
def tool(repository):
    spec = importlib.util.spec_from_file_location("convert_tool", repository / "tools" / "convert_to_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path):
    """A run folder with two checkpoints; that of step n has the random weights of seed n."""
    run = tmp_path / "run"
    LetterTokenizer().save_for_huggingface(tmp_path / "tokenizer")
    config = tiny_config(num_query_groups=2)
    config.data.tokenizer.type = "huggingface"
    config.data.tokenizer.path = str(tmp_path / "tokenizer")
    for step in (10, 20):
        folder = run / "checkpoints" / f"step_{step:08d}"
        write_checkpoint(folder, random_weights(config, seed=step), config)
    (run / "config.yaml").write_text(dump_yaml(config))
    (run / "checkpoints" / "latest").write_text("step_00000010\n")
    return run


def exported_seed(output):
    embedding = load_file(output / "model.safetensors")["model.embed_tokens.weight"]
    config = tiny_config(num_query_groups=2)
    names = "embedding.word_embeddings.weight"
    return next(step for step in (10, 20) if torch.equal(random_weights(config, seed=step)[names], embedding))


def test_a_step_a_checkpoints_folder_and_a_run(tool, run, tmp_path, capsys):
    for name, checkpoint, seed in (
        ("a", run, 10),
        ("b", run / "checkpoints", 10),
        ("c", run / "checkpoints" / "step_00000020", 20),
    ):
        assert tool.main(["--checkpoint", str(checkpoint), "--output", str(tmp_path / name)]) == 0
        assert exported_seed(tmp_path / name) == seed
    assert str(tmp_path / "c") in capsys.readouterr().out


@torch.no_grad()
def test_report_and_model(tool, run, tmp_path, capsys):
    output = tmp_path / "out"
    assert tool.main(["--checkpoint", str(run), "--output", str(output), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"].endswith("step_00000010") and report["output"] == str(output)
    assert (report["dtype"], report["vocab_size"]) == ("float32", 50)
    config = tiny_config(num_query_groups=2)
    reference = Reference(random_weights(config, seed=10), config)
    model = load(output)
    expected = reference.logits(reference.passes(IDS, 2)[-1])
    assert (model(IDS[None], passes=2).logits[0] - expected).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(output, trust_remote_code=True).eos_token_id == model.config.eos_token_id == 49


def test_dtype_force_and_a_moved_tokenizer(tool, run, tmp_path, capsys):
    output = tmp_path / "out"
    common = ["--checkpoint", str(run), "--output", str(output)]
    assert tool.main([*common, "--dtype", "bf16"]) == 0
    assert load_file(output / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert tool.main(common) == 2
    assert "--force" in capsys.readouterr().err
    shutil.move(tmp_path / "tokenizer", tmp_path / "elsewhere")
    assert tool.main([*common, "--force"]) == 3
    assert tool.main([*common, "--force", "--tokenizer", str(tmp_path / "elsewhere")]) == 0
    assert load_file(output / "model.safetensors")["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("tracker", ["", "step_00000099", "../../..", "step_00000010\nstep_00000020"])
def test_a_bad_tracker_is_named(tool, run, tmp_path, capsys, tracker):
    (run / "checkpoints" / "latest").write_text(tracker)
    assert tool.main(["--checkpoint", str(run), "--output", str(tmp_path / "out")]) == 4
    assert str(run / "checkpoints" / "latest") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_checkpoint_there(tool, run, tmp_path, capsys):
    assert tool.main(["--checkpoint", str(tmp_path / "absent"), "--output", str(tmp_path / "out")]) == 4
    assert "no such folder" in capsys.readouterr().err
    (run / "checkpoints" / "latest").unlink()
    assert tool.main(["--checkpoint", str(run), "--output", str(tmp_path / "out")]) == 4
    assert "config.yaml" in capsys.readouterr().err


def test_help_has_an_example(tool, capsys):
    with pytest.raises(SystemExit) as left:
        tool.main(["--help"])
    assert left.value.code == 0
    assert "python tools/convert_to_hf.py --checkpoint" in capsys.readouterr().out
