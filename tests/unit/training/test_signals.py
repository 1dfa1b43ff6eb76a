"""SignalWatcher: a request, never a death in the middle of a save but by a person's second one."""

import os
import signal
import subprocess
import sys

import pytest

from megatron_fbt.training.signals import STOP_SIGNALS, SUPERVISED, SignalWatcher


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_signal_is_noted_and_the_old_handler_comes_back(number):
    before = signal.getsignal(number)
    with SignalWatcher() as watcher:
        assert watcher.requested is None
        send(number)
        assert watcher.requested == signal.Signals(number).name
    assert signal.getsignal(number) == before


def test_echoes_of_a_request_keep_the_first_and_do_not_end_the_process():
    with SignalWatcher() as watcher:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            send(number)
        assert watcher.requested == "SIGUSR1"


def test_the_handler_is_put_back_after_an_exception():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), SignalWatcher():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before


def signal_later(first, second, **environment):
    """A process that gets the second signal when the first one can no longer be echoed by a shell."""
    code = (
        "import os, signal, time\n"
        "from megatron_fbt.training import signals\n"
        "with signals.SignalWatcher() as watcher:\n"
        f"    os.kill(os.getpid(), signal.{first})\n"
        "    print('noted', watcher.requested, flush=True)\n"
        "    time.sleep(signals.ECHO_SECONDS)\n"
        f"    os.kill(os.getpid(), signal.{second})\n"
        "    time.sleep(0.1)\n"
        "print('saved')\n"
    )
    known = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MEGATRON"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**known, **environment})


@pytest.mark.parametrize("first, second", [("SIGINT", "SIGINT"), ("SIGINT", "SIGTERM"), ("SIGTERM", "SIGTERM")])
def test_a_second_request_of_a_person_ends_the_process_at_once(first, second):
    ended = signal_later(first, second)
    assert ended.stdout.split() == ["noted", first]
    assert ended.returncode == -signal.Signals[second]


@pytest.mark.parametrize(
    "first, second",
    [("SIGUSR1", "SIGUSR1"), ("SIGUSR1", "SIGTERM"), ("SIGTERM", "SIGUSR1"), ("SIGHUP", "SIGTERM")],
)
def test_a_warning_never_ends_the_process(first, second):
    ended = signal_later(first, second)
    assert (ended.returncode, ended.stdout.split()) == (0, ["noted", first, "saved"]), ended.stderr


@pytest.mark.parametrize("name, variable", [("SIGTERM", "TORCHELASTIC_RUN_ID"), ("SIGINT", SUPERVISED)])
def test_under_a_launcher_an_echo_may_be_as_late_as_it_likes(name, variable):
    ended = signal_later(name, name, **{variable: "1"})
    assert (ended.returncode, ended.stdout.split()) == (0, ["noted", name, "saved"]), ended.stderr


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalWatcher() as watcher:
            send(signal.SIGHUP)
            assert watcher.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)
