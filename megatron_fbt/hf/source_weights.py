"""The weights of a Hugging Face folder, read tensor by tensor from safetensors; nothing in it is executed."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import CheckpointError
from megatron_fbt.hf.weights import RowMap, canonical_shapes, hf_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ROWS_AT_ONCE = 4096


class SafetensorsFolder:
    """Names, shapes and number formats of a folder's weights, and the weights one at a time.

    Args:
        folder: Holds model.safetensors, or its parts and model.safetensors.index.json.

    Attributes:
        shapes: By name.
        dtypes: By name.

    Raises:
        CheckpointError: There are none, a file is damaged, or a tensor is quantized.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: Dict[str, Path] = {}
        self.shapes: Dict[str, Tuple[int, ...]] = {}
        self.dtypes: Dict[str, torch.dtype] = {}
        self._stack, self._open_path, self._open_file = ExitStack(), None, None
        for path, names in self._listing().items():
            with _as_checkpoint_error(path), safe_open(str(path), framework="pt") as file:
                stored = file.keys()
                if missing := sorted(set(names) - set(stored)):
                    raise CheckpointError(f"{path}: {missing[0]} is not in it, but {INDEX} says so. Download it again.")
                for name in names or stored:
                    part = file.get_slice(name)
                    self._add(name, path, tuple(part.get_shape()), part.get_dtype())

    def _listing(self) -> Dict[Path, List[str]]:
        """Names of the weights in each file; an empty list = all that the file has."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                found: Dict[Path, List[str]] = {}
                for name, file in places.items():
                    if Path(file).name != file:
                        raise ValueError(f"{file!r} is not a file name")
                    found.setdefault(self.folder / file, []).append(name)
                return found
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"{index} cannot be read: {reason}. Download the folder again.") from error
        if (self.folder / SINGLE).is_file():
            return {self.folder / SINGLE: []}
        others = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in self.folder.glob(kind))
        found = f"{', '.join(others[:3])} can hold code and is not read" if others else "there are no weights in it"
        raise CheckpointError(
            f"{self.folder}: neither {SINGLE} nor {INDEX} ({found}). Save the model as safetensors: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)."
        )

    def _add(self, name: str, path: Path, shape: Tuple[int, ...], dtype: str) -> None:
        if name.endswith("rotary_emb.inv_freq"):  # early Llama files store what rope_theta says
            return
        if dtype not in DTYPES:
            formats = ", ".join(DTYPES)
            raise CheckpointError(
                f"{path}: {name} is stored as {dtype}: must be one of {formats}. Give an unquantized model."
            )
        self._files[name], self.shapes[name], self.dtypes[name] = path, shape, DTYPES[dtype]

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 if all weights are, else float32: what every weight fits into."""
        return torch.bfloat16 if set(self.dtypes.values()) == {torch.bfloat16} else torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def read(self, name: str) -> Tensor:
        """One weight, whole.

        Raises:
            CheckpointError: Its file cannot be read, or it holds numbers that are not finite.
        """
        path = self._files[name]
        with _as_checkpoint_error(path):
            weight = self._file(name).get_tensor(name)
        extremes = torch.aminmax(weight) if weight.numel() else ()  # no memory for another tensor
        if not all(torch.isfinite(extreme) for extreme in extremes):
            raise CheckpointError(f"{path}: {name} holds numbers that are not finite. Give another model.")
        return weight

    def row_blocks(self, name: str, count: int) -> Iterator[Tensor]:
        """The first rows of a matrix, a few at a time."""
        with _as_checkpoint_error(self._files[name]):
            part = self._file(name).get_slice(name)
            for start in range(0, count, ROWS_AT_ONCE):
                yield part[start : min(start + ROWS_AT_ONCE, count)]

    def _file(self, name: str) -> Any:
        """The open file of a weight; one is open at a time."""
        path = self._files[name]
        if path != self._open_path:
            self.close()
            self._open_file = self._stack.enter_context(safe_open(str(path), framework="pt"))
            self._open_path = path
        return self._open_file

    def close(self) -> None:
        """Close what is open."""
        self._stack.close()
        self._open_path = self._open_file = None


class CanonicalSource:
    """A folder's weights by their names and in their layouts in training; a fresh fusion layer beside those of a model
    that has none.

    Args:
        folder: The weights.
        config: What they belong to, model.vocab_size included.
        fresh: Weights that the folder does not have, by canonical name.

    Raises:
        CheckpointError: A weight is missing, unknown or of another shape than the configuration says.
    """

    def __init__(self, folder: SafetensorsFolder, config: PretrainConfig, fresh: Mapping[str, Tensor]):
        self.folder, self.fresh = folder, fresh
        self.shapes = dict(canonical_shapes(config, config.model.vocab_size))
        self._maps: Dict[str, List[RowMap]] = {}
        for row_map in hf_tensors(config, config.model.vocab_size):
            if row_map.source not in fresh:
                self._maps.setdefault(row_map.source, []).append(row_map)
        self._check(config.model.share_embeddings_and_output_weights)
        self._last: Tuple[str, Any] = ("", None)

    def _check(self, tied: bool) -> None:
        wanted = {row_map.name: row_map.shape for maps in self._maps.values() for row_map in maps}
        found = {name: shape for name, shape in self.folder.shapes.items() if not (tied and name == "lm_head.weight")}
        missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        where = f"{self.folder.folder}: its weights are not those of its config.json"
        if missing or unknown:
            kinds = (("missing", missing), ("not expected", unknown))
            said = "; ".join(f"{kind} {', '.join(names[:3])} ({len(names)} in all)" for kind, names in kinds if names)
            raise CheckpointError(f"{where}: {said}. Give a whole causal language model of this type.")
        for name, shape in wanted.items():
            if found[name] != shape:
                raise CheckpointError(f"{where}: {name} has shape {found[name]}, not {shape}. Correct config.json.")

    def read(self, name: str) -> Tensor:
        """One canonical weight in the number format of its file; asked for twice in a row, it is read once."""
        if self._last[0] != name:
            self._last = ("", None)
            self._last = (name, self.fresh[name] if name in self.fresh else self._join(name))
        return self._last[1]

    def _join(self, name: str) -> Tensor:
        maps = self._maps[name]
        parts = [self.folder.read(row_map.name) for row_map in maps]
        if len(maps) == 1:
            return parts[0]
        dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else torch.float32
        whole = torch.empty(self.shapes[name], dtype=dtype)
        for row_map, part in zip(maps, parts, strict=True):
            at = 0
            for start, stop in row_map.rows:
                whole[start:stop] = part[at : at + stop - start]
                at += stop - start
        return whole


def root_mean_square(folder: SafetensorsFolder, name: str, rows: int) -> float:
    """Root of the mean square of the first rows of a matrix, in double precision."""
    squares = sum(block.double().square().sum().item() for block in folder.row_blocks(name, rows))
    return (squares / (rows * folder.shapes[name][1])) ** 0.5


class _as_checkpoint_error:
    """Turn what reading a file raises into one line with its path."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, (OSError, SafetensorError)):
            raise CheckpointError(f"{self.path} cannot be read: {error}. Download the file again.") from error
