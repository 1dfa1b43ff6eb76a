"""What tools/probe_state.py does: facts, layer inputs, probes, report, plot."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

from megatron_fbt.analysis.facts import NO_LABEL, Facts, read_facts
from megatron_fbt.analysis.fixed_point import MOST_PASSES
from megatron_fbt.analysis.layer_inputs import layer_inputs, passes_of
from megatron_fbt.analysis.plots import (
    COLORS,
    model_name,
    new_figure,
    output_folder,
    require_matplotlib,
    save,
    save_report,
)
from megatron_fbt.analysis.probe import cross_validate, fold_numbers
from megatron_fbt.analysis.progress import PieceProgress
from megatron_fbt.errors import BadNumbersError, ConfigError
from megatron_fbt.inference.text import check_model_folder, load_model, load_network

CAUTION = (
    "A probe shows that a fact is present in a vector, not that training put it there or that the model uses it: a "
    "fusion layer that was never trained carries much of h(t-1) as well. Pair it with a test of accuracy."
)


@dataclass
class ProbeOptions:
    """The command line; see tools/probe_state.py --help."""

    model: str
    facts: str
    layer: Sequence[int] = (0,)
    regimes: Sequence[str] = ("plain", "fused1", "recurrent")
    folds: int = 5
    l2: float = 1.0
    max_positions: int = 20000
    batch: int = 8
    seed: int = 0
    device: Any = None
    output: str = "."


@dataclass
class Sample:
    """The labelled positions that are used: class, group and relative place in its row (0 to 1) of each, [n]."""

    classes: Tensor
    groups: Tensor
    places: Tensor


def measure(options: ProbeOptions) -> Dict[str, Any]:
    """Probe, write probe_state.json and probe_state.png, return the report.

    Raises:
        ConfigError: An option without a meaning, or matplotlib is missing.
        DataError: The facts cannot be used.
        CheckpointError: No exported model.
        BadNumbersError: The states are not finite.
    """
    _check(options)
    folder = output_folder(options.output)
    if (Path(options.model) / "tokenizer_config.json").is_file():
        model, tokenizer = load_model(options.model, options.device)
    else:
        model, tokenizer = load_network(options.model, options.device), None
    model = model.float()
    layers = list(dict.fromkeys(options.layer))
    if bad := [layer for layer in layers if not 0 <= layer <= model.config.num_hidden_layers]:
        raise ConfigError(
            f"layer={bad[0]}: must lie between 0 and {model.config.num_hidden_layers}, the final norm's input"
        )
    facts = read_facts(options.facts, tokenizer, model.config.vocab_size)
    chosen, sample = _choose(facts, options)
    folds = fold_numbers(sample.groups, options.folds, options.seed)
    features = _features(model, facts, chosen, layers, options)
    results = []
    with PieceProgress(len(features) * len(folds.unique()), "probes") as progress:
        for (layer, regime), states in features.items():
            found = cross_validate(states, sample.classes, folds, options.l2, progress.advance)
            results.append(_result(layer, regime, found, sample))
    report = {
        "model": options.model,
        "facts": options.facts,
        "values": facts.names,
        "positions": len(sample.classes),
        "groups": len(sample.groups.unique()),
        "folds": len(folds.unique()),
        "l2": options.l2,
        "seed": options.seed,
        "results": results,
        "caution": CAUTION,
    }
    save_report(report, folder / "probe_state.json")
    draw(report, folder / "probe_state.png")
    return report


def _check(options: ProbeOptions) -> None:
    for name, low in (("folds", 2), ("max_positions", 2), ("batch", 1), ("seed", 0)):
        if getattr(options, name) < low:
            raise ConfigError(f"{name}={getattr(options, name)}: must be at least {low}")
    if not 0 <= options.l2 < math.inf:
        raise ConfigError(f"l2={options.l2}: must be a finite number, 0 or larger")
    if options.seed >= 2**63:
        raise ConfigError(f"seed={options.seed}: must be smaller than 2^63")
    for regime in options.regimes:
        if passes_of(regime) > MOST_PASSES:
            raise ConfigError(f"regime {regime!r}: more than {MOST_PASSES:,} passes; give recurrent, their limit")
    check_model_folder(options.model)
    require_matplotlib()


def _choose(facts: Facts, options: ProbeOptions) -> Tuple[List[Tensor], Sample]:
    """Positions of each sequence that are probed, and what is known of them, in this order."""
    labelled = [torch.tensor(classes) for classes in facts.classes]
    total = sum(int((classes != NO_LABEL).sum()) for classes in labelled)
    keep = torch.ones(total, dtype=torch.bool)
    if total > options.max_positions:
        picked = torch.randperm(total, generator=torch.Generator().manual_seed(options.seed))[: options.max_positions]
        keep = torch.zeros(total, dtype=torch.bool)
        keep[picked] = True
    chosen, done = [], 0
    for classes in labelled:
        positions = (classes != NO_LABEL).nonzero()[:, 0]
        chosen.append(positions[keep[done : done + len(positions)]])
        done += len(positions)
    triples = list(zip(labelled, chosen, facts.groups, strict=True))
    return chosen, Sample(
        torch.cat([classes[positions] for classes, positions, _ in triples]),
        torch.cat([torch.full_like(positions, group) for _, positions, group in triples]),
        torch.cat([positions / len(classes) for classes, positions, _ in triples]),
    )


def _features(
    model: Any, facts: Facts, chosen: List[Tensor], layers: Sequence[int], options: ProbeOptions
) -> Dict[Tuple[int, str], Tensor]:
    """{(layer, regime): [n, D]} of the chosen positions, sequence after sequence."""
    regimes = list(dict.fromkeys(options.regimes))
    parts = {key: [torch.empty(0)] * len(chosen) for key in itertools.product(layers, regimes)}
    batches = _batches(facts.input_ids, options.batch)
    with PieceProgress(len(batches), "batches") as progress:
        for rows in batches:
            ids = torch.tensor([facts.input_ids[row] for row in rows], device=model.device)
            for key, states in layer_inputs(model, ids, layers, regimes).items():
                for place, row in enumerate(rows):
                    parts[key][row] = states[place, chosen[row].to(states.device)].float()
            progress.advance()
    features = {key: torch.cat(rows) for key, rows in parts.items()}
    for (layer, regime), states in features.items():
        if not states.isfinite().all():
            raise BadNumbersError(f"model {options.model}: what layer {layer} reads in {regime} is not finite")
    return features


def _batches(sequences: Sequence[Sequence[int]], batch: int) -> List[List[int]]:
    """Numbers of sequences to compute together, equally long ones only."""
    by_length: Dict[int, List[int]] = {}
    for number, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(number)
    return [numbers[i : i + batch] for numbers in by_length.values() for i in range(0, len(numbers), batch)]


def _result(layer: int, regime: str, found: Any, sample: Sample) -> Dict[str, Any]:
    quarters = []
    for quarter in range(4):
        inside = (sample.places * 4).floor().long() == quarter
        quarters.append(found.right[inside].float().mean().item() if inside.any() else None)
    return {
        "layer": layer,
        "regime": regime,
        "accuracy": found.accuracy,
        "majority": found.majority,
        "fold_accuracies": found.folds,
        "quarter_accuracies": quarters,
    }


def describe(report: Dict[str, Any]) -> str:
    """Table and caution for a person."""
    lines = [
        f"{report['positions']:,} positions of {report['groups']:,} groups, {len(report['values'])} values, "
        f"{report['folds']} folds over whole groups",
        f"{'layer':>5}  {'regime':<10}  {'accuracy':>8}  {'majority':>8}  {'folds':>13}  by quarter of the sequence",
    ]
    for result in report["results"]:
        spread = f"{min(result['fold_accuracies']):.3f}-{max(result['fold_accuracies']):.3f}"
        quarters = " ".join("    -" if value is None else f"{value:.3f}" for value in result["quarter_accuracies"])
        lines.append(
            f"{result['layer']:>5}  {result['regime']:<10}  {result['accuracy']:>8.3f}  {result['majority']:>8.3f}  "
            f"{spread:>13}  {quarters}"
        )
    return "\n".join([*lines, f"caution: {report['caution']}"])


def draw(report: Dict[str, Any], path: Path) -> None:
    """Bars of the accuracies, by regime and layer, over the line of the majority."""
    results = report["results"]
    regimes = list(dict.fromkeys(result["regime"] for result in results))
    layers = list(dict.fromkeys(result["layer"] for result in results))
    figure, (panel,) = new_figure(
        1, f"{Path(report['facts']).stem}: what a linear probe finds in {model_name(report['model'])}"
    )
    width = 0.8 / len(layers)
    for number, layer in enumerate(layers):
        own = {result["regime"]: result for result in results if result["layer"] == layer}
        places = [index + (number - (len(layers) - 1) / 2) * width for index in range(len(regimes))]
        heights = [own[regime]["accuracy"] for regime in regimes]
        errors = [
            [own[regime]["accuracy"] - min(own[regime]["fold_accuracies"]) for regime in regimes],
            [max(own[regime]["fold_accuracies"]) - own[regime]["accuracy"] for regime in regimes],
        ]
        color = COLORS[number % len(COLORS)]
        panel.bar(places, heights, width * 0.95, color=color, label=f"input of layer {layer}")
        panel.errorbar(places, heights, [[max(0.0, e) for e in side] for side in errors], fmt="none", ecolor="#555555")
        for place, height, above in zip(places, heights, errors[1]):
            panel.text(place, height + max(0.0, above) + 0.01, f"{height:.2f}", fontsize=8, ha="center")
    panel.axhline(results[0]["majority"], color="#000000", linestyle="--", label="majority")
    panel.set_xticks(range(len(regimes)), regimes)
    panel.set(
        ylim=(0, 1.08),
        ylabel="accuracy on held-out groups (thin lines: range of folds)",
        xlabel="how the input was computed",
    )
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)
