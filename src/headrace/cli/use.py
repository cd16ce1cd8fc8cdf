"""Use: generate, serve, convert, export, retrofit."""

import json
import math
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..files.hub import GGUF
from ..files.processes import new_folder
from ..utils.errors import InputError, require
from .console import interruptible, needing, read_prompt, refuse_idle
from .options import Checkpoint, Device, NewFolder, PromptFile, Threads, Weights, argument, setting, takes

SEEDS = 2**32  # one of them is drawn where none is given
# Files that `convert` and `export` copy unchanged: the generation settings, and the tokenizer in any of its formats.
SETTINGS = "generation_config.json"
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "tiktoken.model", "tekken.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", SETTINGS,
)  # fmt: skip


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `headrace generate`."""

    checkpoint: Checkpoint
    prompt: str | None = setting("Text to continue.", shown="--file or standard input")
    file: PromptFile = None
    max_new_tokens: int = setting("Maximum number of new tokens.", 100, least=1)
    temperature: float = setting("Sampling temperature. 0 takes the most likely token.", 0.8)
    top_p: float = setting("Nucleus sampling: probability mass of the most likely tokens to sample from.", 1.0)
    top_k: int = setting("Number of most likely tokens to sample from. 0 takes all.", 0, least=0)
    repetition_penalty: float | None = setting(
        "Factor that makes earlier tokens less likely. 1 changes nothing.", shown="the checkpoint's, as in `serve`"
    )
    seed: int | None = setting("Random seed of the sampling.", shown="a new one, printed", least=0, most=SEEDS - 1)
    device: Device = None
    weights: Weights = None
    resume: Path | None = setting(
        "File of --save-state, of the same model, to continue from. --prompt or --file is read after it."
    )
    save_state: Path | None = setting(
        "File to write the state to after the last token. An existing file is refused, unless --resume names it."
    )
    cuda_graph: bool = setting("Fail if no CUDA graph can compute the tokens on a GPU.", False, "--cuda-graph")
    draft: Path | None = setting(
        "Checkpoint of a smaller model with the same vocabulary, which proposes tokens. The model reads several "
        "of them at once; the distribution of the text is that of the model alone."
    )
    prompt_lookup: int | None = setting(
        "Number of tokens to propose without a draft model: those that followed an earlier occurrence of the "
        "last two tokens, or of the last one.",
        least=1,
    )
    threads: Threads = None
    as_json: bool = setting(
        "JSON output of the new text, its tokens, speed, engine and seed, instead of streamed text.", False, "--json"
    )

    def __post_init__(self) -> None:
        proposing = {"draft": self.draft, "prompt_lookup": self.prompt_lookup}
        penalty = self.repetition_penalty
        if self.cuda_graph:
            refuse_idle("with --cuda-graph", **proposing)
        if self.prompt_lookup is not None:
            refuse_idle("with --prompt-lookup", draft=self.draft)
        if self.resume is not None:
            refuse_idle("with --resume", **proposing)
        for name, holds, expected in (
            ("temperature", self.temperature == 0 or 0.01 <= self.temperature < math.inf, "0, or at least 0.01"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("repetition_penalty", penalty is None or 0.01 <= penalty <= 100, "0.01 to 100"),
        ):
            require(holds, f"--{name.replace('_', '-')}={getattr(self, name)}; expected {expected}")
        if not self.temperature:
            idle = {"top_p": self.top_p != 1, "top_k": self.top_k != 0, "seed": self.seed is not None}
            refuse_idle("at --temperature 0, which takes the likeliest token", **idle)

    @property
    def decoding(self) -> dict[str, Any]:
        """How tokens are chosen and computed, as arguments of transformers' generate."""
        names = ("temperature", "top_p", "top_k") if self.temperature else ()
        given = {name: getattr(self, name) for name in ("max_new_tokens", "repetition_penalty", *names)}
        chosen = {name: value for name, value in given.items() if value is not None}
        graph = {"cache_implementation": "static"} if self.cuda_graph else {}
        lookup = {} if self.prompt_lookup is None else {"prompt_lookup_num_tokens": self.prompt_lookup}
        return chosen | {"do_sample": self.temperature > 0} | graph | lookup


