"""One script for a machine with a Hopper GPU: what tests on CPUs cannot see, in some minutes and one table.

The torch backend against Transformer Engine (logits, losses and gradients for 1, 2 and 3 passes), prefix reuse against
whole passes, FP8 against its emulation, FP8 against bf16 over 50 steps and resumed from a checkpoint, a multi-pass
pipeline over two GPUs, step time and memory by passes, and decoding. Without a GPU it runs what it can, small, as a
test of itself. The last lines say which checks could not run. Exit code 1: a check failed.

    python benchmarks/gpu_check.py
"""

import argparse
import contextlib
import copy
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
import torch.multiprocessing

from megatron_fbt.config.checks import validate_config
from megatron_fbt.config.feedback import PassPhase
from megatron_fbt.config.load import dump_yaml
from megatron_fbt.config.plan import padded_vocab_size
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.backends import fp8_problem, resolve_backend
from megatron_fbt.core.cpu import on_gpu
from megatron_fbt.core.fp8 import begin_step
from megatron_fbt.core.parallel import Layout, initialize_parallel, shut_down_parallel
from megatron_fbt.core.schedule import Recipe, run_passes
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import MicroBatch, document_starts
from megatron_fbt.errors import ConfigError
from megatron_fbt.training.build_optimizer import build_optimizer
from megatron_fbt.training.checkpoint import Checkpointer
from megatron_fbt.training.run_folder import TrainerState


@dataclass(frozen=True)
class Row:
    """A measured number and its bar."""

    check: str
    value: float
    bar: float
    """Largest value that passes; infinite = told only."""

    @property
    def passed(self) -> bool:
        return math.isfinite(self.value) and self.value <= self.bar

    def __str__(self) -> str:
        verdict = "" if self.bar == math.inf and self.passed else ("pass" if self.passed else "FAIL")
        bar = "" if self.bar == math.inf else f"<= {self.bar:g}"
        return f"{self.check:<58} {self.value:>12.5g}  {bar:<10} {verdict}".rstrip()


class Impossible(Exception):
    """A check cannot run here."""


def configuration(small: bool, **fields: Any) -> PretrainConfig:
    """A model for one process; section__field = value."""
    config = PretrainConfig()
    model = config.model
    model.num_layers, model.hidden_size, model.num_attention_heads = (2, 128, 4) if small else (12, 1024, 16)
    model.ffn_hidden_size, model.vocab_size = (384, 1000) if small else (2816, 32_000)
    config.data.sequence_length, config.training.micro_batch_size = (128, 1) if small else (2048, 2)
    config.training.global_batch_size, config.training.train_steps = 4, 50
    config.feedback.schedule, config.optimizer.lr = [PassPhase(0.0, {3: 1.0})], 1e-3
    for name, value in fields.items():
        section, field = name.split("__")
        setattr(getattr(config, section), field, value)
    validate_config(config)
    return config


class Run:
    """A model, its optimizer and batches that are easy to learn: each token follows from the one before."""

    def __init__(self, config: PretrainConfig, layout: Layout):
        vocab, divisor = config.model.vocab_size, config.model.make_vocab_size_divisible_by
        self.config, self.layout = config, layout
        self.stage = FBTStage(config, layout, vocab, padded_vocab_size(vocab, divisor, 1))
        self.optimizer = build_optimizer(config, self.stage, layout)
        self.recipe = Recipe(config.feedback, config.run.seed, training=True)

    def batches(self, step: int) -> List[MicroBatch]:
        training, length, vocab = self.config.training, self.config.data.sequence_length, self.config.model.vocab_size
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(1, vocab, (training.global_batch_size, length + 1), generator=generator)
        noise = torch.rand(text.shape, generator=generator)
        for position in range(1, length + 1):
            follows = (text[:, position - 1] * 5 + 3) % (vocab - 1) + 1
            text[:, position] = torch.where(noise[:, position] < 0.8, follows, text[:, position])
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        numbers = torch.arange(len(text)) + step * len(text)
        whole = (tokens, labels, torch.ones_like(tokens, dtype=torch.float32), document_starts(tokens, 0), numbers)
        parts = (x.to(self.layout.device).split(training.micro_batch_size) for x in whole)
        return [MicroBatch(*part) for part in zip(*parts)]

    def passes(self, step: int, passes: int) -> List[float]:
        """Forward and backward; mean losses of the passes."""
        self.optimizer.zero_grad()
        totals = run_passes(self.stage, self.batches(step), passes, self.recipe)
        self.totals = totals
        return (totals.nll / totals.tokens.clamp(min=1)).tolist()

    def train(self, step: int, passes: int) -> List[float]:
        self.passes(step, passes)
        return self.optimizer.step(self.totals, True, False).loss_per_pass

    @torch.no_grad()
    def top_states(self, passes: int) -> Iterator[torch.Tensor]:
        """h of each pass, [s, b, h], over rows that training has not seen; without jitter, all fused but the first."""
        stage, batch, states = self.stage.eval(), self.unseen, None
        begin_step(stage)
        fused = ~batch.document_starts.t()
        fused[0] = False
        for _ in range(passes):
            inputs = stage.first_inputs(batch.tokens, states, None if states is None else fused)
            states = stage.run_layers(inputs, batch.document_starts)
            yield states
        stage.train()

    @property
    def unseen(self) -> MicroBatch:
        return self.batches(10**6)[0]

    @torch.no_grad()
    def logits(self, passes: int) -> List[torch.Tensor]:
        """Of each pass, float32."""
        return [self.stage.logits(states).float() for states in self.top_states(passes)]

    def gradients(self) -> Dict[str, torch.Tensor]:
        return {name: param.main_grad.clone() for name, param in self.stage.named_parameters()}


