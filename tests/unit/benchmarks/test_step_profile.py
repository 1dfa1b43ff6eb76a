"""The profile of a step: every operator's time has one kind, and they add up."""

import json
import os
import subprocess
import sys

import pytest
import torch

KINDS = ("matrix products, attention", "loss", "norms, activations", "copies, casts", "host reads", "optimizer")


def test_a_small_step_has_work_of_every_kind_but_reads(repository):
    done = subprocess.run(
        [sys.executable, str(repository / "benchmarks/step_profile.py"), "--small", "--json", "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    shares = found["shares"]
    assert sum(shares.values()) == pytest.approx(1, abs=0.02) and found["seconds"] > 0
    assert all(shares[kind] > 0 for kind in (*KINDS[:4], "optimizer", "Python"))
    assert shares["host reads"] < 0.05 and len(found["largest"]) == 12


def test_kinds_come_from_names_from_callers_and_from_the_forward(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import step_profile

    x, weight = torch.randn(300, 300, requires_grad=True), torch.ones(300, requires_grad=True)

    def step():
        normed = torch.nn.functional.rms_norm(x @ x, (300,), weight)
        with step_profile.record_function("loss"):
            loss = normed.exp().sum()
        loss.backward()
        return torch.cat([x, x]).max().item()

    step()
    seconds, names = step_profile.profiled(step)
    assert all(seconds[kind] > 0 for kind in KINDS[:5]) and seconds["optimizer"] == 0
    assert "aten::mm" not in names and names["aten::cat"] <= seconds["copies, casts"]
    assert (
        names["aten::exp"] <= seconds["loss"] and seconds["loss"] + seconds["norms, activations"] > names["aten::mul"]
    )
