"""What asks a run to leave."""

import os
import signal

from megatron_fbt.training.signals import SignalWatcher
from megatron_fbt.training.stop import StopRequests


def test_a_file_asks_rank_0_and_is_gone_when_obeyed(tmp_path):
    with SignalWatcher() as signals:
        first, other = (StopRequests(signals, tmp_path, None, is_main) for is_main in (True, False))
        assert first.requested is None
        (tmp_path / "stop").touch()
        assert first.requested == str(tmp_path / "stop") and other.requested is None
        other.obeyed()
        assert (tmp_path / "stop").exists()
        first.obeyed()
        first.obeyed()
        assert first.requested is None


def test_the_clock_asks_rank_0_from_the_start_of_the_process(tmp_path):
    with SignalWatcher() as signals:
        assert StopRequests(signals, tmp_path, 100.0, True).requested is None
        signals.began -= 101
        assert StopRequests(signals, tmp_path, 100.0, True).requested == "training.wall_clock_limit_s"
        assert StopRequests(signals, tmp_path, 100.0, False).requested is None
        assert StopRequests(signals, tmp_path, None, True).requested is None


def test_a_signal_asks_on_any_rank(tmp_path):
    with SignalWatcher() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [StopRequests(signals, tmp_path, None, is_main).requested for is_main in (True, False)] == [
            "SIGUSR1"
        ] * 2


def test_a_folder_of_that_name_asks_for_nothing_and_does_not_spoil_another_stop(tmp_path):
    (tmp_path / "stop").mkdir()
    with SignalWatcher() as signals:
        requests = StopRequests(signals, tmp_path, None, True)
        assert requests.requested is None
        requests.obeyed()
        assert (tmp_path / "stop").is_dir()