@takes(GenerateOptions)
def generate(options: GenerateOptions) -> dict[str, Any]:
    """Continue a --prompt or the state of --resume, and print the new text as it is generated.

    The last line, on standard error, has the speed, the engine that computed single tokens, and the seed. With --draft
    or --prompt-lookup it also has the share of proposed tokens that were accepted, and the tokens of each pass of the
    model. The same command with this --seed prints the same text."""
    one = options
    text = "" if one.resume and one.prompt is None and one.file is None else read_prompt(one.prompt, one.file)
    seed = secrets.randbelow(SEEDS) if one.temperature and one.seed is None else one.seed
    from ..report.numbers import count
    from .generate import generate as run

    echo = one.file is None and (one.prompt is not None or one.resume is not None)  # not a text that may be long
    files = one.draft, one.resume, one.save_state
    how = {"threads": one.threads, "weights": one.weights} | one.decoding
    result = run(one.checkpoint, text, seed, not one.as_json, one.device, *files, echo, **how)
    if one.as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        speed = f"{len(result['tokens'])} tokens, {result['tokens_per_second']:.1f} tokens per second"
        speed += f", by {result['engine']} with {count(result['threads'], 'thread')}"
        if "accepted" in result:
            speed += f", {result['accepted']:.0%} of the proposed tokens accepted"
            speed += f", {result['tokens_per_pass']:.1f} tokens a pass"
        print(speed if seed is None else f"{speed}, seed {seed}", file=sys.stderr)
    return result


@dataclass(frozen=True)
class ServeOptions:
    """The options of `headrace serve`."""

    checkpoint: Checkpoint
    host: str = setting("Host name or address to listen on.", "127.0.0.1")
    port: int = setting("Port to listen on. 0 takes a free port.", 8000)
    max_prompt_tokens: int = setting("Maximum tokens of a prompt. Longer prompts are refused.", 32768, least=1)
    max_tokens: int = setting("Maximum tokens of an answer. Requests for more are refused.", 4096, least=1)
    max_requests: int = setting(
        "Maximum number of open requests, where each choice for each prompt counts as one. Further ones are refused.",
        256, least=1,
    )  # fmt: skip
    prefix_cache: str = setting(
        "Memory for the states of prompts, which later prompts with the same beginning reuse, such as 256MB or "
        "2GB. 0: none.",
        "256MB",
    )
    device: Device = None
    weights: Weights = None
    threads: Threads = None
    name: str | None = setting("Name of the model in requests.", shown="the path of the checkpoint")
    allow_host: list[str] | None = setting(
        "Name of this machine that requests may have in their Host header, beside localhost, --host and any "
        "address. Can be repeated."
    )
    api_key: str | None = setting(
        "Secret that requests must have in the header Authorization: Bearer KEY. Other users of the machine "
        "can see the option, but not the environment variable.",
        envvar="HEADRACE_API_KEY",
    )
    no_api_key: bool = setting("Serve without a key on an address that others can reach.", False, "--no-api-key")

    def __post_init__(self) -> None:
        if self.no_api_key and self.api_key is not None:
            raise InputError("--no-api-key beside a key, of --api-key or HEADRACE_API_KEY; expected one of them")


@takes(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model over the OpenAI API: completions, and chat if the tokenizer has a template.

    Requests are generated together, and long prompts are processed in pieces between their tokens. GET /metrics shows
    counts and latencies in the format of Prometheus. On an address that others can reach, --api-key or --no-api-key is
    required. The server has no encryption: expose it to a network only behind a proxy that provides it."""
    from ..serving import Access, Limits
    from ..serving import serve as run

    one, kept = options, _bytes("--prefix-cache", options.prefix_cache)
    within = Limits(one.max_prompt_tokens, one.max_tokens, one.max_requests, kept)
    access = Access(tuple(one.allow_host or ()), one.api_key, one.no_api_key)
    more = {"name": one.name, "threads": one.threads, "weights": one.weights}
    with interruptible("the server has ended"):
        run(one.checkpoint, one.host, one.port, within, one.device, access=access, **more)


def _bytes(option: str, size: str) -> int:
    """Returns the number of bytes of a size such as 256MB."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)(kB|MB|GB)|0", size)
    if match is None:
        raise InputError(f"{option}={size!r}; expected a number of kB, MB or GB, such as 256MB, or 0")
    return int(float(match[1] or 0) * {"kB": 10**3, "MB": 10**6, "GB": 10**9, None: 0}[match[2]])


