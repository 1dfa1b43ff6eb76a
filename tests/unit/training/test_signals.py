"""SignalWatcher: a request, never a death in the middle of a save."""

import os
import signal
import subprocess
import sys

import pytest

from megatron_fbt.training.signals import STOP_SIGNALS, SignalWatcher


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


@pytest.mark.parametrize("first, second", [("SIGINT", "SIGINT"), ("SIGUSR1", "SIGTERM"), ("SIGTERM", "SIGUSR1")])
def test_another_signal_later_ends_the_process_at_once(first, second):
    code = (
        "import os, signal, time\n"
        "from megatron_fbt.training import signals\n"
        "with signals.SignalWatcher() as watcher:\n"
        f"    os.kill(os.getpid(), signal.{first})\n"
        "    print('noted', watcher.requested, flush=True)\n"
        "    time.sleep(signals.ECHO_SECONDS)\n"
        f"    os.kill(os.getpid(), signal.{second})\n"
        "    time.sleep(5)\n"
        "print('not reached')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["noted", first]
    assert ended.returncode == -signal.Signals[second]
