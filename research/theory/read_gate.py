"""What a norm of each head leaves of the published read gate (arXiv 2602.01744, equations 11, 13 and 16)."""

import math
import warnings
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor, nn

from headrace.layers.blocks.stack import initialize
from headrace.layers.linear.competition import HeadCompetition
from headrace.layers.linear.mixer import LinearMixer
from headrace.utils.errors import GateWarning
from headrace.zoo import get

from .base import BLUE, GREEN, RED, TOLERANCE, Check, check_equal, format_values, normal, plot_lines, subplots

MODELS = {"RetNet": "retnet", "GLA": "gla", "Gated DeltaNet": "gated-deltanet"}
D, H, T = 128, 4, 64
STD = 0.64 / D**0.5  # of the initial weights: 0.02 at the paper's width of 1024
SCORES = 0.2, 2.0  # standard deviations of the scores: the largest of four gates is then 0.3 and 0.7 on average
FORMS = {
    "published": ("one", "query"),
    "default": ("identity", "after_norm"),
}  # scale of the gates, place of the read gate
TINY, DEFAULT = 1e-30, 1e-6  # ε: one as good as 0 in float64, and that of the norms here and in FLA


class Layer:
    """An initialized layer of the published form, without output gate and projection, and an input for it."""

    def __init__(self, name: str, generator: Generator):
        """The scores of its gates have the standard deviation 1."""
        self.weights: dict[str, Tensor] = {}
        self.name, self.x = f"paper-softmax-{name}", normal(generator, 1, T, D)
        self.versions: dict[str, LinearMixer] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            layer = self.version().apply(lambda module: initialize(module, std=STD))
            self.weights = layer.state_dict() | score_weights(layer, self.x)
        self.versions.clear()

    def sharpened(self, scores: float) -> Self:
        """The same layer, whose scores have the standard deviation `scores`."""
        other = copy(self)
        other.weights = {x: w * scores if "competition" in x else w for x, w in self.weights.items()}
        other.versions = {}
        return other

    def version(self, changes: str = "", epsilon: float = DEFAULT) -> LinearMixer:
        """The layer with fields of its spec changed, and with those of the weights that it still has."""
        if changes not in self.versions:
            spec = get(f"{self.name}(read.gate=none{changes})")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GateWarning)  # of what this experiment measures
                layer = LinearMixer(spec, hidden_size=D, num_heads=H).double()
            layer.o_proj = nn.Identity()  # type: ignore[assignment]
            if self.weights:
                layer.load_state_dict({name: self.weights[name] for name in layer.state_dict()})
            self.versions[changes] = layer
        self.versions[changes].norm_eps = epsilon
        return self.versions[changes]

    def heads(self, changes: str = "", epsilon: float = DEFAULT) -> Tensor:
        """The output of each head [rows, T, H, V]."""
        return self.version(changes, epsilon)(self.x)[0].unflatten(-1, (H, -1))

    def read_gate(self) -> Tensor:
        """G^Q [rows, T, H, 1]."""
        layer, gates = self.version(), list[Tensor]()
        assert isinstance(layer.read_competition, HeadCompetition)
        with layer.read_competition.register_forward_hook(lambda module, args, out: gates.append(out.exp())):
            layer(self.x)
        return gates[0][..., None]

    def gate_gradients(self, epsilon: float) -> tuple[Tensor, Tensor]:
        """The gradients of a linear function of the output to the weights of the read and of the write gate."""
        with torch.enable_grad():
            layer = self.version(epsilon=epsilon)
            out = layer(self.x)[0]
            gates = [getattr(layer, f"{kind}_competition").weight for kind in ("read", "write")]
            read, write = torch.autograd.grad((out * out.detach().roll(1, 1)).sum(), gates)
        return read, write


def score_weights(layer: LinearMixer, x: Tensor) -> dict[str, Tensor]:
    """Random weights of both gates with which the scores have the standard deviation 1."""
    weights = {}
    for name in ("read_competition", "write_competition"):
        gate, inputs = getattr(layer, name), list[tuple[Tensor, ...]]()
        nn.init.normal_(gate.weight)
        with gate.register_forward_pre_hook(lambda module, args, inputs=inputs: inputs.append(args)):
            layer(x)
        weights[f"{name}.weight"] = gate.weight / gate.scores(*inputs[0][:2]).std()
    return weights


