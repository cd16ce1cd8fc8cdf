"""What the machine code of a compiled Triton kernel says: registers, stack, shared memory, matrix instructions."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATRIX = "HMMA", "HGMMA", "UTCHMMA", "v_mfma"
TENSOR_MEMORY = {"UTCHMMA"}  # the size of its product is in memory, not in the instruction
SPILLS = "LDL", "STL", "scratch_load", "scratch_store"
MMA = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "1684": 16 * 8 * 4}  # multiply-adds of HMMA.x of one warp
BRANCH = re.compile("BRA|s_branch|s_cbranch")


class Syntax(NamedTuple):
    """Regular expressions of a line of machine code."""

    label: str
    instruction: str  # its groups: the name and the operands


SASS = Syntax(
    r"\s*(\.L_x_\d+|\.text\.[\w$.]+):",
    r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;",
)
GCN = Syntax(r"(\.L\w+):", r"\s+([a-z]\w+)\s*(.*)")


class Loop(NamedTuple):
    """One iteration of a loop."""

    instructions: int
    macs: int | None  # multiply-adds of matrix instructions of all warps; None: not to be seen in the code
    spills: int  # loads from and stores to the stack


class Code(NamedTuple):
    """The machine code of a kernel."""

    registers: int  # vector registers per thread
    stack: int  # bytes per thread
    shared: int  # bytes per block
    instructions: int
    matrix: int  # number of matrix instructions
    macs: int | None  # their multiply-adds for all warps of a block, each loop counted once
    loops: tuple[Loop, ...]  # innermost or not, in the order of their ends


def read(kernel) -> Code:
    """Reads a `triton.compiler.CompiledKernel`."""
    if "cubin" in kernel.asm:
        return _nvidia(kernel.asm["cubin"], kernel.metadata)
    return _amd(kernel.asm["amdgcn"], kernel.metadata)


def _nvidia(cubin: bytes, metadata) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # -ndf: no analysis of the dataflow, which takes a third of the time and changes no line
        usage, text = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", "-ndf", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return _code(_blocks(text, SASS), int(found[1]), int(found[2]), metadata)


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True, check=True).stdout


def _amd(text: str, metadata) -> Code:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, name
        return int(found[1])

    blocks = _blocks(text, GCN)
    return _code(blocks, number("vgpr_count"), number("private_segment_fixed_size"), metadata)


Block = tuple[str, list[tuple[str, str]]]  # (label, [(instruction, operands)])


def _blocks(text: str, syntax: Syntax) -> list[Block]:
    """The basic blocks in the order of their addresses."""
    blocks: list[Block] = [("", [])]
    for line in text.splitlines():
        if label := re.match(syntax.label, line):
            blocks.append((label[1], []))
        elif instruction := re.match(syntax.instruction, line):
            blocks[-1][1].append((instruction[1], instruction[2]))
    return [block for block in blocks if block[1]]


def _code(blocks: list[Block], registers: int, stack: int, metadata) -> Code:
    whole = _loop(blocks, metadata.num_warps)
    matrix = sum(_is_matrix(name) for _, instructions in blocks for name, _ in instructions)
    loops = tuple(_loops(blocks, metadata.num_warps))
    return Code(registers, stack, metadata.shared, whole.instructions, matrix, whole.macs, loops)


def _loops(blocks: list[Block], warps: int) -> Iterator[Loop]:
    """The code from the target of each backward branch to the branch."""
    at = {label: i for i, (label, _) in enumerate(blocks)}
    for i, (_, instructions) in enumerate(blocks):
        for name, operands in instructions:
            target = re.search(r"\.L\w+", operands) if BRANCH.match(name) else None
            start = at.get(target[0], i + 1) if target else i + 1
            # A kernel for NVIDIA ends with a branch to itself.
            if start < i or (start == i and not BRANCH.match(instructions[0][0])):
                yield _loop(blocks[start : i + 1], warps)


def _loop(blocks: list[Block], warps: int) -> Loop:
    names = [name for _, instructions in blocks for name, _ in instructions]
    kinds = [name.split(".")[0] for name in names]
    counted = None if TENSOR_MEMORY & set(kinds) else sum(_macs(name, warps) for name in names)
    return Loop(len(names), counted, sum(kind.startswith(SPILLS) for kind in kinds))


def _is_matrix(name: str) -> bool:
    return name.startswith(MATRIX)


def _macs(name: str, warps: int) -> int:
    """Multiply-adds of one instruction, which every warp executes, or every four warps together (HGMMA)."""
    if not _is_matrix(name):
        return 0
    if size := re.search(r"(\d+)x(\d+)x(\d+)", name):
        macs = int(size[1]) * int(size[2]) * int(size[3]) * warps
        return macs // 4 if name.startswith("HGMMA") else macs
    return MMA[name.split(".")[1]] * warps
