"""tools/convert_to_hf.py on checkpoint folders."""

import importlib.util
import inspect
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.data.stored_tokenizer import store_tokenizer
from megatron_fbt.data.tokenizer import build_tokenizer
from megatron_fbt.data.tokenizer_training import TokenizerTraining, train_tokenizer
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


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_nothing_but_the_checkpoint_is_needed(tool, tmp_path, monkeypatch, kind):
    """What a run stores at its start; then only the step's folder is left, somewhere else and read-only."""
    config = tiny_config(num_query_groups=2)
    source, config.data.tokenizer.type = tmp_path / "source", kind
    if kind == "huggingface":
        LetterTokenizer().save_for_huggingface(source)
        config.data.format, config.data.chat_template = "conversations", str(source / "mine.jinja")
        (source / "mine.jinja").write_text("{{ messages | length }}")
    else:
        source.mkdir()
        shutil.copy(inspect.__file__, source)
        train_tokenizer(TokenizerTraining([str(source)], str(source / "small"), 1000, input_format="files"))
    config.data.tokenizer.path = str(source if kind == "huggingface" else source / "small.model")
    original = build_tokenizer(config.data.tokenizer)
    store_tokenizer(original, config.data, tmp_path / "tokenizer")
    step = tmp_path / "run" / "checkpoints" / "step_00000010"
    write_checkpoint(step, random_weights(config, vocab_size=original.vocab_size), config)
    moved = tmp_path / "elsewhere" / "my.checkpoint-1 x"
    moved.parent.mkdir()
    step.rename(moved)
    for path in (tmp_path / "tokenizer").iterdir():
        path.rename(moved / path.name)
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in moved.iterdir()}
    for path in (*moved.iterdir(), moved):
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.chdir("/")
    assert tool.main(["--checkpoint", str(moved), "--output", str(tmp_path / "out"), "--format", "fbt"]) == 0
    assert {path.name: path.read_bytes() for path in moved.iterdir()} == before
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "012" if kind == "huggingface" else "def f7(x): return"
    assert tokenizer(text, add_special_tokens=False).input_ids == original.tokenize(text)
    if kind == "huggingface":
        assert tokenizer.apply_chat_template([{"role": "user", "content": "0"}], tokenize=False) == "1"


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
