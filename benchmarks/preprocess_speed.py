"""Speed of preprocessing against Megatron-LM's published recipe, re-created here in its fastest setting.

The recipe: a pool of forked processes, each of which parses and tokenizes one line at a time (json.loads, one call of
the tokenizer, ids in lists), results in chunks of 32 through imap, and a builder that is given one document at a time.
Both are whole commands, timed from their start to their end, with the same text, tokenizer, number of workers, and one
tokenizer thread in each. They alternate; the ratio of the recipe to itself, from the same rounds, is the noise.
Durations count; the processor time of a command's processes is compared, too, and says more on a busy machine.
Exit code 1: a bar is missed.

    OMP_NUM_THREADS=1 python benchmarks/preprocess_speed.py --megabytes 100 --workers 2 --json preprocess_speed.json
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy  # noqa: E402
from pairs import PairResult, format_table, measure, number_of_pairs, to_json  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
BARS = {"huggingface": 1.25, "sentencepiece": 1.0}
"""tokens/s of the whole command over the recipe's."""
CHUNK = 32


class RecipeEncoder:
    """What a worker process of the recipe does with a line."""

    def __init__(self, kind: str, path: str):
        self.kind, self.path = kind, path

    def initializer(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if self.kind == "huggingface":
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.path)
            RecipeEncoder.tokenize = lambda text: tokenizer(text, add_special_tokens=False).input_ids
            RecipeEncoder.eod = tokenizer.eos_token_id
        else:
            import sentencepiece

            model = sentencepiece.SentencePieceProcessor(model_file=self.path)
            RecipeEncoder.tokenize = model.encode_as_ids
            RecipeEncoder.eod = model.eos_id()

    def encode(self, line: str):
        text = json.loads(line)["text"]
        ids: List[int] = []
        lengths: List[int] = []
        found = RecipeEncoder.tokenize(text)
        if found:
            ids.extend(found)
            lengths.append(len(found))
            ids.append(RecipeEncoder.eod)
            lengths[-1] += 1
        return {"text": ids}, {"text": lengths}, len(line)


