"""status.json: where a run stands, for scripts and for people who look in from outside."""

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, Union

from megatron_fbt.training.metrics import json_ready, replace_file


def read_status(path: Path) -> Dict[str, Any]:
    """A status file; empty if there is nothing that can be read."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}


def known_status(path: Path) -> Dict[str, Any]:
    """What an earlier start has written about how far the run is; empty if there is nothing that can be read."""
    status = read_status(path)
    return {name: status[name] for name in ("step", "loss", "tokens", "last_checkpoint") if name in status}


def write_status(path: Union[str, Path], **fields: Any) -> None:
    """Replace the status file, atomically; a step of a small model is shorter than waiting for the disk would be.

    Args:
        path: the file, usually <run.dir>/status.json; its folder is made.
        **fields: state ("running", "stopped", "finished" or "failed"), step, train_steps, loss, eta_s (seconds),
            tokens, last_checkpoint. `pid` and `time` (UTC, ISO 8601) are added unless they are given.
            Non-finite numbers are written as null.
    """
    status = {**fields}
    status.setdefault("pid", os.getpid())
    status.setdefault("time", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(json_ready(status), indent=2, allow_nan=False) + "\n", durable=False)
