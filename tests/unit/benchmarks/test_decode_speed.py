"""The benchmark of decoding: it runs, and a missed bar is an error."""

import json

import pytest

from benchmarks import decode_speed
from benchmarks.pairs import PairResult


def test_a_quick_run(tmp_path, capsys):
    assert decode_speed.main(["--quick", "--batch_sizes", "2", "--json", str(tmp_path / "found.json")]) == 0
    table, content = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    names = {f"batch 2: {name}" for name in decode_speed.BARS}
    assert names < set(content["results"]) and len(content["results"]) == 6
    for name, result in content["results"].items():
        assert name in table and len(result["ratios"]) == 3 and min(result["ratios"]) > 0
    assert content["parameters"] > 1e5


@pytest.mark.parametrize(
    ("standard", "soft", "fused", "missed"),
    [(0.95, 0.95, 1.05, 0), (0.94, 1.0, 1.0, 1), (1.0, 0.94, 1.0, 1), (1.0, 1.0, 1.06, 1), (0.5, 0.5, 2.0, 3)],
)
def test_a_missed_bar_is_exit_code_1(monkeypatch, capsys, standard, soft, fused, missed):
    ratios = dict(zip(decode_speed.BARS, (standard, soft, fused), strict=True))
    monkeypatch.setattr(decode_speed, "SHAPE", decode_speed.QUICK_SHAPE)
    monkeypatch.setattr(
        decode_speed,
        "compare",
        lambda *_: {name: PairResult.from_durations([r, r], [1.0, 1.0]) for name, r in ratios.items()},
    )
    assert decode_speed.main(["--batch_sizes", "1"]) == (missed > 0)
    assert capsys.readouterr().out.count("MISSED") == missed