def recipe(kind: str, path: str, source: str, output: str, workers: int, dtype: str) -> None:
    """The recipe's command."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    encoder = RecipeEncoder(kind, path)
    with open(source, encoding="utf-8") as lines:
        pool = multiprocessing.get_context("fork").Pool(workers, initializer=encoder.initializer)
        builder = IndexedDatasetBuilder(f"{output}.bin", dtype=numpy.dtype(dtype).type)
        for ids, lengths, _ in pool.imap(encoder.encode, lines, CHUNK):
            if lengths["text"]:
                builder.add_document(ids["text"], lengths["text"])
        builder.finalize(f"{output}.idx")
        pool.close()
        pool.join()


def collect_text(folder: Path, megabytes: float) -> Path:
    """JSON Lines of Python sources, one file a document, repeated to size.

    Without U+2581, which SentencePiece turns into a space and preprocessing keeps, so that both write the same.
    """
    path, size, goal = folder / "text.jsonl", 0, megabytes * 1e6
    places = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    documents = []
    for place in places:
        for source in sorted(place.rglob("*.py")):
            try:
                text = source.read_text("utf-8")
                text.encode("utf-8")
            except (UnicodeError, OSError):
                continue
            if text.strip() and not set("\0\u2581") & set(text) and size < goal:
                documents.append(json.dumps({"text": text}).encode() + b"\n")
                size += len(text.encode())
    once = size
    with open(path, "wb") as stream:
        stream.write(b"".join(documents))
        while size < goal:
            stream.write(b"".join(documents))
            size += once
    return path


def make_tokenizer(kind: str, folder: Path, source: Path) -> str:
    """A tokenizer of 32,000 ids trained on some of the text."""
    sample = folder / "sample.jsonl"
    with open(source, "rb") as stream:
        lines = stream.readlines(12_000_000)
    if kind == "sentencepiece":
        from megatron_fbt.data.tokenizer_training import TokenizerTraining, train_tokenizer

        sample.write_bytes(b"".join(lines))
        train_tokenizer(TokenizerTraining([str(sample)], str(folder / "spm"), 32_000, 30_000))
        return str(folder / "spm.model")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(str(folder / "hf"))
    return str(folder / "hf")


class Commands:
    """Both commands for one tokenizer."""

    def __init__(self, kind: str, path: str, source: Path, folder: Path, workers: int):
        self.kind, self.path, self.source, self.folder, self.workers = kind, path, source, folder, workers
        self.peaks: Dict[str, int] = {}
        """Largest memory of the main process or one worker, in bytes."""
        self.processor: Dict[str, List[float]] = {}
        """Processor seconds of every run, all processes together."""

    def ours(self) -> None:
        tool = [str(ROOT / "tools" / "preprocess_data.py"), "--input", str(self.source), "--overwrite", "--json"]
        given = ["--tokenizer_type", self.kind, "--tokenizer_path", self.path, "--workers", str(self.workers)]
        self._run("ours", [*tool, *given, "--output", str(self.folder / "ours")])

    def recipe(self) -> None:
        given = [self.kind, self.path, str(self.source), str(self.folder / "recipe"), str(self.workers), "uint16"]
        self._run("recipe", [str(Path(__file__).resolve()), "recipe", *given])

    def _run(self, name: str, command: List[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL)
        pid = 0
        while not pid:
            self._watch(name, process.pid)
            time.sleep(0.2)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if status:
            raise SystemExit(f"{name} ended with {os.waitstatus_to_exitcode(status)}")
        self.processor.setdefault(name, []).append(usage.ru_utime + usage.ru_stime)

    def _watch(self, name: str, pid: int) -> None:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for part, pids in ((name, [pid]), (f"{name}, a worker", children)):
                for found in pids:
                    status = Path(f"/proc/{found}/status").read_text()
                    peak = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
                    self.peaks[part] = max([self.peaks.get(part, 0), *(1024 * size for size in peak)])
        except (FileNotFoundError, ProcessLookupError):
            pass  # just ended

    def same_bytes(self) -> bool:
        """Whether both have written the same files."""
        pairs = [(self.folder / f"ours{e}", self.folder / f"recipe{e}") for e in (".bin", ".idx")]
        return all(one.read_bytes() == other.read_bytes() for one, other in pairs)


def time_parts(kind: str, path: str, source: Path, folder: Path) -> Dict[str, float]:
    """Seconds of reading, tokenizing (one thread) and writing, each alone."""
    from megatron_fbt.data.chunks import make_chunks
    from megatron_fbt.data.encode import Encoder, EncodeSettings
    from megatron_fbt.data.indexed import IndexedWriter
    from megatron_fbt.data.input_files import find_inputs

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    settings = EncodeSettings(kind, path)
    tokenizer = settings.build_tokenizer()
    encoder = Encoder(settings, tokenizer.text_encoder())
    writer = IndexedWriter(str(folder / "parts"), tokenizer.vocab_size)
    seconds = {"read": 0.0, "parse and tokenize": 0.0, "write": 0.0}
    chunks = make_chunks(find_inputs([str(source)], "jsonl"), "jsonl", settings.keys)
    while (chunk := timed(seconds, "read", lambda: next(chunks, None))) is not None:
        encoded = timed(seconds, "parse and tokenize", lambda chunk=chunk: encoder(chunk))
        timed(seconds, "write", lambda found=encoded: writer.add(found.ids[0], found.lengths[0]))
    timed(seconds, "write", writer.finish)
    writer.discard()
    return seconds


def timed(seconds: Dict[str, float], part: str, work: Callable):
    """Run a piece of work and add its time to a part."""
    began = time.perf_counter()
    found = work()
    seconds[part] += time.perf_counter() - began
    return found


def index_writing(folder: Path, documents: int) -> Dict[str, float]:
    """Time and memory of writing the index of many documents, in a process of its own."""
    code = (
        "import numpy, resource, time; from megatron_fbt.data.indexed import IndexedWriter;"
        f"w = IndexedWriter({str(folder / 'many')!r}, 1000); n = 100_000;"
        "ids, lengths = numpy.ones(2 * n, numpy.uint16), numpy.full(n, 2);"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; t = time.perf_counter();"
        f"[w.add(ids, lengths) for _ in range({documents} // n)]; a = time.perf_counter(); w.finish();"
        "b = time.perf_counter(); after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        f"w.discard(); print(a - t, b - a, (after - before) * 1024 / {documents})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    add, finish, size = map(float, found.stdout.split())
    return {"adding, s": add, "index, s": finish, "memory, bytes a document": size}


def compare(kind: str, args: argparse.Namespace, folder: Path, source: Path) -> Dict[str, PairResult]:
    """Time both commands for one kind of tokenizer, and print what there is to know beside it."""
    path = make_tokenizer(kind, folder, source)
    commands = Commands(kind, path, source, folder, args.workers)
    ours, theirs, again = measure(args.pairs, commands.ours, commands.recipe, commands.recipe, warm_up=args.warm_up)
    if not commands.same_bytes():
        raise SystemExit(f"{kind}: the two commands wrote different data")
    tokens = os.path.getsize(folder / "ours.bin") // 2
    best = {"ours": min(ours), "recipe": min(theirs + again)}
    speeds = ", ".join(f"{name} {tokens / seconds:,.0f} tokens/s at best" for name, seconds in best.items())
    print(f"{kind}: {tokens:,} tokens; {speeds}")
    used = {name: statistics.median(seconds) for name, seconds in commands.processor.items()}
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in used.items())
    print(f"{kind}: processor time, {times}, recipe / ours {used['recipe'] / used['ours']:.3f}")
    parts = time_parts(kind, path, source, folder)
    print(f"{kind}: one thread, " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items()))
    print(f"{kind}: peak memory, " + ", ".join(f"{n} {size / 1e6:.0f} MB" for n, size in commands.peaks.items()))
    sys.stdout.flush()
    return {
        f"{kind}, recipe / ours": PairResult.from_durations(theirs, ours),
        f"{kind}, recipe / recipe": PairResult.from_durations(again, theirs),
    }


def main() -> int:
    """Compare, print and judge."""
    if sys.argv[1:2] == ["recipe"]:
        kind, path, source, output, workers, dtype = sys.argv[2:]
        recipe(kind, path, source, output, int(workers), dtype)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="size of the text")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=number_of_pairs, default=5)
    parser.add_argument("--warm_up", type=int, default=1)
    parser.add_argument("--tokenizers", nargs="+", choices=sorted(BARS), default=sorted(BARS))
    parser.add_argument("--documents", type=int, default=10_000_000, help="for writing an index; 0 = leave out")
    parser.add_argument("--json", help="file for all ratios")
    args = parser.parse_args()
    results: Dict[str, PairResult] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = collect_text(folder, args.megabytes)
        print(f"text: {os.path.getsize(source) / 1e6:.0f} MB, {args.workers} workers, load {os.getloadavg()[0]:.1f}")
        if args.documents:
            found = index_writing(folder, args.documents)
            print(f"{args.documents:,} documents: " + ", ".join(f"{part} {value:.2f}" for part, value in found.items()))
        for kind in args.tokenizers:
            results |= compare(kind, args, folder, source)
    print(format_table(results))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"load {os.getloadavg()[0]:.1f} at the end, peak of this process {peak / 1e6:.0f} MB")
    if args.json:
        Path(args.json).write_text(to_json(results) + "\n")
    missed = [k for k in args.tokenizers if results[f"{k}, recipe / ours"].median < BARS[k]]
    for kind in missed:
        print(f"missed: {kind} must reach {BARS[kind]}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
