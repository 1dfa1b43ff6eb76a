"""Speed of tools/convert_to_hf.py and tools/convert_from_hf.py against plain copies of the same bytes.

A checkpoint with random weights is exported, and the export imported again; in the same rounds the files that were
written are copied block by block and put onto the disk. All of it reads what the operating system may still have in
memory, so the ratios tell what conversion adds to reading and writing. Needs five times --gigabytes of free space.

    OMP_NUM_THREADS=1 python benchmarks/conversion_speed.py --folder /scratch
"""

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, List, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from pairs import PairResult, format_table, measure, number_of_pairs, to_json  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from megatron_fbt.hf.configuration_fbt import FBTConfig  # noqa: E402
from megatron_fbt.hf.convert import Conversion, convert_checkpoint  # noqa: E402
from megatron_fbt.hf.import_hf import import_model  # noqa: E402
from megatron_fbt.hf.modeling_fbt import FBTForCausalLM  # noqa: E402

BLOCK = 8 << 20
WIDTH = 1024
ROWS = 32_000


def make_export(folder: Path, gigabytes: float) -> None:
    """Write an exported model in float32 of at least this size."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 8, "vocab_size": ROWS}
    if gigabytes < 0.1:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 500}
    width = shape["hidden_size"]
    layer = 4 * width * width + 3 * width * shape["intermediate_size"]
    layers = max(1, -int(-(gigabytes * 1e9 / 4 - shape["vocab_size"] * width) // layer))
    torch.manual_seed(0)
    FBTForCausalLM(FBTConfig(num_hidden_layers=layers, **shape)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def copy_files(source: Path, target: Path, pattern: str) -> None:
    """Copy files block by block and put them onto the disk."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.glob(pattern):
        with open(path, "rb", buffering=0) as file, open(target / path.name, "wb", buffering=0) as copy:
            while block := file.read(BLOCK):
                copy.write(block)
            os.fsync(copy.fileno())


def size_of(folder: Path, pattern: str) -> int:
    """Bytes."""
    return sum(path.stat().st_size for path in folder.glob(pattern))


def compare(folder: Path, gigabytes: float, rounds: int) -> Dict[str, PairResult]:
    """Ratios of the durations of an export and an import to those of copies of what they write."""
    make_export(folder / "first", gigabytes)
    import_model(folder / "first", folder / "checkpoint", stream=io.StringIO())
    quiet = Conversion(format="fbt", force=True)
    things: List[Callable[[], object]] = [
        lambda: convert_checkpoint(folder / "checkpoint", folder / "export", quiet),
        lambda: copy_files(folder / "export", folder / "copied", "*.safetensors"),
        lambda: import_model(folder / "first", folder / "imported", force=True, stream=io.StringIO()),
        lambda: copy_files(folder / "imported", folder / "copied", "*.distcp"),
    ]
    for thing in things:
        thing()
    exporting, export_copy, importing, import_copy, again = measure(rounds, *things, things[1], warm_up=0)
    pair = PairResult.from_durations
    return {
        "export / copy": pair(exporting, export_copy),
        "import (weights and master weights) / copy": pair(importing, import_copy),
        "copy / copy (noise)": pair(again, export_copy),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.1, help="of the model in float32 (default: 1.1)")
    parser.add_argument("--rounds", type=number_of_pairs, default=5, help="default: 5")
    parser.add_argument("--folder", help="where to work (default: the system's folder for temporary files)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, not how fast")
    parser.add_argument("--json", metavar="FILE", help="also write every ratio to a file")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Measure and print."""
    arguments = build_parser().parse_args(argv)
    gigabytes, rounds = (0.001, 2) if arguments.quick else (arguments.gigabytes, arguments.rounds)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        results = compare(Path(name), gigabytes, rounds)
        sizes = {"export": size_of(Path(name) / "export", "*.safetensors")}
        sizes["import"] = size_of(Path(name) / "imported", "*.distcp")
    print(format_table(results))
    for kind, result in zip(sizes, results.values(), strict=False):
        print(f"{kind}: {sizes[kind] / 1e6:,.1f} MB written, {sizes[kind] / 1e6 / result.seconds_a:,.1f} MB/s")
    if arguments.json:
        content = {"bytes": sizes, "results": json.loads(to_json(results))}
        Path(arguments.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
