"""Import: a checkpoint of another library as a headrace model.

Only safetensors and GGUF files are read: nothing is unpickled, and no foreign code runs.
"""

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import reduce
from math import frexp, prod
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ..extra.moe import MixtureOfExperts
from ..files.checks import check_weights, read_json
from ..files.hub import ADAPTER, GGUF
from ..hf.config import HeadraceConfig, check_tokens
from ..hf.model import HeadraceForCausalLM
from ..ops.checks import require
from ..spec.record import LARGEST
from ..utils.errors import InputError, did_you_mean, reading, require_each
from ..utils.extras import require_packages
from .fields import Config, Fields, check_sizes, without
from .files import Tensors, check_depth
from .form import PRECISIONS, SPECIAL, Format, Model
from .formats import FORMATS, MISSING
from .slots import slots
from .views import Block, View, Views

HEAD, EMBEDDING = "head.weight", "model.embed_tokens.weight"
ROUTERS = "choice_bias", "mlp.router.weight", "mlp.router.bias"
# Numbers of a GenerationConfig.
NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "no_repeat_ngram_size",
)  # fmt: skip
EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<e>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)\.weight")


def import_checkpoint(
    checkpoint: str | Path, dtype: torch.dtype | None = None, ignore: Collection[str] = ()
) -> HeadraceForCausalLM:
    """Converts a foreign checkpoint to a headrace model in evaluation mode, with the settings of generation of the
    checkpoint, but with a cache. Fields of config.json that change nothing are named on stderr.

    It needs the memory of the model and of one foreign tensor.

    ignore: fields of config.json that are left out.
    dtype: precision of the model; None: the lowest one that represents every tensor without rounding, and at least
        float32 for a model with factors that are folded into weights and are no powers of 2.

    Raises:
        InputError: the format is unknown, the config has a feature that headrace does not have, or a tensor is missing,
            unexpected or of another shape.
    """
    checkpoint = Path(checkpoint)
    check_weights(checkpoint)
    form, described = _read_format(checkpoint)
    with _naming(checkpoint):
        described = without(form.of_text(described), ignore)
        model, fields = _converted(form, described, form.files(checkpoint), dtype)
    if fields.passed:
        print(fields.note(), file=sys.stderr)
    model.generation_config = _generation(checkpoint, model, described)
    check_generation(model.generation_config)
    model.generation_config.use_cache = True
    # transformers saves settings without effect, such as a temperature of a greedy search, only as they were read
    model.generation_config._original_object_hash = hash(model.generation_config)
    return model.eval()


def import_gguf(
    path: str | Path, dtype: torch.dtype | None = None
) -> tuple[HeadraceForCausalLM, PreTrainedTokenizerFast]:
    """Converts a GGUF file to a headrace model in evaluation mode, with its settings of generation, and its tokenizer.

    It needs the memory of the model and of one tensor. dtype: as in `import_checkpoint`; None is float32 for a file
    that is quantized.

    Raises:
        InputError: the file is not complete, or its architecture, tokenizer, a type of its tensors or its metadata
            cannot be converted.
    """
    file, path = _opened(path), Path(path)
    tokenizer = _tokenizer(file, path)  # before the weights are read
    with _naming(path):
        model, _ = _converted(FORMATS[file.kind], file.described, file, dtype)
    model.generation_config = file.generation()
    return model.eval(), tokenizer


def import_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a GGUF file. InputError as `import_gguf`."""
    return _tokenizer(_opened(path), path)


def _opened(path: str | Path) -> Any:
    require_packages(str(path), "gguf")
    from .gguf import GGUFFile

    with _naming(path):
        return GGUFFile(Path(path))


def _tokenizer(file: Any, path: str | Path) -> PreTrainedTokenizerFast:
    from .vocabulary import tokenizer_of

    with _naming(path):
        return tokenizer_of(file.metadata)


def _generation(checkpoint: Path, model: Any, described: Config) -> GenerationConfig:
    """Returns the settings of generation. They are those of config.json where they have no file, as in transformers."""
    if (checkpoint / "generation_config.json").is_file():
        with reading(f"checkpoint {str(checkpoint)!r} has no readable generation_config.json"):
            return GenerationConfig.from_pretrained(checkpoint, local_files_only=True)
    own = GenerationConfig().to_dict().keys() & described.keys() - {"transformers_version"}
    with reading(f"checkpoint {str(checkpoint)!r} has settings of generation in config.json that transformers refuses"):
        special = {name: getattr(model.config, name) for name in SPECIAL}
        return GenerationConfig(**{name: described[name] for name in own if described[name] is not None} | special)


def check_generation(settings: Any) -> None:
    """Raises InputError for a value of a wrong type in a GenerationConfig. transformers checks few of them."""
    check_tokens(settings)
    numbers = {name: x for name in NUMBERS if (x := getattr(settings, name, None)) is not None}
    require_each(lambda x: type(x) in (int, float) and abs(x) < LARGEST, "a number, or None", **numbers)


def import_config(checkpoint: Path) -> HeadraceConfig:
    """Returns the config of the converted model, of whose weights the headers are read, for its dtype. InputError as
    `import_checkpoint` and `import_gguf`."""
    files: Any = _opened(checkpoint) if checkpoint.suffix == GGUF else None
    form, described = _read_format(checkpoint) if files is None else (FORMATS[files.kind], files.described)
    with _naming(checkpoint):
        if files is None:
            described = form.of_text(described)
            files = form.files(checkpoint) if any(checkpoint.glob("*.safetensors")) else None
        check_sizes(described, LARGEST)
        if files is None:
            return HeadraceConfig(**form.model(described)[0].arguments, dtype=None, converted_from=described)
        foreign, _, dtype = _foreign(form, described, files)
        return HeadraceConfig(**foreign.arguments, dtype=dtype, converted_from=described)


@contextmanager
def _naming(checkpoint: str | Path) -> Iterator[None]:
    """Names the checkpoint in the InputErrors of the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"checkpoint {str(checkpoint)!r}: {error}") from None