def backends(small: bool, layout: Layout) -> List[Row]:
    """Losses and gradients of the torch backend and Transformer Engine's, bf16, same weights."""
    try:
        resolve_backend("transformer_engine")
    except ConfigError as error:
        raise Impossible(str(error).split(". ")[0]) from error
    runs = [Run(configuration(small, model__transformer_impl=name), layout) for name in ("torch", "transformer_engine")]
    return compared("torch against Transformer Engine", runs, 0.05)


def compared(what: str, runs: List[Run], bar: float) -> List[Row]:
    """Logits, losses and gradients of two runs from the same weights.

    Args:
        what: names them.
        runs: two.
        bar: of relative differences of logits and gradients.
    """
    rows = []
    for passes, (one, other) in enumerate(zip(*(run.logits(3) for run in runs)), start=1):
        rows.append(Row(f"{what}, pass {passes}: logits", ((one - other).norm() / one.norm()).item(), bar))
    return rows + steps_compared(what, runs, bar)


def steps_compared(what: str, runs: List[Run], bar: float) -> List[Row]:
    """Losses and gradients alone; arguments as in compared."""
    rows = []
    for passes in (1, 2, 3):
        losses = [run.passes(0, passes) for run in runs]
        gradients = [run.gradients() for run in runs]
        gap = max(abs(a - b) for a, b in zip(*losses))
        squares = sum((gradients[0][name] - gradients[1][name]).double().square().sum() for name in gradients[0])
        norm = sum(gradient.double().square().sum() for gradient in gradients[0].values())
        rows.append(Row(f"{what}, K = {passes}: loss", gap, 0.02))
        rows.append(Row(f"{what}, K = {passes}: gradient", (squares / norm).sqrt().item(), bar))
    return rows


def prefix_reuse(small: bool, layout: Layout) -> List[Row]:
    """Extra passes that compute suffixes alone against whole ones, in each backend that is here."""
    kinds, rows = ["torch"], []
    with contextlib.suppress(ConfigError):
        kinds.append(resolve_backend("transformer_engine"))
    for kind in kinds:
        fields = {"model__transformer_impl": kind}
        runs = [Run(configuration(small, **fields, feedback__prefix_reuse=reuse), layout) for reuse in (False, True)]
        rows += steps_compared(f"{kind}, suffixes against whole passes", runs, 0.05)
    return rows


def emulation(small: bool, layout: Layout) -> List[Row]:
    """Transformer Engine's FP8 against its emulation, on the small model."""
    refuse_without_fp8()
    fields = {"precision__fp8": "hybrid"}
    runs = [Run(configuration(True, **fields, precision__fp8_emulated=low), layout) for low in (True, False)]
    return compared("emulated FP8 against FP8", runs, 0.03)


def refuse_without_fp8() -> None:
    problem = fp8_problem("tensorwise")
    if problem is not None:
        raise Impossible(problem)


def fp8_training(small: bool, layout: Layout, emulated: bool) -> List[Row]:
    """Last losses after some steps in FP8 against bf16, and the next step's after a resume."""
    if not emulated:
        refuse_without_fp8()
    steps, name = (6 if small else 50), "emulated FP8" if emulated else "FP8"
    low = {kind: {"precision__fp8": kind, "precision__fp8_emulated": emulated} for kind in ("e4m3", "hybrid")}
    delayed = {**low["hybrid"], "precision__fp8_recipe": "delayed"}
    kept = {**low["hybrid"], "precision__fp8_param_gather": True, "optimizer__sharding": "megatron"}
    if not emulated:
        low["hybrid, weights too"] = kept
    found = {}
    for kind, fields in {"bf16": {}, **low}.items():
        run = Run(configuration(small, **fields), layout)
        losses = [run.train(step, 1 + step % 3)[0] for step in range(steps)]
        found[kind] = sum(losses[-3:]) / 3
    rows = [
        Row(f"{name} {kind} against bf16, {steps} steps: loss", abs(found[kind] - found["bf16"]), 0.05) for kind in low
    ]
    rows.append(Row(f"{name} delayed, resumed: loss", resumed_gap(configuration(True, **delayed), layout), 1e-3))
    if not emulated:
        gap = resumed_gap(configuration(True, **kept), layout)
        rows.append(Row(f"{name} hybrid, weights too, resumed: loss", gap, 1e-3))
    return rows


