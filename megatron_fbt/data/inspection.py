"""Documents, rows and statistics of the data of a run, or of files alone: what tools/inspect_data.py shows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy
import torch

from megatron_fbt.config.checks import validate_for_training
from megatron_fbt.config.data import TokenizerConfig
from megatron_fbt.config.dry_run import check_vocab_size
from megatron_fbt.config.load import parse_command_line
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.core.schedule import Recipe
from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.conversations import open_conversations, prepare_conversations
from megatron_fbt.data.corpus_manifest import is_manifest, read_manifest
from megatron_fbt.data.corpus_stats import corpus_stats, draw
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.first_rank import from_first_rank
from megatron_fbt.data.indexed import open_indexed
from megatron_fbt.data.labelled import NO_LOSS, open_labelled, prepare_labelled
from megatron_fbt.data.prefixes import find_prefixes
from megatron_fbt.data.row_text import LEGEND, Speller, row_entry, segment_lines, segments_of
from megatron_fbt.data.source_rows import cache_folder
from megatron_fbt.data.token_ids import run_tokenizer
from megatron_fbt.data.tokenizer import Tokenizer, build_tokenizer
from megatron_fbt.errors import ConfigError
from megatron_fbt.training import metrics
from megatron_fbt.training.batch_size import BatchSizeSchedule, run_length
from megatron_fbt.training.fingerprint import stage_samples
from megatron_fbt.training.messages import set_up_messages
from megatron_fbt.training.resume import find_resume_point
from megatron_fbt.training.run_folder import steps_and_samples

WHOLE = BatchReader(None, 0, True, True, torch.device("cpu"))


@dataclass(frozen=True)
class Wanted:
    """What to show.

    Attributes:
        documents: Their numbers.
        random_documents: So many more, drawn by the seed.
        rows: Sample numbers of the run.
        steps: Steps, from 1, whose rows are shown.
        random_rows: So many more, drawn by the seed.
        validation: Rows of validation instead of training.
        pass_number: Pass whose feedback region is marked.
        stats: Statistics of all documents.
        sample: Look into so many documents for them; None = all.
        max_tokens: Of a document that are shown.
        seed: Of what is drawn.
    """

    documents: Sequence[int] = ()
    random_documents: int = 0
    rows: Sequence[int] = ()
    steps: Sequence[int] = ()
    random_rows: int = 0
    validation: bool = False
    pass_number: int = 2
    stats: bool = False
    sample: Optional[int] = None
    max_tokens: int = 1000
    seed: int = 0

    @property
    def any_row(self) -> bool:
        """Whether rows are asked for."""
        return bool(self.rows or self.steps or self.random_rows)


@dataclass
class Documents:
    """Documents of indexed data sets, conversations, or rows with labels of their own.

    Attributes:
        lengths: [documents], in tokens.
        parts: (name, number of the first document, how to read one of its documents: ids, marks, labels).
        text_bytes: UTF-8 bytes of all texts; None where that is not known.
    """

    lengths: numpy.ndarray
    parts: List[Tuple[str, int, Any]] = field(default_factory=list)
    text_bytes: Optional[int] = None

    def read(self, number: int) -> Tuple[numpy.ndarray, Optional[List[str]], Optional[List[Any]]]:
        """Ids [n], marks [n] and labels [n] of a document."""
        _, first, read = self._part(number)
        return read(number - first)

    def ids(self, number: int) -> numpy.ndarray:
        """Ids of a document."""
        return self.read(number)[0]

    def where(self, number: int) -> str:
        """Where a document is from."""
        name, first, _ = self._part(number)
        return f"number {number - first} of {name}"

    def _part(self, number: int) -> Tuple[str, int, Any]:
        return next(part for part in reversed(self.parts) if part[1] <= number)


def inspect_from_options(options: Dict[str, Any], overrides: Sequence[str]) -> Dict[str, Any]:
    """What the options of tools/inspect_data.py ask for; see inspect_run and inspect_files."""
    wanted = Wanted(
        documents=options["document"],
        rows=options["row"],
        steps=options["step"],
        **{name: options[name] for name in ("random_documents", "random_rows", "validation", "pass_number")},
        **{name: options[name] for name in ("stats", "sample", "max_tokens", "seed")},
    )
    if options["config"]:
        return inspect_run(options["config"], overrides, wanted)
    path = options["tokenizer_path"]
    tokenizer = None if path is None else TokenizerConfig(options["tokenizer_type"], path)
    return inspect_files(options["data"], tokenizer, wanted)


def inspect_run(config_file: str, overrides: Sequence[str], wanted: Wanted) -> Dict[str, Any]:
    """Look at the data of a run, as its configuration has them.

    Raises:
        ConfigError, DataError, CheckpointError: as the run would raise them, or there is no such document, row or step.
    """
    config, _ = parse_command_line(["--config", config_file, *overrides, "--dry_run"])
    validate_for_training(config)
    set_up_messages(True)
    tokenizer = run_tokenizer(config)
    config.model.vocab_size = check_vocab_size(config, tokenizer.vocab_size)
    has_text = config.data.tokenizer.path is not None
    report = inspect_documents(lambda: _documents_of_run(config, tokenizer), tokenizer if has_text else None, wanted)
    if wanted.any_row:
        report["rows"] = _rows(config, tokenizer, Speller(tokenizer if has_text else None), wanted)
    return report


def inspect_files(paths: Sequence[str], tokenizer: Optional[TokenizerConfig], wanted: Wanted) -> Dict[str, Any]:
    """Look at indexed data sets alone.

    Args:
        paths: Prefixes, manifests, or patterns of either.
        tokenizer: That made them; None = ids are shown as numbers.
        wanted: No rows.

    Raises:
        ConfigError: There is no such document, or rows are asked for.
        DataError: A file is missing or damaged, or is not of this tokenizer.
    """
    if wanted.any_row:
        raise ConfigError("--row, --step, --random_rows: rows are those of a run; name its --config instead of --data")
    built = None if tokenizer is None else build_tokenizer(tokenizer)
    return inspect_documents(lambda: _indexed(paths, built), built, wanted)


def inspect_documents(open_documents, tokenizer: Optional[Tokenizer], wanted: Wanted) -> Dict[str, Any]:
    """The part of a report that is about documents; they are opened if any are asked for."""
    report: Dict[str, Any] = {}
    if wanted.documents or wanted.random_documents or wanted.stats:
        documents = open_documents()
        count = len(documents.lengths)
        numbers = _numbers("--document", "documents", wanted.documents, wanted.random_documents, count, wanted.seed)
        spell = Speller(tokenizer)
        report["documents"] = [_document(documents, spell, number, wanted.max_tokens) for number in numbers]
        if wanted.stats:
            report["stats"] = corpus_stats(documents, tokenizer, wanted.sample, wanted.seed, documents.text_bytes)
    return report


def _numbers(option: str, name: str, given: Sequence[int], random: int, count: int, seed: int) -> List[int]:
    """Numbers that are asked for, and those drawn."""
    for number in given:
        if not 0 <= number < count:
            raise ConfigError(f"{option} {number}: there are {count:,} {name}; give a number from 0 to {count - 1}")
    return [*given, *sorted(draw(count, random, seed))]


def _document(documents: Documents, spell: Speller, number: int, max_tokens: int) -> Dict[str, Any]:
    ids, marks, labels = documents.read(number)
    length, ids = len(ids), ids[:max_tokens].tolist()
    marks = ["-"] * len(ids) if marks is None else marks[:max_tokens]
    segments = segments_of(spell, ids, marks, None if labels is None else labels[:max_tokens])
    return {
        "document": number,
        "from": documents.where(number),
        "length": length,
        "tokens": ids,
        "segments": segments,
    }


def _documents_of_run(config: PretrainConfig, tokenizer: Tokenizer) -> Documents:
    data, cache = config.data, cache_folder(config)
    if data.format == "indexed":
        paths = [path for source in data.sources for path in source.paths] if data.sources else data.paths
        return _indexed(paths, tokenizer, data.mmap)
    names = ", ".join(data.paths)
    if data.format == "conversations":
        talks = open_conversations(from_first_rank(lambda: prepare_conversations(data, cache, tokenizer)), data.mmap)

        def talk(number: int):
            ids, assistant = talks.conversation(number)
            return ids, ["A" if writes else "-" for writes in assistant.tolist()], None

        return Documents(talks.lengths, [(names, 0, talk)])
    folder = from_first_rank(lambda: prepare_labelled(data, cache, config.model.vocab_size))
    rows = open_labelled(folder, data.mmap)

    def row(number: int):
        ids, labels, feedback = rows.values[number]
        marks = [
            ("L" if label != NO_LOSS else "-") + ("F" if fed_back else "-") for label, fed_back in zip(labels, feedback)
        ]
        return ids, marks, [None if label == NO_LOSS else label for label in labels.tolist()]

    return Documents(numpy.full(len(rows), rows.values.shape[2]), [(names, 0, row)])


def _indexed(paths: Sequence[str], tokenizer: Optional[Tokenizer], mmap: bool = True) -> Documents:
    parts, lengths, first = [], [], 0
    for prefix in find_prefixes("of --data", paths, tokenizer):
        pair = open_indexed(prefix, mmap, None if tokenizer is None else tokenizer.vocab_size)
        parts.append((prefix, first, lambda number, pair=pair: (numpy.asarray(pair.get(number)), None, None)))
        lengths.append(pair.sequence_lengths)
        first += len(pair)
    known = [read_manifest(path).text_bytes for path in paths] if all(map(is_manifest, paths)) else []
    return Documents(numpy.concatenate(lengths), parts, sum(known) or None)


def _logged_tokens(run_dir: str) -> Dict[Any, Optional[float]]:
    """Tokens that a run had read after each step of its log, and before the first one."""
    log = metrics.read_metrics(Path(run_dir) / "metrics.jsonl")
    return {0: 0.0, **{row.get("step"): metrics.number(row.get("tokens")) for row in log}}


def _samples_of(
    step: int, logged: Dict[Any, Optional[float]], length: int, schedule: BatchSizeSchedule, done: Tuple[int, int]
) -> range:
    """Samples of a step: as the run's log has them, for batches may have had another size; else as configured.

    Args:
        step: from 1 on.
        logged: tokens that the run had read after its steps, see _logged_tokens.
        length: tokens of a sample.
        schedule: of the run's batches.
        done: steps and samples of its checkpoint.
    """
    before, after = logged.get(step - 1), logged.get(step)
    if before is not None and after is not None:
        return range(int(before) // length, int(after) // length)
    known = done if step > done[0] else (0, 0)
    consumed = schedule.samples_after(step - 1, known)
    return range(consumed, consumed + schedule.global_batch_size(consumed))


def _rows(config: PretrainConfig, tokenizer: Tokenizer, spell: Speller, wanted: Wanted) -> List[Dict[str, Any]]:
    """Rows as training sees them, with the feedback region of one pass."""
    training = config.training
    length, checkpoint = config.data.sequence_length, find_resume_point(config).checkpoint
    done = steps_and_samples(checkpoint)
    steps, samples = run_length(training, length, done)
    validation = training.eval_iters * training.global_batch_size
    stages = stage_samples(config, checkpoint)
    datasets = build_datasets(config, tokenizer, samples, validation, stages)
    rows, name = (datasets.valid, "rows of validation") if wanted.validation else (datasets.train, "rows")
    if rows is None:
        raise ConfigError("--validation: there is none (training.eval_iters, data.split)")
    numbers = _numbers("--row", name, wanted.rows, wanted.random_rows, len(rows), wanted.seed)
    step_of: Dict[int, int] = {}
    schedule = BatchSizeSchedule(training, data_parallel_size=1)
    logged = _logged_tokens(config.run.dir) if wanted.steps else {}
    for step in wanted.steps:
        if wanted.validation or not 1 <= step <= steps:
            raise ConfigError(f"--step {step}: training has {steps:,} steps; give one from 1 to {steps}")
        batch = _samples_of(step, logged, length, schedule, done)
        step_of.update(dict.fromkeys(batch, step))
        numbers += batch
    recipe = Recipe(config.feedback, config.run.seed, training=not wanted.validation)
    own_labels = config.data.format == "labelled"
    found = []
    for number in numbers:
        (batch,) = load_micro_batches(rows, [[number]], tokenizer.eod, WHOLE)
        entry = row_entry(spell, batch, recipe.fused(batch, wanted.pass_number), own_labels)
        place = {"row": number, "pass": wanted.pass_number, "validation": wanted.validation}
        if number in step_of:
            place["step"] = step_of[number]
        found.append({**place, **entry})
    return found


def describe(report: Dict[str, Any]) -> str:
    """The report for a person."""
    lines: List[str] = []
    shown = [*report.get("documents", ()), *report.get("rows", ())]
    for entry in shown:
        if "document" in entry:
            lines.append(f"document {entry['document']} ({entry['from']}): {entry['length']:,} tokens")
        else:
            step = f", step {entry['step']}" if "step" in entry else ""
            kind = "row of validation" if entry["validation"] else "row"
            lines.append(
                f"{kind} {entry['row']}{step}: {len(entry['tokens']):,} tokens, beginnings of documents "
                f"{entry['documents']}, loss on {entry['loss_tokens']}, fused in pass {entry['pass']} "
                f"{entry['fused_tokens']}"
            )
        lines += segment_lines(entry["segments"])
        left = entry.get("length", 0) - len(entry["tokens"])
        lines += [f"        ... and {left:,} tokens more (--max_tokens)", ""] if left > 0 else [""]
    if shown:
        lines.append(LEGEND)
    return "\n".join([*lines, *_stats_lines(report.get("stats"))]).rstrip("\n")


def _stats_lines(stats: Optional[Dict[str, Any]]) -> List[str]:
    if stats is None:
        return []
    length, most = stats["length"], max(bar["documents"] for bar in stats["length"]["histogram"])
    lines = [
        f"documents {stats['documents']:,}, tokens {stats['tokens']:,}",
        f"length in tokens: smallest {length['smallest']:,}, median {length['median']:,.1f}, "
        f"mean {length['mean']:,.1f}, largest {length['largest']:,}",
    ]
    for bar in length["histogram"]:
        stars = "#" * -(-40 * bar["documents"] // most)
        lines.append(f"{bar['from']:>12,} to {bar['below'] - 1:>12,}: {bar['documents']:>12,} {stars}")
    part = stats["duplicates_hash_part"]
    thinned = f", from {part:.3g} of all hashes" if part < 1 else ""
    looked = "all" if stats["looked_into"] == stats["documents"] else f"a sample of {stats['looked_into']:,}"
    lines.append(f"exact copies of another document: {stats['duplicates_share']:.3%} of {looked} documents{thinned}")
    if "tokens_per_byte" in stats:
        ratio, of = stats["tokens_per_byte"], stats["tokens_per_byte_of"]
        measured = "all" if of == stats["documents"] else f"a sample of {of:,}"
        ratio = "unknown, there is no text" if ratio is None else f"{ratio:.4f}"
        lines.append(f"tokens per byte of text: {ratio} ({measured} documents)")
        lines.append(
            f"documents without an end token: {stats['without_end_token']:,}; with one inside: "
            f"{stats['with_inner_end_token']:,}"
        )
    return lines
