"""The preflight: each kind of bad node is found and named, good ones are not."""

import dataclasses
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from megatron_fbt import preflight
from megatron_fbt.errors import ConfigError
from megatron_fbt.preflight import main
from megatron_fbt.slurm.job import PreflightConfig
from megatron_fbt.slurm.judge import describe, excluded, judge
from megatron_fbt.slurm.meeting import Meeting
from megatron_fbt.slurm.node_facts import NodeFacts

GOOD = NodeFacts("n", 8, 10**12, {"torch": "2.13.0"}, [700.0] * 8, True, 0.0, 40.0, 35.0)
LIMITS = PreflightConfig()
FAULTS = {
    "7 GPUs instead of 8": {"devices": 7},
    "1.0 GB free": {"free_bytes": 10**9},
    "cannot be written": {"free_bytes": None},
    "torch 2.12.0, but 2.13.0 on most nodes": {"versions": {"torch": "2.12.0"}},
    "torch None": {"versions": {}},
    "device 3 multiplies at 400": {"matmul_tflops": [700.0] * 3 + [400.0] + [700.0] * 4},
    "not shared": {"sees_folder": False},
    "clock is -9.0 s off": {"clock_skew_s": -9.0},
    "20 GB/s to its neighbours": {"link_gb_s": 20.0},
}


def cluster(**fault):
    nodes = [dataclasses.replace(GOOD, name=f"n{number}") for number in range(4)]
    nodes[2] = dataclasses.replace(nodes[2], **fault)
    return nodes


def test_good_nodes_are_good():
    assert judge(cluster(), LIMITS, 8) == {}
    text = describe(cluster(), {})
    assert "4 nodes" in text and text.endswith("all nodes are good")


def test_a_node_without_a_name_is_not_given_to_sbatch():
    bad = {"number 1": ["no answer"]}
    assert excluded(bad) is None and excluded({**bad, "n2": ["slow"]}) == "n2"
    text = describe([GOOD], bad)
    assert "1 node, " in text and "--exclude" not in text


@pytest.mark.parametrize("problem", FAULTS)
def test_the_bad_node_is_named_with_what_is_wrong(problem):
    bad = judge(cluster(**FAULTS[problem]), LIMITS, 8)
    assert list(bad) == ["n2"] and len(bad["n2"]) == 1 and problem in bad["n2"][0]
    assert "--exclude=n2" in describe(cluster(**FAULTS[problem]), bad).splitlines()[-1]


def test_small_differences_are_allowed():
    nodes = cluster(clock_skew_s=4.9, link_gb_s=29.0, matmul_tflops=[500.0] * 8)
    assert judge(nodes, LIMITS, 8) == {}


def test_of_two_nodes_neither_can_be_told_to_have_the_slow_network():
    first, second, third = cluster(link_gb_s=20.0)[:3]
    assert judge([first, third], LIMITS, 8) == {} and list(judge([first, second, third], LIMITS, 8)) == ["n2"]


def nodes_of(size, work, timeout_s=20.0):
    """Run work(meeting) as each of several nodes, in threads that share a store; what they returned."""
    results, meetings, port = {}, {}, _free_port()

    def node(rank):
        meetings[rank] = Meeting("127.0.0.1", port, rank, size, timeout_s)
        results[rank] = work(meetings[rank])

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(size)]


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_what_nodes_found_comes_together_and_the_verdict_goes_to_all():
    def work(meeting):
        found, missing = meeting.gather("facts", dataclasses.replace(GOOD, name=f"n{meeting.rank}"))
        return [node.name for node in found], missing, meeting.tell("verdict", 69 if meeting.rank == 0 else None)

    assert nodes_of(3, work) == [(["n0", "n1", "n2"], [], 69), ([], [], 69), ([], [], 69)]


def test_a_node_that_does_not_answer_is_missed():
    def work(meeting):
        if meeting.rank == 1:
            return None
        return meeting.gather("facts", GOOD)[1]

    assert nodes_of(2, work, timeout_s=1.0)[0] == [1]


def test_a_wrong_clock_is_measured(monkeypatch):
    plain = time.time
    monkeypatch.setattr(time, "time", lambda: plain() + (30.0 if threading.current_thread().name == "late" else 0.0))

    def work(meeting):
        if meeting.rank == 1:
            threading.current_thread().name = "late"
        return meeting.clock_skew()

    skews = nodes_of(3, work)
    assert skews[0] == 0 and skews[1] == pytest.approx(30, abs=2) and abs(skews[2]) < 2