def resumed_gap(config: PretrainConfig, layout: Layout) -> float:
    """Loss of a step after three others, and after the same from a checkpoint."""
    run, state = Run(config, layout), TrainerState(step=3, updates=3, fusion_updates=3)
    for step in range(3):
        run.train(step, 3)
    again = Run(config, layout)
    with tempfile.TemporaryDirectory() as folder:
        keeper = Checkpointer(Path(folder), None, layout)
        path = keeper.save(run.stage, run.optimizer, state, dump_yaml(config))
        keeper.load(path, again.stage, again.optimizer)
    return max(abs(a - b) for a, b in zip(run.train(3, 3), again.train(3, 3)))


def costs(small: bool, layout: Layout) -> List[Row]:
    """Seconds and GiB of a step by passes."""
    rows, base = [], None
    run = Run(configuration(small), layout)
    for passes in (1, 2, 3):
        run.train(0, passes)
        if on_gpu():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for step in range(1 if small else 5):
            run.train(step + 1, passes)
        if on_gpu():
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / (1 if small else 5)
        base = base or seconds
        rows.append(Row(f"step of {passes} passes: seconds", seconds, math.inf))
        rows.append(
            Row(f"step of {passes} passes: times one of one pass", seconds / base, math.inf if small else 1.15 * passes)
        )
        if on_gpu():
            rows.append(Row(f"step of {passes} passes: peak GiB", torch.cuda.max_memory_allocated() / 2**30, math.inf))
    return rows


def pipeline(small: bool, layout: Layout) -> List[Row]:
    """Losses of two pipeline stages on two GPUs against one process."""
    if torch.cuda.device_count() < 2:
        raise Impossible(f"needs 2 GPUs, there are {torch.cuda.device_count()}")
    config = configuration(small)
    config.model.transformer_impl = "torch"
    one = [Run(copy.deepcopy(config), layout).passes(0, passes) for passes in (1, 2, 3)]
    config.parallel.pipeline_model_parallel_size = 2
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_stage, args=(config, queue), nprocs=2)
    two = queue.get()
    return [
        Row(f"two pipeline stages against one process, K = {k}: loss", max(abs(a - b) for a, b in zip(*pair)), 0.02)
        for k, pair in enumerate(zip(one, two), start=1)
    ]


def _stage(rank: int, config: PretrainConfig, queue: Any) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29431}
    os.environ.update({name: str(value) for name, value in names.items()})
    layout = initialize_parallel(config.parallel, config.run.seed)
    run = Run(config, layout)
    losses = [run.passes(0, passes) for passes in (1, 2, 3)]
    if layout.is_last_stage:
        queue.put(losses)
    shut_down_parallel(layout)


def decoding(small: bool, layout: Layout) -> List[Row]:
    """Tokens a second with and without the carried state."""
    from megatron_fbt.hf.configuration_fbt import FBTConfig
    from megatron_fbt.hf.modeling_fbt import FBTForCausalLM

    shape = {"hidden_size": 64, "num_hidden_layers": 2} if small else {"hidden_size": 1024, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": shape["hidden_size"] // 4}
    width = {"vocab_size": 1000, "intermediate_size": 2 * shape["hidden_size"], "max_position_embeddings": 1024}
    model = FBTForCausalLM(FBTConfig(**shape, **heads, **width)).to(layout.device, torch.bfloat16).eval()
    prompt, count = torch.arange(1, 17, device=layout.device)[None], 16 if small else 256
    rows, seconds = [], {}
    for regime in ("standard", "soft"):
        for _ in range(2):
            begin = time.perf_counter()
            model.generate(prompt, regime=regime, max_new_tokens=count, do_sample=False, eos_token_id=None)
            seconds[regime] = time.perf_counter() - begin
        rows.append(Row(f"decoding, {regime}: tokens a second", count / seconds[regime], math.inf))
    share = seconds["soft"] / seconds["standard"] - 1
    return [*rows, Row("decoding: overhead of the carried state", share, math.inf if small else 0.15)]


CHECKS: Dict[str, Callable[[bool, Layout], List[Row]]] = {
    "backends": backends,
    "prefix reuse": prefix_reuse,
    "FP8 emulation": emulation,
    "FP8 training": lambda small, layout: fp8_training(small, layout, emulated=False),
    "emulated FP8 training": lambda small, layout: fp8_training(True, layout, emulated=True),
    "costs": costs,
    "pipeline": pipeline,
    "decoding": decoding,
}


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, as without a GPU")
    small = parser.parse_args().quick or not on_gpu()
    layout = initialize_parallel(PretrainConfig().parallel, seed=1)
    ran: List[str] = []
    could_not: List[Tuple[str, str]] = []
    failed = False
    for name, check in CHECKS.items():
        try:
            rows = check(small, layout)
        except Impossible as reason:
            could_not.append((name, str(reason)))
            continue
        except Exception as error:  # the other checks are worth having
            failed = True
            print(f"{name:<58} FAIL: {type(error).__name__}: {error}", flush=True)
            continue
        print("\n".join(map(str, rows)), flush=True)
        ran.append(name)
        failed = failed or not all(row.passed for row in rows)
    print(f"ran: {', '.join(ran)}")
    for name, reason in could_not:
        print(f"could not run: {name} ({reason})")
    shut_down_parallel(layout)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