def rms_norm(x: Tensor, epsilon: Tensor | float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def change(changed: Tensor, output: Tensor) -> float:
    return float((changed - output).norm() / output.norm())


@dataclass
class ReadGate:
    """The published read gate under a norm of each head: multiplying q by a gate G is the same as dividing the norm's ε
    by G². As ε tends to 0, the read gate changes nothing."""

    epsilons: Tensor  # ε [n]
    effects: dict[tuple[float, str, str], Tensor]  # (SCORES, form, model) -> change of the output by the read gate [n]
    vanishing: dict[tuple[str, str], float]  # (form, model) -> the same at ε = 1e-30, for the larger of SCORES
    write: dict[str, float]  # model -> change of the output by the write gate, for the larger of SCORES
    gradients: dict[str, float]  # model -> gradient of the read gate's weights over that of the write gate's, ε = 1e-30
    laws: list[Check]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        epsilons = torch.logspace(-11, -1, 11, dtype=torch.float64)
        measured = cls(epsilons, {}, {}, {}, {}, [])
        for model, name in MODELS.items():
            layer = Layer(name, generator)
            for scores in SCORES:
                sharpened = layer.sharpened(scores)
                for form in FORMS:
                    effects = [read_gate_effect(sharpened, form, float(epsilon)) for epsilon in epsilons]
                    measured.effects[scores, form, model] = torch.tensor(effects)
            measured.add_laws(model, sharpened)
        return measured

    def add_laws(self, model: str, layer: Layer) -> None:
        self.vanishing |= {(form, model): read_gate_effect(layer, form, TINY) for form in FORMS}
        self.write[model] = change(layer.heads(", competition.read=none"), layer.heads(", competition=none"))
        read, write = layer.gate_gradients(TINY)
        self.gradients[model] = float(read.norm() / write.norm())
        readouts = layer.heads(", competition.read=none, read.norm=none")
        predicted = rms_norm(readouts, DEFAULT / layer.read_gate().square())
        self.laws.append(check_equal(f"{model}: gate on q = norm with ε / G²", layer.heads(), predicted))

    def checks(self) -> list[Check]:
        checks = list(self.laws)
        for model in MODELS:
            on_q, after = (self.vanishing[form, model] for form in FORMS)
            checks += [
                Check(f"{model}, ε → 0: change by the published read gate", on_q, "≤", TOLERANCE),
                Check(f"{model}, ε → 0: gradient to it, over the write gate's", self.gradients[model], "≤", TOLERANCE),
                Check(f"{model}, ε → 0: change by the gate after the norm", after, "≥", 0.1),
                Check(f"{model}: change by the write gate", self.write[model], "≥", 0.1),
                self.check_default(model),
            ]
        return checks

    def check_default(self, model: str) -> Check:
        """At the usual ε: the change by the gate on q over that by the gate after the norm, at its largest over SCORES;
        for Gated DeltaNet, whose readouts are as small as ε, at its smallest."""
        ratios = [on_q / after for on_q, after in (self.at_default(scores, model) for scores in SCORES)]
        claim = f"{model}, ε = {DEFAULT:g}: change by the gate on q, over that after the norm"
        small = model == "Gated DeltaNet"
        return Check(claim, min(ratios), "≥", 0.5) if small else Check(claim, max(ratios), "≤", 0.5)

    def at_default(self, scores: float, model: str) -> list[float]:
        """The change by the read gate at the usual ε, of each form."""
        here = int((self.epsilons.log10() - math.log10(DEFAULT)).abs().argmin())
        return [float(self.effects[scores, form, model][here]) for form in FORMS]

    def summary(self) -> str:
        parts = []
        for scores in SCORES:
            changes = {model: self.at_default(scores, model) for model in MODELS}
            on_q, after = ({model: pair[i] for model, pair in changes.items()} for i in (0, 1))
            parts.append(
                f"with scores of standard deviation {scores:g} by {format_values(on_q, '.1%')}, and after the norm by "
                f"{format_values(after, '.0%')}"
            )
        vanishing = max(self.vanishing["published", model] for model in MODELS)
        return (
            f"At ε = {DEFAULT:g} the published read gate changes the output {'; '.join(parts)}. At ε = {TINY:g} it "
            f"changes the output by {vanishing:.0e}. The write gate changes it by {format_values(self.write, '.0%')}."
        )

    def figure(self) -> Figure:
        figure, axes = subplots(2)
        for ax, scores in zip(axes, SCORES, strict=True):
            lines = {f"{model}, on q as published": self.effects[scores, "published", model] for model in MODELS}
            lines["GLA, after the norm"] = self.effects[scores, "default", "GLA"]
            plot_lines(
                ax, self.epsilons, lines, (BLUE, RED, GREEN, "#333"), title=f"scores of standard deviation {scores:g}",
                xlabel="ε of the norm", ylabel="relative change of the output by the read gate",
                ylim=(1e-7, 1e3), xscale="log", yscale="log", legend="upper left",
            )  # fmt: skip
            ax.axvline(DEFAULT, color="#888", lw=1, ls="--")
        return figure


def read_gate_effect(layer: Layer, form: str, epsilon: float) -> float:
    """The relative change of the heads by the read gate of a form of competition."""
    scale, place = FORMS[form]
    gated, ungated = (
        layer.heads(f", competition.scale={scale}, competition.read={read}", epsilon) for read in (place, "none")
    )
    return change(gated, ungated)
