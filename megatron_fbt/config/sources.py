"""Sources of a mixture, and stages in which their weights change."""

import math
import os
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from megatron_fbt.config.rules import Rules, Section
from megatron_fbt.errors import ConfigError


def parse_split(text: str, field: str = "data.split") -> Tuple[float, float, float]:
    """Read a split such as `969,30,1`: the relative parts of training, validation and test.

    Args:
        text: three numbers, not negative, separated by commas; blanks around them do not matter.
        field: where it was written.

    Returns:
        The three numbers as written (not normalised).

    Raises:
        ConfigError: naming the text, if it is anything else or all parts are zero.
    """
    remedy = "give three numbers for training, validation and test, not negative and not all zero, such as 969,30,1"
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or not all(math.isfinite(part) and part >= 0 for part in parts) or sum(parts) == 0:
        raise ConfigError(f"{field} = {text!r}: not a split; {remedy}")
    return parts[0], parts[1], parts[2]


@dataclass
class SourceConfig(Section):
    """One source of a mixture: data sets whose documents are shuffled together."""

    name: str
    """For weights of stages, reports and messages."""
    paths: List[str]
    """Prefixes of .bin/.idx pairs, manifests (.manifest.json), and patterns of either (*, ?, [...])."""
    weight: Optional[float] = None
    """Relative share of the rows; exactly one of weight and tokens."""
    tokens: Optional[float] = None
    """Training tokens of the whole run that come from here; sources with a weight share the rest."""
    max_epochs: Optional[float] = None
    """A run that would read it more often than this is refused; null = no limit."""
    split: Optional[str] = None
    """Parts for training, validation and test; null = data.split. "0,1,0" = for validation only."""

    def problems(self, name: str = "data.sources[]", default_split: str = "969,30,1") -> List[str]:
        """See Section; `name` says which source this is."""
        rules = Rules(name, self)
        rules.numbers("weight", "tokens", "max_epochs", above=True)
        if rules.usable("name"):
            rules.require(bool(self.name.strip()), "name", "empty", "give each source a name of its own")
        if rules.usable("paths"):
            named = bool(self.paths) and all(path.strip() for path in self.paths)
            rules.require(named, "paths", "names nothing, or has an empty entry", "name at least one data set")
        if rules.usable("weight", "tokens") and (self.weight is None) == (self.tokens is None):
            why = f"weight = {self.weight} and tokens = {self.tokens}, and exactly one of them gives the share"
            rules.add("name", why, "set one and leave the other null")
        if rules.usable("split") and self.split is not None:
            try:
                train, valid, _ = parse_split(self.split, f"{name}.split")
                why = "leaves nothing for training nor for validation"
                rules.require(train + valid > 0, "split", why, "leave the source out")
                if train == 0 and self.tokens is not None and rules.usable("tokens"):
                    rules.add("tokens", "a budget of training tokens, but split leaves none", "give a weight instead")
            except ConfigError as error:
                rules.problems.append(str(error))
        return rules.problems


@dataclass
class StageConfig(Section):
    """From `first_step` on, the sources have these weights."""

    first_step: int
    """Steps count from 0; the first stage begins at 0."""
    weights: Optional[Dict[str, float]] = None
    """{name of a source: weight}; sources that are not named have no part. null = the weights and budgets of the
    sources themselves."""

    def problems(self, name: str = "data.stages[]") -> List[str]:
        """See Section; `name` says which stage this is."""
        rules = Rules(name, self)
        rules.integers("first_step", low=0)
        if self.weights is not None and rules.usable("weights"):
            good = bool(self.weights) and all(math.isfinite(w) and w > 0 for w in self.weights.values())
            remedy = "give finite numbers above 0, and leave out sources that are not wanted"
            rules.require(
                good, "weights", "a weight is zero, negative or not a finite number, or there is none", remedy
            )
        return rules.problems


def source_problems(sources: List[SourceConfig], split: str) -> List[str]:
    """What is wrong with a list of sources."""
    found = [
        problem for index, source in enumerate(sources) for problem in source.problems(f"data.sources[{index}]", split)
    ]
    if found:
        return found
    for names, what in (
        ([source.name for source in sources], "name"),
        ([os.path.normpath(path) for source in sources for path in source.paths], "path"),
    ):
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            remedy = "give each source another name" if what == "name" else "name it once"
            found.append(f"data.sources: the {what} {', '.join(repeated)} is there more than once; {remedy}")
    try:
        if not found and not any(parse_split(source.split or split)[0] > 0 for source in sources):
            found.append("data.sources: no split leaves anything for training; give a first number above 0")
    except ConfigError:
        pass  # data.split itself, which has its own rule
    return found


def stage_problems(stages: List[StageConfig], sources: List[SourceConfig], split: str) -> List[str]:
    """What is wrong with a list of stages, given sources without fault."""
    found = [problem for index, stage in enumerate(stages) for problem in stage.problems(f"data.stages[{index}]")]
    if found or not stages:
        return found
    starts = [stage.first_step for stage in stages]
    if starts[0] != 0:
        found.append(f"data.stages[0].first_step = {starts[0]}: the first stage begins the run; set it to 0")
    if starts != sorted(set(starts)):
        found.append(f"data.stages: the stages begin at steps {starts}; sort them by first_step, each step once")
    known = {source.name: source for source in sources}
    for index, stage in enumerate(stages):
        for name in stage.weights or ():
            field = f"data.stages[{index}].weights"
            if name not in known:
                found.append(f"{field}: no source is called {name!r}; data.sources has {', '.join(known)}")
            elif known[name].tokens is not None:
                found.append(
                    f"{field}: {name!r} has a budget of tokens, which is spent in stages without weights of their own; "
                    "give the source a weight instead, or leave it out here"
                )
            elif parse_split(known[name].split or split)[0] == 0:
                found.append(f"{field}: the split of {name!r} leaves it nothing for training; leave it out here")
    if all(stage.weights is not None for stage in stages):
        budgets = [source.name for source in sources if source.tokens is not None]
        if budgets:
            found.append(
                f"data.stages: every stage has weights of its own, so the tokens of {', '.join(budgets)} are never "
                "spent; give these sources a weight instead, or a stage without weights"
            )
    return found