def test_a_folder_that_is_not_shared_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fbt.slurm.meeting.FOLDER_WAIT_S", 0.5)

    def work(meeting):
        folder = tmp_path / ("elsewhere" if meeting.rank == 2 else "shared")
        folder.mkdir(exist_ok=True)
        (folder / str(meeting.rank)).write_text("x")
        return meeting.sees_folder(folder)

    assert nodes_of(3, work) == [True, True, False]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run folder; no launcher."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_one_machine_alone(run_dir, capsys):
    assert main(["--run_dir", str(run_dir), "--min_free_gb", "0"]) == 0
    assert "all nodes are good" in capsys.readouterr().out
    assert main(["--run_dir", str(run_dir), "--min_free_gb", "1e12"]) == 69
    assert "GB free in the run folder" in capsys.readouterr().out
    assert os.listdir(run_dir) == []


def test_one_json_object(run_dir, capsys):
    assert main(["--run_dir", str(run_dir), "--min_free_gb", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bad"], found["exclude"], len(found["nodes"])) == ({}, None, 1)
    assert found["nodes"][0]["matmul_tflops"][0] > 0 and found["nodes"][0]["sees_folder"] is True
    assert main(["--run_dir", str(run_dir), "--min_free_gb", "1e12", "--json"]) == 69
    found = json.loads(capsys.readouterr().out)
    name = found["nodes"][0]["name"]
    assert found["exclude"] == name and "GB free" in found["bad"][name][0]


def test_a_run_folder_that_cannot_be_written_makes_a_bad_node(run_dir, capsys):
    assert main(["--run_dir", "/proc", "--json", "--min_free_gb", "0"]) == 69
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert list(found["bad"].values()) == [["the run folder cannot be written"]] and printed.err == ""


def test_a_mistyped_run_folder_is_not_made(run_dir, capsys):
    assert main(["--run_dir", str(run_dir / "typo"), "--min_free_gb", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"error: --run_dir {run_dir / 'typo'}: no such folder")
    assert len(printed.err.splitlines()) == 1 and not (run_dir / "typo").exists()


PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "changed, part",
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR: not set"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR = ' ': "),
        ({"MASTER_PORT": None}, "MASTER_PORT: not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT = 'x': "),
        ({"MASTER_PORT": "0"}, "MASTER_PORT = '0': "),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = '65536': "),
        ({"RANK": None}, "RANK: not set"),
        ({"RANK": "2"}, "RANK = '2': "),
        ({"RANK": "first"}, "RANK = 'first': "),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0': "),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': "),
        ({"WORLD_SIZE": None}, "WORLD_SIZE: not set"),
    ],
)
def test_a_launcher_that_says_nonsense_is_named(run_dir, capsys, monkeypatch, changed, part):
    for name, value in {**PLACE, **changed}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    assert main(["--run_dir", str(run_dir)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: environment variable {part}") and "megatron_fbt.slurm.task" in printed.err
    assert len(printed.err.splitlines()) == 1 and os.listdir(run_dir) == []


def test_a_mistyped_run_folder_makes_no_node_a_bad_one(run_dir):
    options = preflight.build_parser().parse_args(["--run_dir", str(run_dir / "typo"), "--timeout_s", "20"])
    port, ended = _free_port(), {}

    def node(rank):
        try:
            ended[rank] = preflight.check_together(options, LIMITS, preflight.Place(rank, 2, "127.0.0.1", port))
        except ConfigError as error:
            ended[rank] = str(error)

    threads = [threading.Thread(target=node, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended[0].startswith(f"--run_dir {run_dir / 'typo'}: no such folder") and ended[1] == 2
    assert os.listdir(run_dir) == []


@pytest.mark.parametrize(
    "options, part",
    [
        (["--min_free_gb", "nan"], "--min_free_gb"),
        (["--devices", "-3"], "--devices -3"),
        (["--max_clock_skew_s", "-1"], "--max_clock_skew_s"),
        (["--slow_factor", "1e9"], "--slow_factor"),
        (["--timeout_s", "nan"], "--timeout_s nan"),
        (["--run_dir", ""], "--run_dir"),
    ],
)
def test_limits_without_a_meaning_are_refused(tmp_path, capsys, options, part):
    assert main(["--run_dir", str(tmp_path / "run"), *options]) == 2
    assert part in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_first_node_that_cannot_be_reached_is_an_error(tmp_path, capsys, monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(preflight, "own_facts", lambda run_dir, mark: GOOD)
    assert main(["--run_dir", str(Path(tmp_path)), "--timeout_s", "1"]) == 69
    assert "error: preflight on" in capsys.readouterr().err


def test_without_the_first_node_no_mark_stays(run_dir, monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["--run_dir", str(run_dir), "--timeout_s", "1"]) == 69
    assert os.listdir(run_dir) == []
