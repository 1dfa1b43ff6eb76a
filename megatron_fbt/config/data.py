"""Data sets and tokenizer."""

import math
import os
from dataclasses import dataclass, field
from typing import List, Literal, Optional

from megatron_fbt.config.rules import Rules, Section
from megatron_fbt.config.sources import SourceConfig, StageConfig, parse_split, source_problems, stage_problems
from megatron_fbt.errors import ConfigError


@dataclass
class TokenizerConfig(Section):
    """Where token ids come from."""

    type: Literal["sentencepiece", "huggingface", "tiktoken"] = "sentencepiece"
    path: Optional[str] = None
    """SentencePiece .model file, Hugging Face folder, or NAME.tiktoken with NAME.tiktoken.json beside it."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("data.tokenizer", self)
        if rules.usable("path") and self.path is not None:
            rules.require(bool(self.path.strip()), "path", "empty", "name a file or a folder, or set it to null")
        return rules.problems


@dataclass
class DataConfig(Section):
    """What is read: indexed data sets (.bin/.idx), or JSON Lines of conversations or of rows with their labels."""

    format: Literal["indexed", "conversations", "labelled"] = "indexed"
    """indexed: token streams cut into rows. conversations: {"messages": [{"role": ..., "content": ...}, ...]} on each
    line; rendered by the chat template, packed whole into rows, the loss on the assistant's turns alone. labelled: a
    row of sequence_length ids on each line, {"input_ids": [...], "labels": [...]}; labels[t] is scored at position t
    itself, -100 = no loss; with "feedback": [0 or 1, ...] the row says what is fed back. It needs no tokenizer."""
    paths: List[str] = field(default_factory=list)
    """indexed: prefixes of the data sets, without .bin/.idx, or their manifests (.manifest.json), or patterns of either
    (*, ?, [...]). Else .jsonl, .jsonl.gz or .jsonl.zst files, or folders of them. Each at most once."""
    weights: Optional[List[float]] = None
    """Blend weights, one for each path, positive; null = in proportion to the number of samples."""
    sources: List[SourceConfig] = field(default_factory=list)
    """indexed: a mixture, instead of paths and weights: [{name: web, paths: [...], weight: 0.7}, ...]."""
    stages: List[StageConfig] = field(default_factory=list)
    """Weights of the sources that change with the step: [{first_step: 0}, {first_step: 1000, weights: {web: 1}}];
    empty = the same all the time."""
    split: str = "969,30,1"
    """Parts of the documents (or conversations or rows, in the order of the files) for training, validation and
    test."""
    sequence_length: int = 1024
    """Tokens in a row."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    chat_template: Optional[str] = None
    """Jinja file that renders conversations; null = the tokenizer's own template or, if it has none, a plain one."""
    cache_dir: Optional[str] = None
    """Folder for data set indices and what JSON Lines hold, shared by all processes, or on a disk of each node, whose
    first process then fills it; null = <run.dir>/data_cache."""
    mmap: bool = True
    """Memory-map the .bin files."""
    num_workers: Optional[int] = None
    """Processes that read rows ahead, for each rank that reads; 0 = the rank reads by itself; null = 2 on a GPU, 0 on
    a CPU."""
    eod_mask_loss: bool = False
    """Leave the prediction that follows an end-of-document token out of the loss."""
    reset_attention_mask: bool = False
    """No attention across the documents packed into a row."""
    reset_position_ids: bool = False
    """Positions (rotary embedding) start at 0 in each document of a row; needs reset_attention_mask."""

    def problems(self) -> List[str]:
        """See Section."""
        rules = Rules("data", self)
        rules.integers("sequence_length")
        rules.integers("num_workers", low=0)
        if rules.usable("paths"):
            self._path_rules(rules)
        if self.weights is not None and rules.usable("weights", "paths"):
            self._weight_rules(rules)
        if rules.usable("split"):
            self._split_rules(rules)
        if rules.usable("format"):
            self._format_rules(rules)
        if rules.usable("sources", "stages", "split"):
            self._source_rules(rules)
        if rules.usable("reset_attention_mask", "reset_position_ids") and self.reset_position_ids:
            why = "equal positions of several documents in one row cannot be told apart by attention"
            remedy = "set data.reset_attention_mask to true, or this to false"
            rules.require(self.reset_attention_mask, "reset_position_ids", why, remedy)
        return rules.problems + self.tokenizer.problems()

    def _format_rules(self, rules: Rules) -> None:
        """Fields that only one of the formats knows are not set in the other."""
        if self.format != "conversations" and rules.usable("chat_template") and self.chat_template is not None:
            why = f"data.format is {self.format}"
            rules.add("chat_template", why, "set it to null, or data.format to conversations")
        if self.format == "indexed":
            return
        if rules.usable("weights") and self.weights is not None:
            why = f"data.format is {self.format}, of which each is read once in an epoch"
            rules.add("weights", why, "set it to null, and repeat in the files what is to come more often")
        if rules.usable("eod_mask_loss") and self.eod_mask_loss:
            loss = {"conversations": "lies on the assistant's turns alone", "labelled": "lies where the labels say"}
            why = f"data.format is {self.format}, whose loss {loss[self.format]}"
            rules.add("eod_mask_loss", why, "set it to false")
        if rules.usable("chat_template") and self.chat_template is not None:
            remedy = "name a file, or set it to null"
            rules.require(bool(self.chat_template.strip()), "chat_template", "empty", remedy)

    def _path_rules(self, rules: Rules) -> None:
        """Every data set is named, and named once: the same one twice would be two sources with equal samples."""
        if not all(path.strip() for path in self.paths):
            rules.add("paths", "one entry is empty", "remove it")
        normal = [os.path.normpath(path) for path in self.paths]
        repeated = sorted({path for path in normal if normal.count(path) > 1})
        if repeated:
            remedy = "name it once, with the sum of its weights in data.weights"
            rules.add("paths", f"{', '.join(repeated)} is named more than once", remedy)

    def _weight_rules(self, rules: Rules) -> None:
        """One finite positive weight for each path."""
        if len(self.weights) != len(self.paths):
            why = f"{len(self.weights)} weights for {len(self.paths)} data.paths"
            rules.add("weights", why, "give one weight for each path, or null")
        elif not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            remedy = "give finite weights above 0, and leave out the path of a source that is not wanted"
            rules.add("weights", "a weight is zero, negative or not a finite number", remedy)

    def _source_rules(self, rules: Rules) -> None:
        """Sources are the one of two ways to name data sets, and stages belong to them."""
        if not self.sources:
            if self.stages:
                rules.problems.append(
                    "data.stages: there are no sources; name them in data.sources, or leave stages out"
                )
            return
        for name in ("paths", "weights"):
            if rules.usable(name) and getattr(self, name):
                rules.add(name, "data.sources is set, too", "use one of the two ways, and leave the other empty")
        if rules.usable("format") and self.format != "indexed":
            why = f"only indexed data sets are mixed, and data.format is {self.format!r}"
            rules.problems.append(f"data.sources: {why}; name the files in data.paths")
        found = source_problems(self.sources, self.split)
        rules.problems += found or stage_problems(self.stages, self.sources, self.split)

    def _split_rules(self, rules: Rules) -> None:
        """The split can be read and leaves something to train on."""
        try:
            train, _, _ = parse_split(self.split)
        except ConfigError as error:
            rules.problems.append(str(error))
            return
        rules.require(train > 0, "split", "leaves nothing for training", "give a first number above 0")
