"""Tiny training runs as jobs: what tools/launch_slurm.py renders, submitted to a cluster of the tests."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, List

import sentencepiece
import torch
import yaml

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.slurm.submit import launch
from tests.distributed.run_case import rows_of, run_config
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 16
STEP_S = 120
"""Seconds that starting four processes may take on a busy machine."""


def write_rows(path: Path) -> None:
    """Rows of random ids with labels of their own, which need no tokenizer."""
    ids = torch.randint(0, VOCAB, (40, 17), generator=torch.Generator().manual_seed(3)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row[:-1], "labels": row[1:]}) + "\n" for row in ids))


class Jobs:
    """Jobs of one test.

    Args:
        cluster: that is up.
        folder: the test's own.
    """

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        write_rows(folder / "rows.jsonl")

    def write(self, name: str, steps: int = 200, overrides: List[str] = (), **fields: Any) -> Path:
        """A job file of a run on 2 nodes with 2 processes each, tensor and data parallel.

        Args:
            name: of the job, and of the run's folder.
            steps: of the run.
            overrides: arguments of the training command.
            **fields: of the job file.
        """
        changed = {"data__format": "labelled", "data__split": "9,1,0", "model__vocab_size": VOCAB}
        changed |= {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
        changed |= {"training__train_steps": steps, "checkpoint__save_interval": 50, "logging__log_interval": 50}
        config = run_config(self.folder / name, str(self.folder / "rows.jsonl"), **changed)
        config.data.tokenizer.path = None
        (self.folder / f"{name}.config.yaml").write_text(dump_yaml(config))
        job = {
            "name": name,
            "config": str(self.folder / f"{name}.config.yaml"),
            "overrides": list(overrides),
            "nodes": 2,
            "devices_per_node": 2,
            "exclusive": False,
            "time": "30",
            "workdir": str(ROOT),
            "setup": [f"export PYTHONPATH={ROOT} GLOO_SOCKET_IFNAME=lo"],
            "python": sys.executable,
            "preflight": {"run": False},
            **fields,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job))
        return path

    def train_tokenizer(self) -> None:
        """A SentencePiece model of a few words, tokenizer.model in the test's folder."""
        model, text = io.BytesIO(), ["document of part 0 1 2", "a document is a part of parts"] * 4
        options = {"vocab_size": 24, "hard_vocab_limit": False, "minloglevel": 2, "eos_id": 2, "bos_id": 1}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=model, **options)
        (self.folder / "tokenizer.model").write_bytes(model.getvalue())

    def submit(self, job_file: Path, *options: str, **environment: str) -> str:
        """Render, store and submit; the job id."""
        script = self.folder / f"{job_file.stem}.sh"
        launch(str(job_file), output=str(script))
        return self.cluster.submit(script, *options, **environment)

    def log(self, name: str, job: str) -> str:
        """What the job has printed so far."""
        path = self.folder / name / "slurm" / f"{name}-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def status(self, name: str) -> Dict[str, Any]:
        """status.json of a run; empty before there is one."""
        try:
            return json.loads((self.folder / name / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def wait_for_step(self, name: str, step: int, timeout: float = STEP_S) -> None:
        """Wait until a run has done so many steps."""
        self.cluster.wait_for(lambda: self.status(name).get("step", 0) >= step, timeout, what=f"step {step} of {name}")

    def rows(self, name: str) -> List[Dict[str, Any]]:
        """Rows of metrics.jsonl without durations."""
        return rows_of(self.folder / name)

    def workers(self, name: str) -> List[int]:
        """Processes of this machine that train a run, launchers left out."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            mine = str(self.folder / f"{name}.config.yaml") in words and "megatron_fbt.pretrain" in words
            if mine and "megatron_fbt.launch" not in words and int(path.name) != os.getpid() and words[0] != "srun":
                found.append(int(path.name))
        return found
