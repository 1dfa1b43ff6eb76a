"""tools/convert_from_hf.py: its report, its exit codes, and what its example command starts."""

import importlib.util
import json
import shlex

import pytest

from megatron_fbt.pretrain import main as pretrain
from tests.unit.hf.sources import change_config, make_source, write_source


@pytest.fixture(scope="module")
def tool(repository):
    spec = importlib.util.spec_from_file_location("convert_from_tool", repository / "tools" / "convert_from_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "my model", make_source("qwen3"))


def test_the_printed_command_plans_a_run(tool, source, tmp_path, capsys):
    output = tmp_path / "out"
    assert tool.main(["--model", str(source), "--output", str(output), "--fusion", "add", "--seed", "9"]) == 0
    printed = capsys.readouterr().out
    assert f"qwen3 {source} -> {output}" in printed and "feedback.input_scale 0.2" in printed
    command = shlex.split(printed.partition("train on with:\n")[2])
    assert pretrain([*command[3:], "--dry_run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert '"parameters"' in json.dumps(plan)


def test_json_and_exit_codes(tool, source, tmp_path, capsys):
    common = ["--model", str(source), "--output", str(tmp_path / "out")]
    assert tool.main([*common, "--json", "--sequence_length", "64"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model_type"], report["vocab_size"], report["precision"]) == ("qwen3", 60, "fp32")
    assert tool.main(common) == 2 and "--force" in capsys.readouterr().err
    assert tool.main([*common, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(tmp_path / "out")
    change_config(source, attention_bias=True)
    assert tool.main([*common, "--force"]) == 4 and "attention_bias = True" in capsys.readouterr().err
    (source / "tokenizer.json").write_text("{")
    change_config(source, attention_bias=False)
    assert tool.main([*common, "--force"]) == 3
    with pytest.raises(SystemExit) as stop:
        tool.main(["--model", str(source)])
    assert stop.value.code == 2
