"""Joins the shards of a preparation, which several machines may have made."""

import shutil
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..files.provenance import difference
from ..utils.errors import InputError
from ..utils.integrity import RECORDED, damage, misfit, read_json
from . import parts
from .preparation import assembled, write_folder

# the form of a shard's manifest
SHARD = {"shard": [int], "length": int, "seconds": float, "parts": {...: parts.PART_RECORD}, "files": RECORDED}
# what the shards of one preparation share in their manifests
DECIDES = (
    "sources", "tokenizer_sha256", "length", "held_out_share", "seed", "column", "tokens_wanted", "sample", "versions",
)  # fmt: skip


def join(shards: list[Path], output: Path) -> dict[str, Any]:
    """Makes one folder of those that `prepare` wrote for all shards of a plan, and returns the manifest.

    InputError if a folder is no shard, is damaged or belongs to another plan, or a shard is missing or given twice."""
    return write_folder(output, partial(_joined, shards))


def _joined(shards: list[Path], folder: Path) -> dict[str, Any]:
    manifests = {shard: _shard(shard) for shard in shards}
    first = manifests[shards[0]]
    _check_shards(manifests, first)
    records = {int(n): record for manifest in manifests.values() for n, record in manifest["parts"].items()}
    where = {int(n): shard / "parts" for shard, manifest in manifests.items() for n in manifest["parts"]}
    used = list(takewhile(records.__contains__, range(len(records))))  # shards that stopped at --tokens may stop apart
    shutil.copytree(shards[0] / "tokenizer", folder / "tokenizer")
    counts = assembled({n: records[n] for n in used}, where, first["length"], folder)
    seconds = sum(manifest["seconds"] for manifest in manifests.values())
    size = sum(counts[split]["bytes"] for split in parts.SPLITS)
    speed = {"seconds": round(seconds, 1), "megabytes_per_second": round(size / 1e6 / max(seconds, 0.1), 2)}
    own = ("shard", "block", "parts", "files")
    return {name: value for name, value in first.items() if name not in own} | counts | speed


def _shard(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    manifest = read_json(path, {}) if path.exists() else {}
    if "parts" not in manifest:
        raise InputError(f"{str(folder)!r} is no folder that `headrace prepare --shard` wrote")
    if wrong := misfit(manifest, SHARD):
        raise InputError(f"{str(path)!r} is damaged: {wrong}; prepare it again")
    if wrong := damage(folder, manifest["files"]):
        raise InputError(f"shard {str(folder)!r} is damaged: {wrong}; prepare it again")
    return manifest


def _check_shards(manifests: dict[Path, dict[str, Any]], first: dict[str, Any]) -> None:
    count, seen = first["shard"][1], dict[int, Path]()
    for folder, manifest in manifests.items():
        for name in (*DECIDES, "block"):
            if changed := difference(manifest.get(name), first.get(name), name):
                field, own, expected = changed
                raise InputError(
                    f"shard {str(folder)!r} belongs to another preparation: {field} is {own} there and {expected} "
                    "in the first"
                )
        number, of = manifest["shard"]
        if of != count:
            raise InputError(f"shard {str(folder)!r} is {number}/{of}; expected one of {count}, as the first")
        if number in seen:
            raise InputError(f"shards {str(seen[number])!r} and {str(folder)!r} are both {number}/{of}")
        seen[number] = folder
    if missing := sorted({*range(1, count + 1)} - seen.keys()):
        raise InputError(f"shard {', '.join(f'{n}/{count}' for n in missing)} is missing; expected all {count}")
