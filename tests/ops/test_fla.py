"""Which calls the backend "fla" takes, asked on a GPU that is not there; interpreted/test_fla.py runs them."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("fla", reason="fla-core is not installed")

import triton

import dry
from headrace import InputError, backends
from headrace.extra.fla import op


def chosen_backend(dtype=torch.bfloat16, grad=False, **more):
    """The backend that computes a call with a decay per token."""
    q, k, v = torch.zeros(3, 1, 4, 2, 32, dtype=dtype, requires_grad=grad).unbind()
    return backends(q, k, v, log_decay=torch.zeros(1, 4, 2), backend="fla", **more)


def test_fla_on_a_cpu_says_what_it_needs():
    assert backends()["fla"]["linear_attention"] == "it runs on a GPU, and PyTorch finds none"
    with pytest.raises(InputError, match="backend='fla' cannot run here: it runs on a GPU, and PyTorch finds none"):
        chosen_backend()


@pytest.mark.parametrize("gpu", dry.GPUS)
def test_fla_takes_bfloat16(gpu, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    with dry.gpu(gpu):
        assert chosen_backend() == chosen_backend(grad=True) == chosen_backend(rule="delta") == "fla"


@pytest.mark.parametrize("version", ["3.6.0", "3.7.0"])
def test_gradients_that_triton_miscompiles_are_refused(version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    with dry.gpu("sm_90"):
        with pytest.raises(InputError, match=f"Triton {version} miscompiles its gradients for this GPU"):
            chosen_backend(grad=True)
        assert chosen_backend() == "fla"  # the forward is right
        with torch.no_grad():
            assert chosen_backend(grad=True) == "fla"
    with dry.gpu("sm_80"):
        assert chosen_backend(grad=True) == "fla"


def test_float32_needs_permission_for_tf32(monkeypatch):
    with dry.gpu("sm_80"):
        with pytest.raises(InputError, match="it rounds float32 to TF32 in products"):
            chosen_backend(torch.float32)
        monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
        assert chosen_backend(torch.float32) == "fla"
        monkeypatch.delenv("TRITON_F32_DEFAULT")
        torch.set_float32_matmul_precision("high")
        try:
            assert chosen_backend(torch.float32) == "fla"
        finally:
            torch.set_float32_matmul_precision("highest")


def test_torch_compile_uses_another_backend(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with dry.gpu("sm_80"), pytest.raises(InputError, match=r"torch\.compile cannot trace its kernels"):
        chosen_backend()


@pytest.mark.parametrize(
    ("installed", "reason"),
    [("0.6.3", None), ("0.7.0", "fla-core is 0.7.0; expected 0.6"), ("0.5.1", "fla-core is 0.5.1; expected 0.6")],
)
def test_fla_version_is_checked(installed, reason, monkeypatch):
    monkeypatch.setattr(op, "version", lambda name: installed)
    assert op._not_installed() == reason


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(op.util, "find_spec", lambda name: None if name == "einops" else object())
    assert op._not_installed() == 'it needs the extra [gpu]: pip install "headrace[gpu]"'


def test_the_kernels_that_fla_takes_are_named(monkeypatch):
    assert "flash-qla" not in op.BACKEND.about()
    monkeypatch.setattr(op.util, "find_spec", lambda name: object())
    monkeypatch.setattr(op, "version", {"fla-core": "0.6.0", "flash-qla": "0.1.3"}.get)
    assert op.BACKEND.about() == f"fla-core 0.6.0, Triton {triton.__version__}, flash-qla 0.1.3"