def _read_format(checkpoint: Path) -> tuple[Format, Config]:
    """Returns the format of a checkpoint, and its config.json. InputError if the format is unknown, and for an adapter
    beside the weights."""
    described = read_json(checkpoint / "config.json", {})
    kind = described.get("model_type")
    if isinstance(kind, str) and (missing := MISSING.get(kind.removesuffix("_text"))):
        reason = f"which is not converted, as it has {missing}"
        raise InputError(f"checkpoint {str(checkpoint)!r} has model_type={kind!r}, {reason}")
    if kind == HeadraceConfig.model_type:
        raise InputError(f"checkpoint {str(checkpoint)!r} is one of headrace already; expected another, or --to FORMAT")
    if kind not in [*FORMATS]:
        meant = did_you_mean(kind, [HeadraceConfig.model_type, *FORMATS]) if isinstance(kind, str) else ""
        if "ssm_cfg" in described:  # of the package mamba_ssm, which saves pickles
            meant = ", as state-spaces/mamba-130m-hf is for state-spaces/mamba-130m"
        expected = f"expected {HeadraceConfig.model_type} or one of the {len(FORMATS)} formats that are converted"
        raise InputError(f"checkpoint {str(checkpoint)!r} has model_type={kind!r}; {expected}{meant}")
    check_alone(checkpoint)
    return FORMATS[kind], described


def check_alone(checkpoint: Path) -> None:
    """Raises InputError for an adapter beside the weights, which transformers adds to them only if PEFT is installed,
    and which functions that read weights would leave out."""
    alone = not (checkpoint / ADAPTER).is_file()
    require(alone, f"checkpoint {str(checkpoint)!r} has {ADAPTER}; expected a folder written by merge_and_unload()")


def _converted(form: Format, described: Config, files: Tensors, dtype: torch.dtype | None) -> tuple[Any, Fields]:
    """Returns the model, and the fields. InputError for a config that does not fit the tensors, before memory is
    taken."""
    check_sizes(described, max(header.elements for header in files.headers.values()))
    foreign, fields, dtype = _foreign(form, described, files, dtype)
    check_depth(foreign.arguments["num_hidden_layers"], [*files.headers])
    config = HeadraceConfig(**foreign.arguments, converted_from=described)
    with torch.device("meta"):
        model: Any = HeadraceForCausalLM(config)
    _check_tensors(form, model, foreign, files)
    cast(model, dtype).to_empty(device="cpu")
    for module in model.modules():
        if module._buffers and not isinstance(module, MixtureOfExperts):  # which no view fills
            module.reset_parameters()
    model.tie_weights()
    _fill(model, foreign.views, files)
    return model, fields


