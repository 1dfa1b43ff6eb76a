"""tools/fixed_point.py as it is called."""

import importlib.util
import json
import shutil
import sys

import numpy
import pytest
import torch

from megatron_fbt.data.indexed import IndexedWriter
from tests.unit.hf.exports import export, load
from tests.unit.hf.reference import random_weights, tiny_config

T = 16
TEXT = "0123456789:;<=>?" * 2 + "@ABCDEFGHIJKLMNO"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config()
    config.data.sequence_length = T
    return export(tmp_path_factory.mktemp("exports") / "tiny", random_weights(config), config)


@pytest.fixture(scope="module")
def tool(repository):
    spec = importlib.util.spec_from_file_location("fixed_point_tool", repository / "tools" / "fixed_point.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path):
    (tmp_path / "held_out.txt").write_text(TEXT)
    return str(tmp_path / "held_out.txt")


def test_files_table_and_verdict(tool, folder, text, tmp_path, capsys):
    output = tmp_path / "deep" / "results"
    code = tool.main(
        ["--model", str(folder), "--text", text, "--passes", "20", "--batch", "2", "--output", str(output)]
    )
    report = json.loads((output / "fixed_point.json").read_text())
    printed = capsys.readouterr()
    assert code == (1 if report["alarm"] else 0)
    ids = torch.tensor([[ord(letter) - ord("0") for letter in TEXT[row * T : row * T + T]] for row in range(3)])
    with torch.no_grad():
        expected = load(folder)(ids, labels=ids, passes=20).pass_losses.tolist()
    assert report["loss"] == pytest.approx(expected, rel=1e-5)
    assert (report["trained_passes"], report["rows"], report["positions"]) == (3, 3, T)
    assert report["gap"] == pytest.approx(expected[-1] - expected[2], abs=1e-5)
    assert report["verdict"] in printed.out and f"{expected[9]:.4f}" in printed.out
    assert (output / "fixed_point.png").read_bytes().startswith(b"\x89PNG")


def test_json_and_trained_passes(tool, folder, text, tmp_path, capsys):
    arguments = ["--model", str(folder), "--text", text, "--passes", "4", "--trained_passes", "2", "--json"]
    tool.main([*arguments, "--output", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "fixed_point.json").read_text())
    assert report["gap"] == pytest.approx(report["loss"][3] - report["loss"][1])


def test_a_data_set_needs_no_tokenizer(tool, folder, tmp_path, capsys):
    bare, prefix = tmp_path / "bare", tmp_path / "corpus"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    writer = IndexedWriter(str(prefix), 50)
    ids = torch.randint(0, 49, (2, 24), generator=torch.Generator().manual_seed(4))
    writer.add(ids.flatten().numpy(), numpy.array([24, 24]))
    writer.finish()
    writer.publish()
    arguments = ["--model", str(bare), "--data", str(prefix), "--length", "12", "--passes", "5", "--json"]
    tool.main([*arguments, "--output", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    rows = ids.view(4, 12)
    starts = torch.zeros_like(rows, dtype=torch.bool)
    with torch.no_grad():
        expected = load(bare)(rows, labels=rows, passes=5, document_starts=starts).pass_losses.tolist()
    assert report["loss"] == pytest.approx(expected, rel=1e-5) and report["rows"] == 4


def test_growth_ends_with_the_alarm_code(tool, folder, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_fbt.analysis.stability.GROWTH", 0.0)  # then any second norm has grown
    assert tool.main(["--model", str(folder), "--text", text, "--passes", "4", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("alarm: the update norm grows")
    assert "grows" in json.loads((tmp_path / "fixed_point.json").read_text())["alarm"]


def test_weights_that_are_not_numbers(tool, text, tmp_path, capsys):
    config = tiny_config()
    weights = random_weights(config)
    weights["decoder.final_layernorm.weight"][3] = float("nan")
    broken = export(tmp_path / "broken", weights, config)
    assert tool.main(["--model", str(broken), "--text", text, "--length", "8", "--output", str(tmp_path)]) == 5
    assert "not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, code, word",
    [
        (["--passes", "0"], 2, "passes=0"),
        (["--passes", "100000000000000"], 2, "at most 100,000"),
        (["--passes", "3"], 2, "trained depth, 3"),
        (["--length", "3"], 2, "trained depth, 3"),
        (["--rows", "0"], 2, "rows=0"),
        (["--margin", "nan"], 2, "margin=nan"),
        (["--seed", "-1"], 2, "seed=-1"),
        (["--split", "1,1,1"], 2, "--data"),
        (["--device", "nonsense"], 2, "nonsense"),
        (["--length", "1"], 2, "length=1"),
        (["--length", "1000"], 3, "one row needs 1000"),
        (["--text", "absent.txt"], 3, "absent.txt: cannot be read (No such file or directory)"),
        (["--model", "absent"], 4, "convert_to_hf.py"),
    ],
)
def test_wrong_arguments(tool, folder, text, tmp_path, capsys, arguments, code, word):
    given = {"--model": str(folder), "--text": text, "--output": str(tmp_path / "out"), **dict([arguments])}
    assert tool.main([part for pair in given.items() for part in pair]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and word in error
    assert not list(tmp_path.glob("out/*"))


def test_without_matplotlib_nothing_is_computed(tool, folder, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert tool.main(["--model", str(folder), "--text", text, "--output", str(tmp_path)]) == 2
    assert "'.[plots]'" in capsys.readouterr().err


def test_help_has_an_example(tool, capsys):
    with pytest.raises(SystemExit) as left:
        tool.main(["--help"])
    assert left.value.code == 0
    assert "python tools/fixed_point.py --model" in capsys.readouterr().out
