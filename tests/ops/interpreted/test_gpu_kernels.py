"""The program that times block sizes, rehearsed: launches in the order in which they need each other."""

import triton

import gpu_kernels
from headrace.ops.backends.triton import launch


def test_other_sizes_are_measured_beside_those_in_use(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "T", 20)
    monkeypatch.setattr(gpu_kernels, "B", 1)
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **_: (call(), 2.0)[1])
    monkeypatch.setitem(gpu_kernels.SHAPES, "small", gpu_kernels.Shape(1, 1, 32, 32, 3, True))
    grids, run = [], launch.Launcher.carry
    monkeypatch.setattr(
        launch.Launcher, "carry", lambda self, *x, **y: (grids.append(self.blocks("scan")), run(self, *x, **y))
    )
    rows = list(gpu_kernels.measure("small", "scan", ["BV=16"], device="cpu"))
    assert [(row["sizes"], row["launch"]) for row in rows] == [
        (sizes, one) for sizes in ("", "BV=16") for one in ("scan", "states", "reverse_scan")
    ]
    assert all(row["ms"] == 2 and float(row["difference"]) < 1e-2 for row in rows)
    assert {sizes["BV"] for sizes in grids} == {32, 16}
