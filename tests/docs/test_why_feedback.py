"""examples/why_feedback.sh as a newcomer runs it; only the installation is left out."""

import json
import re

import pytest

from tests.docs.test_quickstart import run_example

TIMEOUT_S = 1800


@pytest.mark.slow
def test_why_feedback(repository, tmp_path):
    folder = tmp_path / "why"
    printed = run_example(repository, tmp_path, "why_feedback.sh", folder, TIMEOUT_S)
    generated = json.loads((folder / "task_accuracy.json").read_text())["generated"]
    soft, standard = generated["FBT, SOFT"], generated["FBT, STANDARD"]
    assert soft["tokens"] >= 0.9 and soft["tokens"] >= standard["tokens"] + 0.08
    assert soft["whole"] >= 0.2 + max(standard["whole"], generated["standard transformer"]["whole"])
    for name, accuracy in generated.items():
        assert re.search(rf"^{name} +{accuracy['tokens']:.1%} +{accuracy['whole']:.1%}$", printed, re.MULTILINE), name
    assert (folder / "task_accuracy.png").stat().st_size > 10_000
    assert f"The picture: {folder}/task_accuracy.png" in printed

    rows = {
        name: json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("fbt", "standard")
    }
    equivalents = [row["token_equivalents"] for row in rows.values()]
    assert equivalents[0] == pytest.approx(equivalents[1], rel=0.02)
