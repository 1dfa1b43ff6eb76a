"""Speed of decoding with exported models, against transformers' own LlamaForCausalLM of the same shape.

All models have random weights and run in the same generate loop, with the same attention and the same kind of cache.
They alternate within each round, so that what else the machine does hits all of them alike; the ratio of STANDARD to
itself, from the same rounds, is the noise. Exit code 1: a bar is missed.

    OMP_NUM_THREADS=1 python benchmarks/decode_speed.py --json decode_speed.json
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from pairs import PairResult, format_table, measure, number_of_pairs, to_json  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from megatron_fbt.hf.configuration_fbt import FBTConfig  # noqa: E402
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM  # noqa: E402

SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
QUICK_SHAPE = {**SHAPE, "vocab_size": 500, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Bar:
    """What a ratio must reach.

    Attributes:
        limit: The bar.
        at_least: Whether larger is better.
    """

    limit: float
    at_least: bool

    def holds(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit}"


BARS = {
    "decode, STANDARD / Llama": Bar(0.95, True),
    "decode, SOFT with gate table / STANDARD": Bar(0.95, True),
    "first token, FUSED(1) / 2 x STANDARD": Bar(1.05, False),
}


class Clock(BaseStreamer):
    """When the prompt and each token came."""

    def __init__(self) -> None:
        self.times: List[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Measurement:
    """How it is measured.

    Attributes:
        shape: Fields that both configurations have.
        rounds: Rounds that count.
        prompt: Tokens of the prompt when decoding is timed.
        new_tokens: Tokens that are decoded.
        long_prompt: Tokens of the prompt when the first token is timed.
        device: Where.
        dtype: Number format of the weights.
    """

    shape: Dict[str, object]
    rounds: int
    prompt: int
    new_tokens: int
    long_prompt: int
    device: str
    dtype: torch.dtype

    def model(self, model_class: type, config: PretrainedConfig) -> torch.nn.Module:
        """A model with random weights."""
        torch.manual_seed(0)
        model = model_class(config).to(self.device, self.dtype).eval()
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return model


def decoding(model: torch.nn.Module, ids: torch.Tensor, new_tokens: int, **options) -> Callable[[], float]:
    """Greedy generation; returns the seconds from the first new token to the last."""

    def run() -> float:
        clock = Clock()
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, streamer=clock, **options)
        return clock.times[-1] - clock.times[1]

    return run


def first_token(model: torch.nn.Module, ids: torch.Tensor, **options) -> Callable[[], float]:
    """Greedy generation of one token; returns the seconds that it took."""

    def run() -> float:
        began, clock = time.perf_counter(), Clock()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, streamer=clock, **options
        )
        return clock.times[1] - began

    return run


def compare(setup: Measurement, batch_size: int) -> Dict[str, PairResult]:
    """All ratios with one batch size. Of decoding, ratios of speeds; of the first token, of times."""
    llama = setup.model(LlamaForCausalLM, LlamaConfig(**setup.shape))
    fbt = setup.model(FBTForCausalLM, FBTConfig(**setup.shape))
    generator = torch.Generator().manual_seed(1)
    lengths = (setup.prompt, setup.long_prompt)
    short, long = (
        torch.randint(0, setup.shape["vocab_size"], (batch_size, length), generator=generator).to(setup.device)
        for length in lengths
    )
    count = setup.new_tokens
    theirs = decoding(llama, short, count)
    standard = decoding(fbt, short, count, regime="standard")
    soft = decoding(fbt, short, count, regime="soft", gate_table=True)
    computed = decoding(fbt, short, count, regime="soft", gate_table=False)
    of_llama, of_standard, of_soft, of_computed, again = measure(
        setup.rounds, theirs, standard, soft, computed, standard, own_clock=True
    )
    pair = PairResult.from_durations
    found = {
        "decode, STANDARD / Llama": pair(of_llama, of_standard),
        "decode, SOFT with gate table / STANDARD": pair(of_standard, of_soft),
        "decode, SOFT without table / STANDARD": pair(of_standard, of_computed),
        "decode, STANDARD / STANDARD (noise)": pair(again, of_standard),
    }
    plain = first_token(fbt, long, regime="standard", gate_table=True)
    fused = first_token(fbt, long, regime="fused", fused_passes=1, gate_table=True)
    of_plain, of_fused, again = measure(setup.rounds, plain, fused, plain, own_clock=True)
    found["first token, FUSED(1) / 2 x STANDARD"] = pair(of_fused, [2 * seconds for seconds in of_plain])
    found["first token, STANDARD / STANDARD (noise)"] = pair(again, of_plain)
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--rounds", type=number_of_pairs, default=15, help="rounds that count (default: 15)")
    parser.add_argument("--new_tokens", type=int, default=24, help="decoded tokens a round (default: 24)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, not how fast")
    parser.add_argument("--json", metavar="FILE", help="also write every ratio to a file")
    return parser


def judge(results: Dict[str, PairResult]) -> Dict[str, Dict[str, object]]:
    """For each result that has a bar: the bar, the median ratio, and whether it holds."""
    found = {}
    for name, result in results.items():
        bar = BARS.get(name.split(": ")[1])
        if bar is not None:
            found[name] = {"bar": str(bar), "ratio": result.median, "holds": bar.holds(result.median)}
    return found


def main(argv: Optional[List[str]] = None) -> int:
    """Measure and print; 1 where a bar is missed."""
    arguments = build_parser().parse_args(argv)
    dtype = getattr(torch, arguments.dtype)
    if arguments.quick:
        setup = Measurement(QUICK_SHAPE, 3, 16, 6, 24, arguments.device, dtype)
    else:
        setup = Measurement(SHAPE, arguments.rounds, 16, arguments.new_tokens, 256, arguments.device, dtype)
    results: Dict[str, PairResult] = {}
    for batch_size in arguments.batch_sizes:
        found = compare(setup, batch_size)
        results.update({f"batch {batch_size}: {name}": result for name, result in found.items()})
    bars = {} if arguments.quick else judge(results)
    size = sum(weight.numel() for weight in setup.model(FBTForCausalLM, FBTConfig(**setup.shape)).parameters())
    threads = torch.get_num_threads()
    print(f"{size / 1e6:.0f}M parameters, {arguments.dtype}, {arguments.device}, {threads} threads")
    print("a, b: seconds for the new tokens but the first, and for the first token")
    print(format_table(results))
    for name, bar in bars.items():
        print(f"{'ok    ' if bar['holds'] else 'MISSED'} {name}: {bar['ratio']:.3f}, bar {bar['bar']}")
    if arguments.json:
        content = {"parameters": size, "bars": bars, "results": json.loads(to_json(results))}
        Path(arguments.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
