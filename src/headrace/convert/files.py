"""The tensors of a checkpoint, read one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..files.checks import check_files, read_json
from ..ops.checks import require
from ..utils.errors import reading

SHARED_LAYERS = 1000  # layers that a model may have beyond its tensors, as layers can share their weights
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class Header(NamedTuple):
    """What a file says of a tensor."""

    file: str
    shape: list[int]
    dtype: torch.dtype | str  # the name in safetensors of a dtype that PyTorch lacks

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Tensors(ABC):
    """The tensors of a checkpoint, of which `headers` says what they are."""

    headers: dict[str, Header]

    @abstractmethod
    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors with these names, one at a time and in any order."""

    def equal(self, *names: str) -> bool:
        """Whether two tensors have the same values."""
        a, b = (tensor for _, tensor in self.tensors(names))
        return torch.equal(a, b)


class TensorFiles(Tensors):
    """The tensors of a folder of safetensors. InputError for a file that cannot be read, or as `check_files`."""

    def __init__(self, folder: Path):
        check_files(folder)
        self.folder = folder
        names = {WEIGHTS}
        if not (folder / WEIGHTS).is_file():  # transformers, too, takes the whole file where there are both
            missing = f"it has no {WEIGHTS} and no {INDEX}; expected its weights in safetensors: no pickle is read"
            require((folder / INDEX).is_file(), missing)
            names = {*read_json(folder / INDEX, {"weight_map": {...: str}})["weight_map"].values()}
        self.headers = {}
        for file in sorted(names):
            self.headers |= self._headers(file)
        require(bool(self.headers), "its files hold no tensor")

    def _headers(self, file: str) -> dict[str, Header]:
        with reading(f"{file} cannot be read"), safe_open(self.folder / file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Header(file, x.get_shape(), DTYPES.get(x.get_dtype(), x.get_dtype()))
                for name, x in slices.items()
            }

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for file in sorted({self.headers[name].file for name in names}):
            with safe_open(self.folder / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in names and self.headers[name].file == file:
                        yield name, opened.get_tensor(name)

    def stored(self, name: str, header: Header) -> Tensor:
        """Returns a tensor as it is stored. header: where it is."""
        with safe_open(self.folder / header.file, "pt") as opened:
            return opened.get_tensor(name)


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors in the safetensors of a folder, of which only the headers are read."""
    names = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


def check_depth(layers: int, names: list[str]) -> None:
    """Raises InputError for more layers than the weights can have, before a model of a billion layers is built."""
    require(
        layers <= len(names) + SHARED_LAYERS,
        f"num_hidden_layers={layers}; expected the number of layers that its {len(names)} tensors have",
    )
