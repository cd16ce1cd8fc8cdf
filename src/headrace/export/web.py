"""`headrace export --to web`: an ONNX model and a page that continues texts with it in a browser.

The page runs ONNX Runtime's WebAssembly build. It and the tokenizer are libraries of npm that the page loads.
"""

import json
import shutil
from pathlib import Path
from string import Template

from ..utils.errors import InputError, require
from . import onnx

PAGE = Path(__file__).with_name("page")
MOST = 2**32  # bytes of weights: WebAssembly's addresses have 32 bits
CDN = "https://cdn.jsdelivr.net/npm"
# {package: (version, the module that the page imports, files that this module loads)}
PACKAGES = {
    "onnxruntime-web": (
        "1.30.0", "dist/ort.wasm.min.mjs", ("dist/ort-wasm-simd-threaded.mjs", "dist/ort-wasm-simd-threaded.wasm"),
    ),
    "@huggingface/tokenizers": ("0.2.0", "dist/tokenizers.min.mjs", ()),
}  # fmt: skip


def export(checkpoint: Path, folder: Path, weights: str = "float32", libraries: str = CDN) -> str:
    """Writes the files of `onnx.export`, index.html and generate.js.

    Args:
        weights: as for onnx.
        libraries: address of a mirror of npm in the layout of jsDelivr, or a folder node_modules, from which the
            libraries are copied.

    InputError as `onnx.export`, for a file that the page needs and that is not there, and for more weights than a page
    can hold."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        require((checkpoint / name).is_file(), f"checkpoint {str(checkpoint)!r} has no {name}, which --to web needs")
    write_page(folder, libraries)
    sentence = onnx.export(checkpoint, folder, weights)
    size = sum(file.stat().st_size for file in folder.glob(f"{onnx.MODEL}*"))
    require(size < MOST, f"--to web: {size / 1e9:.1f} GB of weights; expected less than {MOST / 1e9:.1f} GB")
    return sentence


def write_page(folder: Path, libraries: str) -> None:
    """Writes the page, and copies the libraries unless `libraries` is an address."""
    remote = "://" in libraries
    imports = {name: _address(name, libraries if remote else None) for name in PACKAGES}
    for name, (_, module, more) in () if remote else PACKAGES.items():
        for file in (module, *more):
            _copy(Path(libraries) / name / file, folder / "libraries" / name / file)
    page = Template((PAGE / "index.html").read_text("utf-8"))
    (folder / "index.html").write_text(page.substitute(imports=json.dumps(imports)), "utf-8")
    shutil.copy(PAGE / "generate.js", folder)


def _address(name: str, mirror: str | None) -> str:
    version, module, _ = PACKAGES[name]
    return f"./libraries/{name}/{module}" if mirror is None else f"{mirror}/{name}@{version}/{module}"


def _copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise InputError(f"--libraries has no {str(source)!r}; expected an address, or node_modules with {source.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
