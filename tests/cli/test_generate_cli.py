"""tools/generate.py as it is called."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from megatron_fbt.hf.modeling_fbt import FBTForCausalLM
from tests.unit.hf.exports import export
from tests.unit.hf.reference import Reference, random_weights, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config()
    return export(tmp_path_factory.mktemp("exports") / "tiny model-1.0", random_weights(config), config)


@pytest.fixture(scope="module")
def tool(repository):
    spec = importlib.util.spec_from_file_location("generate_tool", repository / "tools" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected_text(regime, prompt, count):
    config = tiny_config()
    ids = torch.tensor([ord(letter) - ord("0") for letter in prompt])
    tokens = Reference(random_weights(config), config).greedy(ids, regime, count)
    return "".join(chr(ord("0") + token) for token in tokens[: (tokens + [49]).index(49)])


def test_command_prints_the_continuation_to_stdout(repository, folder, tmp_path):
    command = [sys.executable, str(repository / "tools" / "generate.py"), "--model", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(repository), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--regime", "fused", "--prompt", "0123", "--max_new_tokens", "6"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_text("fused", "0123", 6) + "\n"
    assert "tokens/s" in done.stderr


@pytest.mark.parametrize("regime", ["standard", "soft", "fused", "recurrent"])
def test_json(tool, folder, capsys, regime):
    assert (
        tool.main(["--model", str(folder), "--regime", regime, "--prompt", "ABC", "--json", "--max_new_tokens", "8"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["continuation"] == expected_text(regime, "ABC", 8)
    assert result["regime"] == regime and result["prompt"] == "ABC"


def test_prompt_from_a_file_and_from_stdin(tool, folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("0123", encoding="utf-8")
    common = ["--model", str(folder), "--max_new_tokens", "8"]
    assert tool.main([*common, "--prompt_file", str(tmp_path / "prompt.txt")]) == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("0123"))
    assert tool.main(common) == 0
    assert capsys.readouterr().out == from_file == expected_text("soft", "0123", 8) + "\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--top_p", "0"],
        ["--top_k", "-3"],
        ["--fused_passes", "0"],
        ["--max_new_tokens", "0"],
        ["--prompt_file", "absent.txt"],
        ["--prompt", ""],
        ["--device", "nonsense"],
        ["--batch_size", "0"],
        ["--stream", "--json"],
        ["--stream", "--batch_size", "2"],
        ["--seed", "-1"],
        ["--top_p", "1.5"],
        ["--top_p", "nan"],
        ["--temperature", "inf"],
        ["--prompts", "absent.jsonl"],
    ],
)
def test_wrong_arguments_end_before_the_weights_are_read(tool, tmp_path, folder, capsys, arguments, monkeypatch):
    monkeypatch.setattr(FBTForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    prompt = [] if arguments[0].startswith("--prompt") else ["--prompt", "0"]
    assert tool.main(["--model", str(folder), *prompt, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and arguments[0].removeprefix("--").split("_file")[0] in error


def test_many_prompts_in_order(tool, folder, tmp_path, capsys):
    texts = ["0123", "ABC", "9", "0123", "KLMNO"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text, "id": text}) + "\n" for text in texts))
    (tmp_path / "p.txt").write_text("\n".join(texts))
    common = ["--model", str(folder), "--max_new_tokens", "8"]
    assert tool.main([*common, "--prompts", str(tmp_path / "p.jsonl"), "--batch_size", "2", "--json"]) == 0
    done = capsys.readouterr()
    results = [json.loads(line) for line in done.out.splitlines()]
    assert [(result["number"], result["prompt"]) for result in results] == list(enumerate(texts, 1))
    assert [result["continuation"] for result in results] == [expected_text("soft", text, 8) for text in texts]
    assert "5 prompts" in done.err and "tokens/s" in done.err
    assert tool.main([*common, "--prompts", str(tmp_path / "p.txt"), "--gate_table"]) == 0
    blocks = "".join(f"--- {n} of 5\n{expected_text('soft', text, 8)}\n" for n, text in enumerate(texts, 1))
    assert capsys.readouterr().out == blocks
    assert tool.main([*common, "--prompts", str(tmp_path / "p.txt"), "--stream"]) == 0
    assert capsys.readouterr().out == blocks
    assert tool.main([*common, *[word for text in texts for word in ("--prompt", text)], "--batch_size", "3"]) == 0
    assert capsys.readouterr().out == blocks


def test_same_seed_same_text_in_any_order(tool, folder, tmp_path, capsys):
    texts = ["0123", "ABC", "9"]

    def sample(order, *options):
        (tmp_path / "p.txt").write_text("\n".join(order))
        common = ["--model", str(folder), "--prompts", str(tmp_path / "p.txt"), "--temperature", "3", "--json"]
        assert tool.main([*common, "--max_new_tokens", "8", *options]) == 0
        results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return {result["prompt"]: result["token_ids"] for result in results}

    expected = sample(texts, "--seed", "5")
    assert sample(texts[::-1], "--seed", "5", "--batch_size", "2") == expected
    assert sample(texts, "--seed", "6") != expected


def test_chat(tool, folder, tmp_path, capsys):
    talk = tmp_path / "talk"
    shutil.copytree(folder, talk)
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "01"}]}\n')
    arguments = ["--model", str(talk), "--chat", "--max_new_tokens", "6"]
    assert tool.main([*arguments, "--prompt", "01"]) == 4
    assert "no chat template" in capsys.readouterr().err
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}23{% endif %}"
    (talk / "chat_template.jinja").write_text(template)
    for prompts in (["--prompt", "01"], ["--prompts", str(tmp_path / "c.jsonl")]):
        assert tool.main([*arguments, *prompts]) == 0
        assert capsys.readouterr().out == expected_text("soft", "0123", 6) + "\n"


def test_no_model_there(tool, tmp_path, capsys):
    assert tool.main(["--model", str(tmp_path / "absent"), "--prompt", "0"]) == 4
    assert "convert_to_hf.py" in capsys.readouterr().err


def test_help_has_an_example(tool, capsys):
    with pytest.raises(SystemExit) as left:
        tool.main(["--help"])
    assert left.value.code == 0
    assert "python tools/generate.py --model" in capsys.readouterr().out
