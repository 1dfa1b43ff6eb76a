"""Raw text into Megatron's indexed data sets, with several processes and the same output for any number of them."""

import os
import re
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from megatron_fbt.data.chunks import Chunk, make_chunks
from megatron_fbt.data.encode import Encoder, EncodeSettings
from megatron_fbt.data.input_files import TWICE, InputFile, find_inputs, sort_inputs
from megatron_fbt.data.output_files import check_prefix
from megatron_fbt.data.output_lock import remove_left_locks
from megatron_fbt.data.progress import Progress
from megatron_fbt.data.shard_output import CorpusPlan, PlannedShard, ShardOutput, node_shards, total_skipped
from megatron_fbt.data.shard_record import why_unknown
from megatron_fbt.data.worker_pool import encode_all
from megatron_fbt.errors import ConfigError, DataError

_WRITTEN = r"\.(bin|idx|shard\.json|manifest\.json|lock)(\.partial)?"
"""Endings of the files that the command writes."""


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read and where to write.

    Attributes:
        inputs: Files, folders and patterns.
        output: Prefix of the output; with several keys PREFIX_KEY for each.
        encode: Tokenizer, keys and policy.
        suffixes: See megatron_fbt.data.input_files.find_inputs.
        exclude: Likewise.
        workers: Processes that encode; 1 = no other process.
        shards: Pairs of files to write for each key.
        num_nodes: Calls of the command that share the work; each makes other shards.
        node_rank: Which of them this is, from 0.
        overwrite: Make all shards anew, complete ones, too.
    """

    inputs: Sequence[str]
    output: str
    encode: EncodeSettings
    suffixes: Sequence[str] = ()
    exclude: Sequence[str] = ()
    workers: int = 1
    shards: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    overwrite: bool = False

    def prefixes(self) -> Dict[str, str]:
        """Output prefix of each key."""
        keys = self.encode.keys
        return {keys[0]: self.output} if len(keys) == 1 else {key: f"{self.output}_{key}" for key in keys}

    def validate(self) -> None:
        """Raise ConfigError for values that cannot work."""
        keys = self.encode.json_keys
        for name in ("workers", "shards", "num_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}: it must be at least 1")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ConfigError(f"--node_rank is {self.node_rank}: it must be from 0 to {self.num_nodes - 1}")
        if self.num_nodes > self.shards:
            raise ConfigError(
                f"--num_nodes is {self.num_nodes}, but --shards is {self.shards}: every node makes whole shards; "
                f"give at least {self.num_nodes} shards"
            )
        if not keys or len(set(keys)) != len(keys) or any(not key or "/" in key for key in keys):
            raise ConfigError(f"--json_key is {list(keys)}: name each key once; keys name files, so no '/'")
        for prefix in self.prefixes().values():
            check_prefix(prefix)

    def find_files(self) -> List[InputFile]:
        """All input files, sorted, each once."""
        left_out: List[str] = []
        found = find_inputs(self.inputs, self.encode.input_format, self.suffixes, self.exclude, True, left_out)
        for line in left_out:
            note(f"input {line}")
        files, repeated = sort_inputs([file for file in found if not self._is_output(file.path)])
        if not files:
            raise DataError(f"input {', '.join(map(str, self.inputs))}: it holds nothing but this command's output")
        for path in repeated:
            note(f"input {path}: {TWICE}")
        if len(files) < self.shards:
            raise ConfigError(
                f"--shards is {self.shards}, but there are {len(files)} input files, which are not cut: "
                f"give at most {len(files)}"
            )
        return files

    def _is_output(self, path: str) -> bool:
        """Whether a file is what this command writes, with any number of shards."""
        for prefix in self.prefixes().values():
            pattern = re.escape(os.path.realpath(prefix)) + r"(-\d{5,}-of-\d{5,})?" + _WRITTEN
            if re.fullmatch(pattern, os.path.realpath(path)):
                return True
        return False


def note(text: str) -> None:
    """Tell something beside the report."""
    print(text, file=sys.stderr, flush=True)


def preprocess(options: PreprocessOptions) -> dict:
    """Tokenize the input and write shards, their records and, when all shards are there, the manifests.

    Shards that are complete from an earlier call, with the same settings and input, stay.

    Returns:
        The report. Of this node's shards: documents, tokens, text_bytes, skipped (by kind), files, seconds, numbers of
        shards; for each key prefix, documents, tokens, bytes, token_type and manifest (None = shards are missing).

    Raises:
        ConfigError: An option cannot work, or what is there was made with other settings.
        DataError: Input, tokenizer or output is unusable, a worker died, another process writes the same, or no
            document is left. Then there is nothing new of the shard that was in work, what was there before stays.
    """
    options.validate()
    begin = time.monotonic()
    settings = options.encode
    tokenizer = settings.build_tokenizer()
    encoder = Encoder(settings, tokenizer.text_encoder())  # refuses a tokenizer without end token before any reading
    made_with = {
        "json_keys": list(settings.keys),
        "input_format": settings.input_format,
        "skip_bad_lines": settings.skip_bad_lines,
    }
    plan = CorpusPlan(options.prefixes(), options.find_files(), options.shards, tokenizer, made_with)
    mine = node_shards(plan, options.num_nodes, options.node_rank)
    if not options.overwrite:
        plan.check_settings()
    made = _make(plan, _missing(plan, mine, options.overwrite), encoder, options)
    for pair in plan.other_cuts():
        note(f"output {pair}: a shard of another --shards is there, too; remove what is old, or name the manifest")
    if why := plan.write_manifests():
        note(f"no manifest yet, because a shard is not what these options and input files give: {why}")
    return _report(plan, mine, made, not why, time.monotonic() - begin)


def _missing(plan: CorpusPlan, shards: Sequence[PlannedShard], overwrite: bool) -> List[PlannedShard]:
    missing = []
    for shard in shards:
        why = "--overwrite is given" if overwrite else plan.why_incomplete(shard) or why_unknown(shard.inputs)
        if why and any(os.path.exists(f"{prefix}.bin") for prefix in shard.prefixes):
            note(f"output {shard.prefixes[0]}: made anew, because {why}")
        if why:
            missing.append(shard)
        else:
            remove_left_locks(shard.prefixes)
    if not missing:
        note(f"output {', '.join(plan.prefixes.values())}: already complete")
    return missing


def _make(plan: CorpusPlan, shards: Sequence[PlannedShard], encoder: Encoder, options: PreprocessOptions) -> int:
    """Make shards; the number of those that no other process made meanwhile."""
    output: Optional[ShardOutput] = None
    total = sum(file.size for shard in shards for file in shard.files)
    done = documents = tokens = made = 0
    source = _Shards(plan, shards, encoder, options.overwrite)
    results = encode_all(source.chunks(), encoder, options.workers)
    with source, Progress(total) as progress, closing(results):
        try:
            for shard, chunk, encoded in results:
                output = output or ShardOutput(plan, shard)
                if chunk is None:
                    output.complete()
                    source.release(shard)
                    done += sum(file.size for file in shard.files)
                    documents, tokens, output = documents + output.documents, tokens + output.tokens, None
                    made += 1
                    continue
                if encoded.failure:
                    raise DataError(f"input {encoded.failure}")
                output.add(encoded)
                progress.update(done + chunk.progress, documents + output.documents, tokens + output.tokens)
        finally:
            if output is not None:
                output.discard()
    if source.refused:
        raise source.refused
    return made


class _Shards:
    """The chunks of shards, each shard locked from the reading of its first one until it is complete.

    Attributes:
        refused: Why the shards from some one on are not given, as another process has that one.
    """

    def __init__(self, plan: CorpusPlan, shards: Sequence[PlannedShard], encoder: Encoder, overwrite: bool):
        self._plan, self._shards, self._settings, self._overwrite = plan, shards, encoder.settings, overwrite
        self._held: Dict[int, ExitStack] = {}
        self.refused: Optional[DataError] = None

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(self, *exception) -> None:
        for held in self._held.values():
            held.close()

    def release(self, shard: PlannedShard) -> None:
        """Let others have a shard."""
        self._held.pop(shard.number).close()

    def chunks(self) -> Iterator[Tuple[PlannedShard, Optional[Chunk]]]:
        """All chunks of each shard, and None after its last one."""
        for shard in self._shards:
            held = self._held[shard.number] = ExitStack()
            try:
                held.enter_context(self._plan.locked(shard))
            except DataError as error:
                self.refused = error  # told when the shards before it are complete
                return
            if not (self._overwrite or self._plan.why_incomplete(shard) or why_unknown(shard.inputs)):
                self.release(shard)  # another process has made it since
                continue
            for chunk in make_chunks(shard.files, self._settings.input_format, self._settings.keys):
                yield shard, chunk
            yield shard, None


def _report(plan: CorpusPlan, shards: Sequence[PlannedShard], made: int, complete: bool, seconds: float) -> dict:
    records = [plan.records(shard) for shard in shards]
    outputs = []
    for i, (key, prefix) in enumerate(plan.prefixes.items()):
        corpus = plan.corpus(key, "", [of_keys[i].corpus.shards[0] for of_keys in records])
        outputs.append(
            {
                "key": key,
                "prefix": prefix,
                "documents": corpus.documents,
                "tokens": corpus.tokens,
                "bytes": corpus.bytes,
                "token_type": corpus.token_type,
                "manifest": plan.manifest_path(key) if complete else None,
            }
        )
    return {
        "documents": sum(output["documents"] for output in outputs),
        "tokens": sum(output["tokens"] for output in outputs),
        "text_bytes": sum(record.corpus.text_bytes for of_keys in records for record in of_keys),
        "skipped": total_skipped(records),
        "files": sum(len(shard.files) for shard in shards),
        "seconds": round(seconds, 3),
        "shards": {"made": made, "kept": len(shards) - made, "of": len(plan.shards)},
        "outputs": outputs,
    }