@contextmanager
def new_checkpoint(output: Path) -> Iterator[Path]:
    """Yields a folder that becomes `output` at the end of the block, and nothing if it is interrupted before."""
    with interruptible(f"{output} was not created"), new_folder(output) as folder:
        yield folder


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `headrace convert`."""

    checkpoint: Annotated[str, argument("Folder of a checkpoint, its name on the Hugging Face Hub, or a GGUF file.")]
    output: NewFolder
    to: str | None = setting(
        "Target format: a model_type of transformers or flash-linear-attention, such as qwen3_next or gla. An unknown "
        "one is refused with the list of all.",
        shown="the format of headrace",
    )
    dtype: str | None = setting(
        "Precision of the converted model: float64, float32, bfloat16 or float16. The default rounds no tensor, and is "
        "that of the most precise one.",
        shown="that of the checkpoint",
    )
    ignore: list[str] | None = setting(
        "Field of the foreign config.json to ignore: one that is refused although it has no effect. Can be repeated."
    )


@takes(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Convert a checkpoint from or to transformers and flash-linear-attention, or from a GGUF file.

    Without --to, converts a foreign checkpoint or a GGUF file to headrace; with --to, converts a checkpoint of
    headrace."""
    from ..convert.checkpoint import fetched, load
    from ..convert.exporting import check_format, export_checkpoint, set_use_cache
    from ..convert.form import PRECISIONS
    from ..convert.importing import import_checkpoint, import_gguf

    one, to = options, options.to
    if to is not None:
        check_format(to)
        refuse_idle("without a conversion to headrace, without --to", dtype=one.dtype, ignore=one.ignore or None)
    elif Path(one.checkpoint).suffix == GGUF:
        refuse_idle("with a GGUF file, which has no config.json", ignore=one.ignore or None)
    require(one.dtype in (None, *PRECISIONS), f"--dtype {one.dtype!r}; expected one of {', '.join(PRECISIONS)}")
    with new_checkpoint(one.output) as folder:
        source, precision, cached = fetched(one.checkpoint), PRECISIONS[one.dtype] if one.dtype else None, True
        if to is None and source.suffix == GGUF:
            import_gguf(source, precision)[0].save_pretrained(folder)
        elif to is None:
            import_checkpoint(source, precision, one.ignore or ()).save_pretrained(folder)
        else:
            model: Any = load(source)
            cached = export_checkpoint(model, to, folder)
            if source.suffix == GGUF:  # which has no file of them to copy
                model.generation_config.save_pretrained(folder)
        _copy_tokenizer(source, folder, _copy(source, folder))
        set_use_cache(folder, to, cached)
    print(f"{one.output} is {one.checkpoint} in the format of {to or 'headrace'}")
    if not cached:
        print(f"use_cache is false: transformers has no cache for {to} without softmax attention")


@dataclass(frozen=True)
class ExportOptions:
    """The options of `headrace export`."""

    checkpoint: Checkpoint
    output: NewFolder
    to: str = setting(
        "Format: onnx (ONNX Runtime), web (the same with a page for a browser), or gguf (llama.cpp).", ...
    )
    weights: str | None = setting("Precision of the weights: float32, or int8.", shown="float32")
    opset: int | None = setting(
        "Version of ONNX: 23, or 27, whose LinearAttention runtimes do not enable yet.", shown="23"
    )
    libraries: str | None = setting(
        "Where the page of --to web finds onnxruntime-web and @huggingface/tokenizers: an address, or a folder "
        "node_modules to copy them from.",
        shown="https://cdn.jsdelivr.net/npm",
    )


@takes(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write a checkpoint for another runtime."""
    from ..convert.checkpoint import fetched
    from ..export import FORMATS, writer

    to, own = options.to, {name: getattr(options, name) for name in ("weights", "opset", "libraries")}
    given = {name: value for name, value in own.items() if value is not None}
    with new_checkpoint(options.output) as folder, needing(FORMATS.get(to, "models"), f"export --to {to}"):
        source = fetched(options.checkpoint)
        first = f"headrace convert {source} --output FOLDER"
        require(source.suffix != GGUF, f"{str(source)!r} is a GGUF file; convert it first: {first}")
        sentence = writer(to, given)(source, folder)
        _copy(source, folder)
    print(f"{options.output}: {sentence}")


def _copy(checkpoint: Path, folder: Path) -> set[str]:
    """Copies the files that are there, and returns their names."""
    names = {name for name in COPIED if (checkpoint / name).is_file()}
    for name in names:
        shutil.copy(checkpoint / name, folder / name)
    return names


def _copy_tokenizer(checkpoint: Path, folder: Path, files: set[str]) -> None:
    """Writes the tokenizer as transformers reads it beside the config.json of the checkpoint: its class, which splits a
    text and has special tokens, depends on model_type. files: names of those that are copied."""
    from ..convert.checkpoint import read_tokenizer

    try:
        read_tokenizer(checkpoint).save_pretrained(folder)
    except InputError as reason:
        if files - {SETTINGS}:
            print(f"Note: the files of the tokenizer are copied as they are: {reason}", file=sys.stderr)


def retrofit(checkpoint: Checkpoint, output: NewFolder) -> None:
    """Add head competition to a trained model.

    The gates are initialized so that the new model computes the same outputs; further training can change them."""
    from ..convert.checkpoint import read_tokenizer
    from ..convert.retrofit import retrofit as run

    with new_checkpoint(output) as folder:
        for part in (run(checkpoint), read_tokenizer(checkpoint)):
            part.save_pretrained(folder)
    print(f"{output} computes the same outputs as {checkpoint}; its gates can be trained")