def _foreign(
    form: Format, described: Config, files: Tensors, dtype: torch.dtype | None = None
) -> tuple[Model, Fields, torch.dtype]:
    """Returns the foreign model with the names that its checkpoint has, its fields, and the dtype."""
    foreign, fields = form.model(described)
    views = {slot: _present(view, form, files) for slot, view in foreign.views.items()}
    dtype = dtype or _precision(files, views)
    again, _ = form.model(described | {"dtype": str(dtype).removeprefix("torch.")})  # on which a constant may depend
    return again._replace(views=views), fields, dtype


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Converts the weights of a model, and returns it. Those of routers keep float32, as in `from_pretrained`."""
    routers = {name: x for name, x in model.state_dict().items() if name.endswith(ROUTERS)}
    model.to(dtype)
    for name, x in model.state_dict(keep_vars=True).items():
        if name in routers:
            x.data = routers[name].to(torch.promote_types(dtype, torch.float32))
    return model


@torch.no_grad()
def _fill(model: Any, views: Views, files: Tensors) -> None:
    ours, places = slots(model), dict[str, list[str]]()
    for slot, view in views.items():
        places.setdefault(view.name, []).append(slot)
    for name, tensor in files.tensors(places):
        for slot in places[name]:
            view = views[slot]
            # In the precision of the model: 1 plus a small weight may need more bits than the weight.
            value = view.rows(tensor).reshape(ours[slot].shape).to(ours[slot].dtype)
            ours[slot].copy_(value * view.factor + view.offset)


def _precision(files: Tensors, views: Views) -> torch.dtype:
    """The lowest precision that represents every tensor of the model without rounding, but those of routers, which keep
    float32; and float32 at least for products with a factor that has more than one bit, and for sums."""
    names = {view.name for slot, view in views.items() if not slot.endswith(ROUTERS)}
    dtypes: Any = {name: files.headers[name].dtype for name in names & files.headers.keys()}
    for name, dtype in dtypes.items():
        known = f"expected one of {', '.join(PRECISIONS)}"
        require(dtype in PRECISIONS.values(), f"tensor {name!r} has dtype {dtype}; {known}")
    dtypes = {*dtypes.values()} or {torch.float32}
    if any(view.offset or abs(frexp(view.factor)[0]) != 0.5 for view in views.values()):
        dtypes.add(torch.float32)
    return reduce(torch.promote_types, dtypes)


def _check_tensors(form: Format, model: Any, foreign: Model, files: Tensors) -> None:
    """Raises InputError for a tensor that is missing, unexpected or of another shape. Takes no memory."""
    ours, held = slots(model), {name for name, header in files.headers.items() if header.elements}
    left = {name for name in held if form.holds(name, *foreign.outside)}
    assert ours.keys() == foreign.views.keys(), sorted(ours.keys() ^ foreign.views.keys())[:4]
    for name, view in foreign.views.items():
        require(view.name in files.headers, f"it has no tensor {view.name!r}")
        shape, wanted = files.headers[view.name].shape, [*ours[name].shape]
        require(_fits(view, shape, wanted), f"tensor {view.name!r} has shape {shape}, which does not fit {wanted}")
        left.discard(view.name)
    heads = {name for name in left if name.endswith(HEAD)} if model.config.tie_word_embeddings else set()
    tied = [(name, foreign.views[EMBEDDING].name) for name in heads]
    for copy, original in (*foreign.copies, *tied):
        for name in [name for name in left if name.startswith(copy)]:
            if (of := name.replace(copy, original, 1)) in files.headers and files.equal(name, of):
                left.discard(name)
    other = f"tensor {min(heads & left, default='')!r} is not the embedding, with which config.json ties it"
    require(not heads & left, f"{other}; expected tie_word_embeddings=false there")
    require(not left, f"it has an unexpected tensor {min(left, default='')!r}")


def _present(view: View, form: Format, files: Tensors) -> View:
    """The view with the name that the checkpoint has for the tensor, or of the tensor that has the matrices of all
    experts, as Qwen3.5 was released. A model that was saved without its head has names without the first part."""
    names = [view.name] if form.renamed is None else [view.name, view.name.replace(*form.renamed, 1)]
    names += [name.partition(".")[2] for name in names]
    if name := next((name for name in names if name in files.headers), None):
        return view._replace(name=name)
    return next(filter(None, (_among_experts(view._replace(name=name), files) for name in names)), view)


def _among_experts(view: View, files: Tensors) -> View | None:
    """The view of the matrix of an expert in a tensor [experts, rows, columns], where the checkpoint has one. gate_proj
    and up_proj are the halves of the rows of one."""
    if (found := EXPERT.fullmatch(view.name)) is None:
        return None
    part, parts = {"gate_proj": (0, 2), "up_proj": (1, 2)}.get(found["matrix"], (0, 1))
    name = f"{found['experts']}.{'gate_up_proj' if parts == 2 else found['matrix']}"
    shape, e = files.headers[name].shape if name in files.headers else [], int(found["e"])
    if len(shape) != 3 or e >= shape[0] or shape[1] % parts:
        return None
    rows = shape[1]
    block = Block(1, rows, part * rows // parts, rows // parts)
    return view._replace(name=name, block=block, shape=(*shape,), item=e)


def _fits(view: View, shape: list[int], wanted: list[int]) -> bool:
    if view.item is not None:  # of a tensor that has all of its parts
        return view.shape is not None and shape == [*view.shape]
    part = shape if view.block is None or view.shape is None else [prod(shape[:2]), *shape[2:]]
    part = part[::-1] if view.transposed else part
    if view.block is not None:
        if part[:1] != [view.block.groups * view.block.each]:
            return False
        part = [view.block.groups * view.block.size, *part[1:]]
    return [n for n in part if n > 1] == [n for n in wanted if n > 1]
