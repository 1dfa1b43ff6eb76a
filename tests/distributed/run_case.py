"""Whole training runs for tests: a tiny corpus and model, and faults put into chosen steps."""

import dataclasses
import os
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.config.pretrain import PretrainConfig
from tests.unit.data.corpus import PlainTokenizer, write_documents

VOCAB = 101
"""Padded to 102 without tensor parallelism and to 104 with two ranks."""
STEPS = 12
SHARP_PHASE = 6
"""First step (counted from 0) that may have several passes; with the seed below K is 1, 1, 1, 1, 1, 1, then varied."""
TIMES = ("seconds", "tokens_per_second", "model_tflops", "data_wait_s", "data_wait_share")
"""Fields of a row that differ from run to run."""


def write_corpus(folder: Path) -> str:
    """40 documents of irregular lengths; the prefix of their .bin and .idx."""
    generator = torch.Generator().manual_seed(5)
    documents = []
    for _ in range(40):
        length = int(torch.randint(3, 40, (), generator=generator))
        documents.append(torch.randint(1, VOCAB, (length,), generator=generator).tolist() + [0])
    return write_documents(folder / "corpus", documents, VOCAB)


def run_config(folder: Path, corpus: str, layout: Tuple[int, int] = (1, 1), **overrides: Any) -> PretrainConfig:
    """A run of 12 steps with one pass in the first half and one to three in the second.

    Args:
        folder: the run folder.
        corpus: see write_corpus.
        layout: tensor and pipeline parallel sizes; sequence parallel where there are two tensor-parallel ranks.
        **overrides: fields by dotted name with __ for the dot.
    """
    config = PretrainConfig()
    fields = {
        "model__num_layers": 2,
        "model__hidden_size": 16,
        "model__num_attention_heads": 2,
        "model__num_query_groups": 2,
        "model__ffn_hidden_size": 24,
        "model__make_vocab_size_divisible_by": 2,
        "feedback__schedule": [PassPhase(0.0, {1: 1.0}), PassPhase(SHARP_PHASE / STEPS, {1: 0.4, 2: 0.3, 3: 0.3})],
        "parallel__tensor_model_parallel_size": layout[0],
        "parallel__pipeline_model_parallel_size": layout[1],
        "parallel__sequence_parallel": layout[0] > 1,
        "parallel__collective_timeout_s": 60,
        "precision__dtype": "fp32",
        "optimizer__lr": 0.02,
        "optimizer__lr_warmup_steps": 3,
        "optimizer__lr_decay_fraction": 0.25,
        "data__paths": [corpus],
        "data__split": "8,2,0",
        "data__sequence_length": 16,
        "data__cache_dir": f"{corpus}-cache",
        "training__train_steps": STEPS,
        "training__micro_batch_size": 2,
        "training__global_batch_size": 8,
        "training__rampup_batch_size": [4, 4, 16],
        "training__eval_iters": 0,
        "logging__tensorboard": False,
        "run__dir": str(folder),
        "run__seed": 7,
        **overrides,
    }
    for name, value in fields.items():
        section, field = name.split("__")
        assert hasattr(getattr(config, section), field), name
        setattr(getattr(config, section), field, value)
    config.data.tokenizer.path = "a stand-in"
    return config


_numbers = iter(range(10_000))


def meet(name: str) -> None:
    """Join a process group; the store that all of a test's groups share needs a new name for each."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), **options)


def run(config: PretrainConfig, before_step: Optional[Callable[[Any], None]] = None, tokenizer: Any = None) -> str:
    """Run megatron_fbt.pretrain.train on this rank.

    Args:
        config: of the run; not changed.
        before_step: called with the trainer at the beginning of each step; what it returns is called at the end.
        tokenizer: of the run; None = one that stands in.

    Returns:
        "finished", or the name of the error that ended it.
    """
    from megatron.core import parallel_state

    from megatron_fbt import pretrain
    from megatron_fbt.errors import FBTError
    from megatron_fbt.training.signals import SignalWatcher
    from megatron_fbt.training.trainer import Trainer

    meet(f"run {next(_numbers)}")
    pretrain.run_tokenizer = lambda config: tokenizer or PlainTokenizer(VOCAB)
    plain_step = Trainer._step

    def step(trainer, signals):
        after_step = before_step(trainer) if before_step is not None else None
        result = plain_step(trainer, signals)
        if after_step is not None:
            after_step()
        return result

    Trainer._step = step
    try:
        with SignalWatcher() as signals:
            pretrain.train(copy_of(config), int(os.environ["RANK"]) == 0, signals)
    except FBTError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return type(error).__name__
    finally:
        Trainer._step = plain_step
        if dist.is_initialized():  # a process of its own would end here
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return "finished"


def copy_of(config: PretrainConfig) -> PretrainConfig:
    """A configuration whose sections can be changed."""
    return PretrainConfig(**{name: dataclasses.replace(section) for name, section in vars(config).items()})


def stop_before(step: int, rank: int = 0) -> Callable[[Any], None]:
    """SIGTERM to one rank when it begins this step (counted from 1)."""

    def hook(trainer) -> None:
        if trainer.state.step + 1 == step and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


def branch(source: Path, target: Path, step: int) -> None:
    """Copy a run as a kill some steps after the checkpoint of `step` would have left it."""
    shutil.copytree(source, target)
    for checkpoint in (target / "checkpoints").glob("step_*"):
        if checkpoint.name > f"step_{step:08d}":
            shutil.rmtree(checkpoint)
    (target / "checkpoints" / "latest").write_text(f"step_{step:08d}\n")


def rows_of(folder: Path) -> List[Dict[str, Any]]:
    """Rows of metrics.jsonl without durations."""
    from megatron_fbt.training.metrics import read_metrics

    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def checkpoint_of(folder: Path, step: int) -> Dict[str, torch.Tensor]:
    """All tensors of a checkpoint, weights and optimizer states, without padded vocabulary rows."""
    from megatron_fbt.core.checkpoint_io import read_tensors

    tensors = read_tensors(folder / "checkpoints" / f"step_{step:08d}")
    in_vocabulary = ("word_embeddings.weight", "output_layer.weight")
    return {name: value[:VOCAB] if name.endswith(in_vocabulary) else value for name, value in tensors.items()}
