"""What tools/fixed_point.py does: rows, iteration, report, plot."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional

from megatron_fbt.analysis.fixed_point import MOST_PASSES, PassSeries, iterate
from megatron_fbt.analysis.plots import (
    COLORS,
    model_name,
    new_figure,
    output_folder,
    require_matplotlib,
    save,
    save_report,
)
from megatron_fbt.analysis.progress import PieceProgress
from megatron_fbt.analysis.rows import TokenRows, indexed_rows, text_rows
from megatron_fbt.analysis.stability import assess, judged_norms
from megatron_fbt.errors import BadNumbersError, ConfigError
from megatron_fbt.inference.text import check_model_folder, load_model, load_network


@dataclass
class FixedPointOptions:
    """The command line; see tools/fixed_point.py --help."""

    model: str
    text: Optional[str] = None
    data: Optional[str] = None
    split: Optional[str] = None
    passes: int = 300
    trained_passes: Optional[int] = None
    rows: int = 16
    length: Optional[int] = None
    batch: int = 8
    seed: int = 0
    margin: float = 0.1
    device: Optional[str] = None
    output: str = "."


def measure(options: FixedPointOptions) -> Dict[str, Any]:
    """Iterate, write fixed_point.json and fixed_point.png, return the report.

    Raises:
        ConfigError: An option without a meaning, or matplotlib is missing.
        DataError: No usable text.
        CheckpointError: No exported model.
        BadNumbersError: The plain pass already has a loss that is not finite.
    """
    _check(options)
    folder = output_folder(options.output)
    if options.text is None:
        model, tokenizer = load_network(options.model, options.device), None
    else:
        model, tokenizer = load_model(options.model, options.device)
    model = model.float()
    trained = options.trained_passes or model.config.passes
    if options.passes <= trained:
        raise ConfigError(f"passes={options.passes}: must be larger than the trained depth, {trained}")
    rows = _rows(options, model.config, tokenizer)
    if (length := rows.input_ids.shape[1]) <= trained:
        raise ConfigError(
            f"length={length}: must be larger than the trained depth, {trained}: shorter rows are final then"
        )
    batches = -(-len(rows.input_ids) // options.batch)
    with PieceProgress(batches * options.passes, "passes of a batch") as progress:
        series = iterate(
            model,
            rows.input_ids,
            passes=options.passes,
            batch=options.batch,
            document_starts=rows.document_starts,
            on_pass=progress.advance,
        )
    if not series.losses[0] < float("inf"):
        raise BadNumbersError(f"model {options.model}: the loss of the plain pass is not finite; its weights are bad")
    report = {
        "model": options.model,
        "source": options.text or options.data,
        "rows": len(rows.input_ids),
        "rows_available": rows.available,
        "seed": options.seed,
        **assess(series, trained, options.margin),
    }
    save_report(report, folder / "fixed_point.json")
    draw(report, series, folder / "fixed_point.png")
    return report


def _check(options: FixedPointOptions) -> None:
    for name in ("passes", "trained_passes", "rows", "batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    if options.passes > MOST_PASSES:
        raise ConfigError(f"passes={options.passes}: must be at most {MOST_PASSES:,}")
    if not 0 <= options.margin < float("inf"):
        raise ConfigError(f"margin={options.margin}: must be a finite number, 0 or larger")
    if options.seed < 0:
        raise ConfigError(f"seed={options.seed}: must be 0 or larger")
    if options.split is not None and options.data is None:
        raise ConfigError("split belongs to a data set: give it with --data")
    check_model_folder(options.model)
    if options.text is not None and not (Path(options.model) / "tokenizer_config.json").is_file():
        raise ConfigError(f"text {options.text}: model {options.model} has no tokenizer to read it with; give --data")
    require_matplotlib()


def _rows(options: FixedPointOptions, config: Any, tokenizer: Any) -> TokenRows:
    length = config.max_position_embeddings if options.length is None else options.length
    size, rows, seed = config.vocab_size, options.rows, options.seed
    if options.text is not None:
        return text_rows(tokenizer, size, options.text, rows, length, seed)
    return indexed_rows(options.data, size, options.split, config.eos_token_id, rows, length, seed)


def draw(report: Dict[str, Any], series: PassSeries, path: Path) -> None:
    """Loss over passes, and update norm over passes with the fitted line."""
    figure, (left, right) = new_figure(
        2, f"{model_name(report['model'])}: {len(series.losses)} passes over held-out text"
    )
    passes = range(1, len(series.losses) + 1)
    left.plot(passes, series.losses, color=COLORS[0], marker="o", markersize=3, label="loss of pass k")
    trained = report["trained_passes"]
    left.axvline(
        trained, color=COLORS[2], linestyle="--", label=f"trained depth, k = {trained}: {report['loss_trained']:.4f}"
    )
    gap = f"last pass: {report['loss_fixed_point']:.4f} (gap {report['gap']:+.4f})"
    left.axhline(report["loss_fixed_point"], color=COLORS[1], linestyle=":", label=gap)
    left.set(xscale="log", xlabel="pass k", ylabel="mean loss (nats per token)", title="what the iteration is worth")
    left.xaxis.set_major_formatter("{x:g}")
    left.legend()
    _draw_norms(right, report, judged_norms(series))
    save(figure, path)


def _draw_norms(axis: Any, report: Dict[str, Any], norms: Dict[int, float]) -> None:
    fit = report["contraction"]
    shown = {k: norm for k, norm in norms.items() if norm > 0}
    axis.plot(list(shown), list(shown.values()), color=COLORS[0], marker="o", markersize=3, label="update norm")
    if fit["rate"] is not None and fit["first_pass"] in shown:
        ends = [fit["first_pass"], fit["last_pass"]]
        middle = [k for k in shown if ends[0] <= k <= ends[1]]
        level = statistics.geometric_mean(shown[k] for k in middle)
        center = sum(middle) / len(middle)
        line = [level * fit["rate"] ** (k - center) for k in ends]
        axis.plot(ends, line, color=COLORS[1], linestyle="--", label=f"fit: factor {fit['rate']:.3f} a pass")
    axis.axhline(fit["noise"], color="#888888", linestyle=":", label=f"rounding errors, {fit['noise']:.1e}")
    if fit["rest_pass"] is not None and len(shown) > 2 * fit["rest_pass"]:
        axis.set_xlim(0, 2 * fit["rest_pass"])
    axis.set(yscale="log", xlabel="pass k", ylabel="|h(k) - h(k-1)| / |h(k)|, positions t >= k")
    axis.set_title("is it a contraction?" + (" ALARM: the norm grows" if report["alarm"] else ""))
    axis.legend()
