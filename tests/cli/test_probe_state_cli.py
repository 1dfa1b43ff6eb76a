"""tools/probe_state.py as it is called."""

import importlib.util
import json
import shutil

import pytest
import torch

from tests.unit.hf.exports import export
from tests.unit.hf.reference import random_weights, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config()
    return export(tmp_path_factory.mktemp("exports") / "tiny", random_weights(config), config)


@pytest.fixture(scope="module")
def tool(repository):
    spec = importlib.util.spec_from_file_location("probe_tool", repository / "tools" / "probe_state.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path, label, sequences=60, length=16):
    generator = torch.Generator().manual_seed(5)
    lines = []
    for _ in range(sequences):
        ids = torch.randint(0, 4, (length,), generator=generator).tolist()
        coins = torch.randint(0, 3, (length,), generator=generator).tolist()
        lines.append(json.dumps({"input_ids": ids, "labels": [label(ids, coins, t) for t in range(length)]}))
    path.write_text("\n".join(lines))
    return str(path)


def accuracies(report):
    return {(result["layer"], result["regime"]): result["accuracy"] for result in report["results"]}


def test_the_token_is_found_and_its_predecessor_only_with_feedback(tool, folder, tmp_path, capsys):
    own = write(tmp_path / "own.jsonl", lambda ids, coins, t: ids[t])
    common = ["--model", str(folder), "--output", str(tmp_path / "out"), "--folds", "3"]
    assert tool.main([*common, "--facts", own, "--regimes", "plain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["accuracy"] == 1.0
    before = write(tmp_path / "before.jsonl", lambda ids, coins, t: ids[t - 1] if t else None)
    assert tool.main([*common, "--facts", before, "--layer", "0", "1"]) == 0
    report = json.loads((tmp_path / "out" / "probe_state.json").read_text())
    found = accuracies(report)
    assert found[0, "plain"] < 0.35 < 0.95 < found[0, "fused1"] and found[0, "plain"] < found[0, "recurrent"]
    assert (report["positions"], report["groups"], report["values"]) == (60 * 15, 60, [0, 1, 2, 3])
    text = capsys.readouterr().out
    assert "not that training put it there" in text and f"{found[1, 'fused1']:.3f}" in text
    assert (tmp_path / "out" / "probe_state.png").read_bytes().startswith(b"\x89PNG")


def test_a_random_label_is_at_the_level_of_the_majority(tool, folder, tmp_path, capsys):
    facts = write(tmp_path / "coins.jsonl", lambda ids, coins, t: coins[t] > 0)
    arguments = ["--model", str(folder), "--facts", facts, "--regimes", "fused1", "--max_positions", "800", "--json"]
    assert tool.main([*arguments, "--output", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    assert report["positions"] == 800 and result["majority"] == pytest.approx(2 / 3, abs=0.05)
    assert result["accuracy"] <= result["majority"] + 0.03


def test_what_is_known_of_a_sequence_does_not_leak(tool, folder, tmp_path, capsys):
    """Each sequence repeats a token of its own, and its label is a coin: found only if a sequence were split."""
    generator = torch.Generator().manual_seed(6)
    coins = torch.randint(0, 2, (40,), generator=generator).tolist()
    lines = [json.dumps({"input_ids": [n] * 8, "labels": [coins[n]] * 8}) for n in range(40)]
    (tmp_path / "facts.jsonl").write_text("\n".join(lines))
    arguments = ["--model", str(folder), "--facts", str(tmp_path / "facts.jsonl"), "--regimes", "plain", "--json"]
    assert tool.main([*arguments, "--output", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["accuracy"] < 0.75


def test_an_export_without_a_tokenizer_needs_ids(tool, folder, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    facts = write(tmp_path / "ids.jsonl", lambda ids, coins, t: ids[t], sequences=4)
    arguments = ["--model", str(bare), "--regimes", "plain", "--output", str(tmp_path), "--facts"]
    assert tool.main([*arguments, facts]) == 0
    (tmp_path / "text.jsonl").write_text('{"text": "01", "labels": [0, 1]}')
    assert tool.main([*arguments, str(tmp_path / "text.jsonl")]) == 3
    assert "has no tokenizer; give input_ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, code, word",
    [
        (["--folds", "1"], 2, "folds=1"),
        (["--l2", "nan"], 2, "l2=nan"),
        (["--regimes", "plain,soft"], 2, "'soft'"),
        (["--regimes", "fused100000000000000"], 2, "more than 100,000 passes"),
        (["--seed", "9223372036854775808"], 2, "seed=9223372036854775808"),
        (["--layer", "3"], 2, "layer=3"),
        (["--facts", "absent.jsonl"], 3, "absent.jsonl"),
        (["--model", "absent"], 4, "convert_to_hf.py"),
    ],
)
def test_wrong_arguments(tool, folder, tmp_path, capsys, arguments, code, word):
    facts = write(tmp_path / "facts.jsonl", lambda ids, coins, t: ids[t], sequences=2)
    given = {"--model": str(folder), "--facts": facts, "--output": str(tmp_path / "out"), **dict([arguments])}
    assert tool.main([part for pair in given.items() for part in pair]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and word in error
    assert not list(tmp_path.glob("out/*"))


def test_states_that_are_not_numbers(tool, tmp_path, capsys):
    config = tiny_config()
    weights = random_weights(config)
    weights["embedding.word_embeddings.weight"][2] = float("nan")
    broken = export(tmp_path / "broken", weights, config)
    facts = write(tmp_path / "facts.jsonl", lambda ids, coins, t: ids[t], sequences=4)
    assert tool.main(["--model", str(broken), "--facts", facts, "--output", str(tmp_path)]) == 5
    assert "not finite" in capsys.readouterr().err


def test_help_has_an_example(tool, capsys):
    with pytest.raises(SystemExit) as left:
        tool.main(["--help"])
    assert left.value.code == 0
    assert "python tools/probe_state.py --model" in capsys.readouterr().out
