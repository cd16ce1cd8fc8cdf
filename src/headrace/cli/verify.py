"""Verify: verify, backends."""

import json
from dataclasses import dataclass

import typer
from rich.table import Table
from rich.text import Text

from .. import zoo
from .console import interruptible, refuse_idle, telling, terminal, track
from .options import Device, argument, setting, takes


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `headrace verify`."""

    targets: list[str] | None = setting(
        "Layers or models of other libraries: transformers:mamba2, transformers:Qwen3_5GatedDeltaNet, "
        "fla:GatedLinearAttention, or a file and its function that returns an adapter, layer.py:adapter.",
        shown="the mixers of headrace",
        kind=argument,
        show_default=False,
    )
    mixers: str | None = setting(
        "Mixers, separated by commas: names or expressions (see `headrace zoo`), or linear_attention, the "
        "op by itself at the sizes of large models.",
        shown="all mixers, on a GPU also the op",
    )
    device: Device = None
    dtype: str | None = setting("Data type: float64, float32 or bfloat16.", shown="float64; of a target, float32")
    backend: str | None = setting("Backends to check, separated by commas.", shown="all that run here")
    laws: str | None = setting("Laws to check of a target, separated by commas.", shown="all")
    seed: int = setting("Seed of a target's parameters and inputs.", 0)
    as_json: bool = setting("Print the verdicts on a target, versions and machine as JSON.", False, "--json")

    def __post_init__(self) -> None:
        if self.targets:
            refuse_idle("with a target", mixers=self.mixers, backend=self.backend)
        else:
            refuse_idle("without a target", laws=self.laws, seed=self.seed or None, json=self.as_json)


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Check every form and backend of mixers against the recurrence, or check a layer or model of another library.

    Prints the relative error and the tolerance of each check. Exit code 1 if a check fails. On a GPU, FLA first
    compiles and tunes its kernels for every shape, which takes long: --backend triton,torch leaves them out.

    A target is checked against itself: packed or padded rows, pieces, decoding, copied states, gradients, and more.
    For each law that it breaks, prints a program with the smallest failing input, which runs without headrace."""
    raise typer.Exit(int(_verify_targets(options) if options.targets else _verify_mixers(options)))


def _verify_mixers(options: VerifyOptions) -> bool:
    """Prints the checks of our own mixers, and returns whether one failed."""
    from ..files.devices import on_device
    from ..files.environment import device_name
    from ..verification.errors import dtype_of
    from ..verification.verify import OP, available, device_failed, subjects, verify

    dtype = options.dtype or "float64"
    precision, device = dtype_of(dtype), on_device(options.device, float64=dtype == "float64")
    names = subjects(device) if options.mixers is None else zoo.several(options.mixers)
    for name in names:
        if name != OP:
            zoo.mixer(name)  # raises for an unknown name before the first check
    chosen = available(options.backend)
    console, rows = terminal(), []
    with interruptible("the checks so far are printed above"), telling(console) as tell:
        for name in track(names, "mixer", tell):
            checked = verify([name], device, precision, backends=chosen)
            shown = Table("law", "relative error", "tolerance", "", title=name, title_justify="left")
            for row in checked:
                mark = Text("holds") if row.holds else Text("BROKEN", "red")
                shown.add_row(row.law, f"{row.error:.1e}", f"{row.tolerance:.0e}", mark)
            console.print(shown)
            rows += checked
            if device_failed(device, checked):
                console.print(f"{device} computes nothing any more after this error; the other checks are left out")
                break
    broken = [row for row in rows if not row.holds]
    precisions = "" if [*names] == [OP] else f" in {dtype}"  # the op has its own
    console.print(f"{len(rows) - len(broken)} of {len(rows)} laws hold on {device}{precisions}")
    for row in broken:
        if row.note:
            console.print(f"{row.mixer}, {row.law}: {row.note}", soft_wrap=True, highlight=False)
    if broken:
        print(f"{device}: {device_name(device)}")
        backends()
    return bool(broken)


def _verify_targets(options: VerifyOptions) -> bool:
    """Prints the verdicts on layers and models of others, and returns whether one broke a law or raised."""
    from ..files.devices import on_device
    from ..files.quiet import quiet
    from ..verification import foreign
    from ..verification.errors import dtype_of

    dtype, seed = options.dtype or "float32", options.seed
    precision, device = dtype_of(dtype), on_device(options.device, float64=dtype == "float64")
    laws = None if options.laws is None else [law.strip() for law in options.laws.split(",")]
    console, records, failed = terminal(), [], False
    with quiet():
        for target in [foreign.target(name) for name in options.targets or ()]:
            verdicts = list(foreign.verify(target.adapter, laws, device, precision, seed))
            failed |= any(v.verdict in ("breaks", "raises") for v in verdicts)
            if options.as_json:
                records.append(foreign.as_json(target, verdicts, seed, device, precision))
                continue
            shown = Table(*foreign.HEADER, title=target.name, title_justify="left")
            for row in foreign.table(verdicts):
                shown.add_row(*row)
            console.print(shown)
            for verdict in (v for v in verdicts if v.verdict == "breaks"):
                program = foreign.snippet(target, verdict, seed, device, precision)
                console.print(program, soft_wrap=True, highlight=False)
            holding = sum(v.verdict == "holds" for v in verdicts)
            console.print(f"{target.name}: {holding} of {len(verdicts)} laws hold on {device} in {dtype}")
    if options.as_json:
        print(json.dumps(records, indent=2, allow_nan=False))
    return failed


def backends() -> None:
    """List the backends and what each computes, and why the others are unavailable on this machine."""
    from ..ops.backends.base import OPERATIONS
    from ..ops.dispatch import BACKENDS, default_backend, has

    for name, backend in BACKENDS.items():
        reason, computes = backend.missing(), ", ".join(o for o in OPERATIONS if has(name, o))
        print(f"{name}: {f'not here: {reason}' if reason else f'available ({backend.about()}): {computes}'}")
    if (chosen := default_backend()) != "auto":
        print(f"HEADRACE_BACKEND={chosen}: layers use this backend")
