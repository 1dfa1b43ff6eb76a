"""The benchmark of conversion runs."""

import json

from benchmarks import conversion_speed


def test_a_quick_run(tmp_path, capsys):
    (tmp_path / "work").mkdir()
    arguments = ["--quick", "--folder", str(tmp_path / "work"), "--json", str(tmp_path / "found.json")]
    assert conversion_speed.main(arguments) == 0
    table, content = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert {name for name in content["results"] if name in table} == set(content["results"])
    assert len(content["results"]) == 3 and all(len(r["ratios"]) == 2 for r in content["results"].values())
    assert content["bytes"]["export"] > 1e5 and content["bytes"]["import"] > 2 * content["bytes"]["export"]
    assert not list((tmp_path / "work").iterdir()) and "MB/s" in table
