"""Generated programs: what passes, what ends, what cannot do harm."""

import os
import time

import pytest

from megatron_fbt.evaluation.sandbox import Limits, run_program, run_programs


def test_a_right_program_passes_and_a_wrong_one_says_why():
    right, wrong, broken = run_programs(["assert 1 + 1 == 2\n", "assert 1 + 1 == 3, 'sum'\n", "def f(:\n"])
    assert right.passed and right.reason == ""
    assert not wrong.passed and wrong.reason == "AssertionError: sum"
    assert not broken.passed and "SyntaxError" in broken.reason


@pytest.mark.parametrize("early", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()"])
def test_leaving_before_the_tests_is_no_pass(early):
    assert not run_program(f"{early}\nassert False\n").passed


def test_an_endless_loop_ends():
    begin = time.monotonic()
    outcome = run_program("while True:\n    pass\n", Limits(seconds=1))
    assert not outcome.passed and outcome.reason == "did not end within 1 s"
    assert time.monotonic() - begin < 20


def test_sleeping_and_ignoring_signals_ends():
    program = "import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)\n"
    assert run_program(program, Limits(seconds=1)).reason == "did not end within 1 s"


def test_memory_is_limited():
    outcome = run_program("x = [0]\nwhile True:\n    x = x + x\n", Limits(seconds=60, memory_mib=256))
    assert not outcome.passed and outcome.reason == "MemoryError"


def test_output_is_limited_and_not_shown(capfd):
    program = "import sys\nwhile True:\n    print('x' * 65536)\n    sys.stderr.write('y' * 65536)\n"
    assert not run_program(program, Limits(seconds=20, file_mib=1)).passed
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True:\n    os.fork()\n",
        "import subprocess\nsubprocess.run(['true'])\n",
        "import os\nos.system('true')\n",
        "import multiprocessing as m\nm.get_context('spawn').Process(target=print).start()\n",
        "import os\nos.kill(os.getppid(), 9)\n",
        "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)\n",
    ],
)
def test_processes_signals_and_connections_are_refused(program):
    outcome = run_program(program)
    assert not outcome.passed and "not allowed in a generated program" in outcome.reason, outcome


def test_files_go_to_a_folder_that_is_removed(tmp_path):
    place = tmp_path / "where"
    assert run_program(
        f"import os\nopen('stray', 'w').write('x')\nopen({str(place)!r}, 'w').write(os.getcwd())\n"
    ).passed
    assert not os.path.exists(place.read_text())


def test_a_program_sees_neither_our_environment_nor_our_input(monkeypatch):
    monkeypatch.setenv("FBT_SECRET", "1")
    assert run_program("import os, sys\nassert 'FBT_SECRET' not in os.environ\nassert sys.stdin.read() == ''\n").passed


def test_programs_keep_their_order():
    programs = [f"assert {number} % 3\n" for number in range(7)]
    assert [outcome.passed for outcome in run_programs(programs)] == [bool(number % 3) for number in range(7)]
