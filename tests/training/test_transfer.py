"""Attention transfer: what trains, that it goes on where it was killed, and `headrace linearize`."""

import contextlib
import copy
import io
import json
import math
import re
import shlex
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import groups
import tiny
from headrace import InputError, layers, load, set_backend, zoo
from headrace.cli.linearize import LinearizeOptions, next_commands
from headrace.convert.importing import cast
from headrace.convert.linearize import linearize
from headrace.data import open_data
from headrace.data.rows import evenly_spaced
from headrace.report.linearized import bars, write_page
from headrace.spec.attention import AttentionSpec, Pattern
from headrace.spec.stack import BlockStyle, Decoder, Experts, Layer
from headrace.training import linear as linear_module
from headrace.training import transfer as module
from headrace.training.linear import Keep, checked, costs, held_out_loss, imitate, removed, state_bytes
from headrace.training.loop import Updates
from headrace.training.processes import Processes, connect
from headrace.training.transfer import Imitation, Transfer, batch_of, mean_error, transfer
from trained import peak_of

CPU = torch.device("cpu")
ALONE = Processes(CPU)
SETTINGS = Transfer(steps=6, rows=2, save_every=2, held_out=3, warmup=0.0)
HEDGEHOG = "hedgehog(decay.kind=sigmoid-head)"


@pytest.fixture(scope="module")
def teacher():
    sizes = {"num_hidden_layers": 3, "vocab_size": 257, "max_position_embeddings": 64}
    return tiny.build("gqa(kv_heads=2, bias=qkv)", **sizes).float().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, teacher):
    return tiny.saved(teacher, tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture
def words(prepared, tmp_path):
    """Of a short command, behind its model. What follows takes the place of what is here."""
    return ["--data", prepared, "--output", tmp_path / "out", "--steps", 1, "--held-out", 1, "--threads", 1]


def imitation_of(teacher, trains="new", mixer=HEDGEHOG):
    torch.manual_seed(0)
    return Imitation(teacher, linearize(teacher, mixer, [0, 2]), trains)


def made_linear(model, data, work, settings=SETTINGS, keep="0"):
    """The linear model, and the report."""
    return imitate(model, HEDGEHOG, Keep.parsed(keep), data, settings, work, ALONE, lambda *_: None, 1)


@pytest.fixture
def measured(monkeypatch):
    """The precision of each model whose loss is measured."""
    dtypes = []
    loss = lambda model, *given: dtypes.append(model.dtype) or held_out_loss(model, *given)  # noqa: E731
    monkeypatch.setattr(linear_module, "held_out_loss", loss)
    return dtypes


@torch.no_grad()
def test_the_error_is_that_of_a_layers_output(teacher):
    ids, seen = torch.randint(257, (2, 9)), {}
    imitation = imitation_of(teacher)
    for i, mixer in imitation.old.items():
        mixer.register_forward_hook(lambda m, given, out, i=i: seen.__setitem__(i, (given[0], out[0])))
    teacher.model(ids)
    for mixer in imitation.old.values():
        mixer._forward_hooks.clear()
    new = {i: imitation.layers[str(i)] for i in seen if i != 1}
    expected = [(layer(seen[i][0])[0] - seen[i][1]).norm() ** 2 / seen[i][1].norm() ** 2 for i, layer in new.items()]
    tiny.close(imitation(ids), torch.stack(expected), 1e-5)
    assert not any(mixer._forward_hooks for mixer in imitation.old.values())


@pytest.mark.parametrize("trains", ["new", "all"])
def test_what_trains(trains, teacher, data, tmp_path):
    imitation = imitation_of(teacher, trains)
    layer = imitation.layers["0"]
    before = {name: p.detach().clone() for name, p in imitation.named_parameters()}
    before |= {kind: getattr(layer.in_proj, kind).detach().clone() for kind in ("weight", "bias")}
    of_teacher = {name: p.detach().clone() for name, p in teacher.named_parameters()}
    found, _ = transfer(imitation, data, SETTINGS, tmp_path, threads=1)
    assert found["before"].keys() == found["after"].keys() == {"0", "2"}
    assert sum(found["after"].values()) < sum(found["before"].values())
    assert all(torch.equal(p, of_teacher[name]) for name, p in teacher.named_parameters())
    taken = sum(layer.parts[name] for name in "qkv")
    for kind in ("weight", "bias"):
        same = getattr(layer.in_proj, kind).eq(before[kind])
        assert same[:taken].all() == (trains == "new") and not same[taken:].all(), kind
    for name, p in imitation.named_parameters():
        same = p.eq(before[name])
        if "o_proj" in name:
            assert same.all() == (trains == "new"), name
        elif "in_proj" not in name:
            assert not same.all(), name
    computed = layer(torch.ones(1, 3, layer.hidden_size))[0]
    imitation.finish()
    assert [name for name, _ in layer.in_proj.named_parameters()] == ["weight", "bias"]
    assert all(p.requires_grad for p in imitation.parameters())
    assert torch.equal(layer(torch.ones(1, 3, layer.hidden_size))[0], computed)


@pytest.mark.parametrize("mixer", [HEDGEHOG, "lolcats(window=4)"])
def test_only_what_is_new_has_gradients_and_moments(mixer, teacher, data, tmp_path, monkeypatch):
    """Of in_proj the rows of the decay, if there is one."""
    made, imitation = [], imitation_of(teacher, "new", mixer)
    monkeypatch.setattr(module, "Updates", lambda *given: made.append(Updates(*given)) or made[-1])
    transfer(imitation, data, SETTINGS, tmp_path, threads=1)
    moments = sum(state["exp_avg"].numel() for state in made[0].optimizer.state.values())
    layer = imitation.layers["0"]
    new = layer.parts.get("decay", 0) * (layer.hidden_size + 1) + sum(p.numel() for p in layer.learned_map.parameters())
    new += sum(p.numel() for p in layer.decay.parameters()) if layer.decay else layer.window_factor.numel()
    assert moments == 2 * new


def test_a_dropped_window_leaves_the_memory_alone_in_training(teacher, data, tmp_path):
    """Not in an evaluation; in some steps, the same ones in a run that goes on."""
    told, found = {}, {}
    for share in (0.0, 0.5, 1.0):
        imitation, errors = imitation_of(teacher, mixer="lolcats(window=4)"), told.setdefault(share, [])
        settings = replace(SETTINGS, window_dropout=share)
        batch = next(module.batches(data, settings, ALONE))
        with module.silent(layer.near for layer in imitation.layers.values()), torch.no_grad():
            alone = imitation(batch["input_ids"]).mean().item()
        folder = tmp_path / str(share)
        told_to = lambda _, x, to=errors: to.append(x)  # noqa: E731
        found[share], curve = transfer(imitation, data, settings, folder, told_to, threads=1)
        assert curve == errors
        layer = imitation.layers["0"]
        assert not layer.near._forward_hooks and (layer.window_factor.std() > 0) == (share < 1)
    assert told[1.0][0] == pytest.approx(alone) and told[0.5][0] in (told[0.0][0], told[1.0][0])
    assert told[0.0][0] < 0.9 * alone and len({*map(tuple, told.values())}) == 3
    assert found[0.0]["before"] == found[0.5]["before"] == found[1.0]["before"]
    dropped = [module.drops_windows(replace(SETTINGS, window_dropout=0.3), step) for step in range(2000)]
    assert 0.25 < sum(dropped) / 2000 < 0.35


def test_a_gate_that_is_taken_over_stays(data, tmp_path):
    gated = tiny.build("gqa(gate=channel)", num_hidden_layers=1, vocab_size=257).float().eval()
    imitation = Imitation(gated, linearize(gated, HEDGEHOG))
    layer = imitation.layers["0"]
    gate, decay = layer.part("gate").clone(), layer.part("decay").clone()
    transfer(imitation, data, SETTINGS, tmp_path, threads=1)
    assert torch.equal(layer.part("gate"), gate) and not torch.equal(layer.part("decay"), decay)


def test_a_killed_transfer_goes_on_exactly(teacher, data, tmp_path, monkeypatch):
    whole = imitation_of(teacher)
    told: list[int] = []
    found = transfer(whole, data, SETTINGS, tmp_path / "whole", lambda step, error: told.append(step), threads=1)

    def killed(step, error):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer(imitation_of(teacher), data, SETTINGS, tmp_path / "killed", killed, threads=1)
    again, later = imitation_of(teacher), []
    resumed = transfer(again, data, SETTINGS, tmp_path / "killed", lambda step, error: later.append(step), threads=1)
    assert told == [1, 2, 3, 4, 5, 6] and later == [5, 6] and resumed == found
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


def test_bfloat16_rounds_no_weight_that_stays(data, tmp_path):
    """New layers imitate as well, to the rounding of activations."""
    found = {}
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        teacher = tiny.build("gqa(kv_heads=2)", num_hidden_layers=2, vocab_size=257)
        settings, before = replace(SETTINGS, precision=precision), copy.deepcopy(teacher.float()).state_dict()
        linear, report = made_linear(teacher.float(), data, tmp_path / precision, settings)
        assert {p.dtype for p in linear.parameters()} == {torch.float32}
        stays = [name for name, p in linear.named_parameters() if ".layers.1.mixer." not in name]
        assert all(torch.equal(linear.get_parameter(name), before[name]) for name in stays) and len(stays) > 5
        found[precision] = report["layers"]["1"]["after"], report["nats"]["transferred"]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.05) and found["bfloat16"] != found["float32"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_bfloat16_checkpoint_is_measured_in_one_precision_and_keeps_its_router(precision, data, tmp_path, measured):
    style = BlockStyle(experts=Experts(4, 2, biased=True))
    model = tiny.build(Decoder((Layer(AttentionSpec(), "experts"),), style), num_hidden_layers=2, vocab_size=257)
    model.bfloat16()
    mixture = model.model.backbone.layers[0].mlp
    mixture.router.float().weight.data.normal_()
    mixture.choice_bias = torch.randn(4)
    before = mixture.router.weight.clone(), mixture.choice_bias
    linear, _ = made_linear(model, data, tmp_path, replace(SETTINGS, precision=precision))
    assert measured == [linear.dtype] * 3 == [getattr(torch, precision)] * 3
    assert all(torch.equal(p, p.bfloat16()) for p in linear.model.backbone.layers[1].mixer.parameters()), "rounded"
    found = cast(linear, torch.bfloat16).model.backbone.layers[0].mlp
    assert torch.equal(found.router.weight, before[0]) and torch.equal(found.choice_bias, before[1])
    assert linear.dtype == found.up.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_float64_checkpoint_is_not_rounded(precision, data, tmp_path):
    model = tiny.build("gqa(kv_heads=2)", num_hidden_layers=2, vocab_size=257).double()
    for p in model.parameters():
        p.data /= 3  # float32 has no such number
    before = {name: x.clone() for name, x in model.state_dict().items() if ".layers.1.mixer." not in name}
    linear, _ = made_linear(model, data, tmp_path, replace(SETTINGS, steps=1, precision=precision))
    after = linear.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert {p.dtype for p in linear.parameters()} == {torch.float64}


def test_a_layer_is_removed_in_the_precision_of_the_settings(teacher, words, tmp_path, succeeds, measured):
    """Of a checkpoint whose own the saved model has."""
    succeeds("linearize", tiny.saved(copy.deepcopy(teacher).bfloat16(), tmp_path / "model"), *words)
    assert len(measured) == 7 and {*measured} == {torch.float32} and load(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("text", "kept"),
    [("1", [1]), ("0,2", [0, 2]), ("every=2", [0, 2]), ("every=3", [0]), ("none", []), ("worst=1", None)],
)
def test_which_layers_stay(text, kept, teacher, data, tmp_path):
    linear, report = made_linear(teacher, data, tmp_path / "work", keep=text)
    if kept is None:
        assert len(report["layers"]) == 3
        kept = [int(max(report["layers"], key=lambda i: report["layers"][i]["after"]))]
    assert report["kept"] == kept
    types = ["full_attention" if i in kept else "linear_attention" for i in range(3)]
    assert linear.config.layer_types == types
    assert all(p.requires_grad for p in linear.parameters()) and not linear.training
    x = torch.randint(257, (1, 7))
    linear.save_pretrained(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model")(x).logits, linear(x).logits)


def test_what_a_layer_is_worth_is_the_loss_without_it(teacher, data):
    """Its output projection is 0 there."""
    rows = replace(SETTINGS, held_out=2)
    linear = linearize(teacher, HEDGEHOG, [0, 2])
    found = removed(teacher, linear, [0, 2], data, rows)
    assert list(found) == ["0", "2"]
    for name, model in {"original": teacher, "linear": linear}.items():
        for i in (0, 2):
            without = copy.deepcopy(model)
            for p in without.model.backbone.layers[i].mixer.o_proj.parameters():
                p.data.zero_()
            lost = held_out_loss(without, data, rows) - held_out_loss(model, data, rows)
            assert found[str(i)][name] == pytest.approx(lost, abs=1e-6)
        assert not any(block.mixer._forward_hooks for block in model.model.backbone.layers)


def test_what_a_window_and_its_memory_are_worth(teacher, data):
    """Without the memory the layer is a sliding window, and without the window little is left but old tokens."""
    rows, width = replace(SETTINGS, held_out=2), 5
    linear = linearize(teacher, f"lolcats(window={width})", [0, 2])
    sliding = copy.deepcopy(teacher)
    for i in (0, 2):
        layer = sliding.model.backbone.layers[i].mixer
        spec = replace(layer.spec, pattern=Pattern(width))
        built = layers.build(spec, hidden_size=layer.hidden_size, num_heads=layer.H, rope_theta=layer.rope_theta)
        built.load_state_dict(layer.state_dict())
        sliding.model.backbone.layers[i].mixer = built
    found = removed(teacher, linear, [0, 2], data, rows)
    assert list(found) == ["0", "2", "all"]
    whole = held_out_loss(linear, data, rows)
    assert found["all"]["memory"] == pytest.approx(held_out_loss(sliding, data, rows) - whole, abs=1e-6)
    assert found["0"].keys() == {"original", "linear", "window", "memory"} and found["all"]["window"] != 0


def test_a_linear_layers_state_does_not_grow(teacher):
    """Of three layers of attention, with 2 heads of keys and values of 8 numbers, one stays: 128 bytes a token."""
    linear = linearize(teacher, HEDGEHOG, [0, 2])
    assert state_bytes(teacher.config, 2000) == 3 * 2000 * 2 * 2 * (16 // 2) * 4
    grown = [state_bytes(linear.config, n) for n in (1000, 2000)]
    assert grown[1] - grown[0] == 1000 * 2 * 2 * (16 // 2) * 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("every=0", "--keep=every=0; expected layers such as 4,12,20"), ("best=2", "--keep=best=2"),
        ("7", "--keep names layer 7, which is no attention layer; expected some of 0, 1, 2"),
        ("every=1", "--keep leaves none of the 3 attention layers"), ("worst=3", "--keep leaves none"),
        *((f"{text}{'9' * 5000}", "; expected layers such as 4,12,20") for text in ("1,", "every=", "worst=")),
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_cannot_stay_is_named(text, sentence):
    with pytest.raises(InputError, match=sentence) as refused:
        Keep.parsed(text).changed([0, 1, 2])
    assert len(str(refused.value)) < 200


def test_windows_beside_parallel_mixers_may_be_dropped(data):
    layer = Layer(AttentionSpec(), parallel=zoo.get("gla"))
    config = tiny.config(Decoder((layer,)), num_hidden_layers=2, vocab_size=257)
    settings = replace(SETTINGS, window_dropout=0.5)
    assert checked(config, "lolcats(window=4)", Keep.parsed("0"), data, settings) == [1]


@pytest.mark.parametrize(("part", "value"), [("o_proj", 0.0), ("v_proj", float("nan"))])
def test_a_layer_without_a_relative_error_is_named(part, value, teacher, data, tmp_path):
    """As one that was added to a model: no learning rate mends that."""
    model = copy.deepcopy(teacher)
    model.model.backbone.layers[2].mixer.get_submodule(part).requires_grad_(False).weight.fill_(value)
    with pytest.raises(InputError, match="layer 2 gives 0, or numbers that are not finite; expected it among --keep"):
        transfer(imitation_of(model), data, SETTINGS, tmp_path, threads=1)


def test_data_of_a_larger_vocabulary_are_refused(teacher, data):
    larger = replace(data, manifest=data.manifest | {"vocab_size": 1000})
    sentence = f"--data has a vocabulary of 1000; expected at most {teacher.config.vocab_size}, that of the model"
    with pytest.raises(InputError, match=sentence):
        checked(teacher.config, HEDGEHOG, Keep(), larger, Transfer())


SCORES = """task,metric,higher_is_better,model,rows,score,standard_error,baseline
lambada_openai,acc,1,old,1024,0.51299,0.0123,0.0
lambada_openai,acc,1,out,1024,,,0.0
lambada_openai,perplexity,0,old,1024,23.4,0.5,1000
lambada_openai,perplexity,0,out,1024,30.0,,1000
"""


def test_command_and_those_that_its_page_names(folder, prepared, words, tmp_path, succeeds, refusal):
    """The model is trained as a whole, then on rows of four times the length, with and without the teacher."""
    data, out = tmp_path / "data", tmp_path / "out"
    data.symlink_to(prepared)
    words = ["linearize", folder, *words, "--data", data, "--steps", 2, "--held-out", 2]
    result = succeeds(*words)
    assert "step 2 of 2: error" in result.out
    report, page = json.loads((out / "linearize.json").read_text()), (out / "report.html").read_text("utf-8")
    assert report["kept"] == [0, 2] and set(report["layers"]) == {"1"}
    for what, nats in report["nats"].items():
        assert f"{what} {nats:.3f}" in result.out and f"{math.exp(nats):.4g}" in page
    assert f"{report['layers']['1']['after']:.3f}" in result.out
    for number in (f"{report['nats']['transferred']:.3f}", f"{report['removed']['1']['linear']:+.3f}"):
        assert number in page
    found = report["decoding"]["tokens_per_second"]
    assert found.keys() == report["state_bytes"].keys() and found
    for tokens, sizes in report["state_bytes"].items():
        shown = [x[name] for x in ({n: s / 1e6 for n, s in sizes.items()}, found[tokens]) for name in sizes]
        cells = "".join(rf"<td[^>]*>{number:,.1f}</td>\s*" for number in shown)
        assert re.search(rf"<td[^>]*>{int(tokens):,}</td>\s*{cells}", page), tokens
    assert all(engine in page for engine in report["decoding"]["engine"].values())
    worst = report["layers"] | {"2": report["layers"]["1"]}  # as --keep worst=1 leaves it: trained, and attention again
    assert "1 attention layer of" in write_page(report | {"layers": worst}, tmp_path).read_text("utf-8")
    succeeds("generate", out, "--prompt", "2 times", "--max-new-tokens", 3)
    assert "exists" in refusal(*words)
    named = report["next"]
    assert all(line in page for line in named.values())
    whole, control, evaluate, beside, prepare, longer = ([*shlex.split(line)[1:]] for line in named.values())
    assert evaluate[:3] == ["eval", str(folder), str(out)] and evaluate[-1] == beside[-1]
    succeeds(*evaluate, "--help")
    Path(evaluate[-1]).mkdir()
    Path(evaluate[-1], "scores.csv").write_text(SCORES)
    prepare[prepare.index("TEXT")] = prepared.parent / "texts.jsonl"
    alone = [word for word in longer if not word.startswith(("teacher=", "weights="))]
    alone[alone.index("--output") + 1 :] = [tmp_path / "alone", f"weights={out}"]
    quiet = "--trackers", "none"
    trainings = [[*line, *quiet] for line in (whole, control, longer, alone)]
    for line in (*trainings[:2], beside, beside[:-4], [*prepare, "--held-out", 0.05], *trainings[2:]):
        succeeds(*line)
    assert open_data(tmp_path / "data-128").manifest["length"] == 128
    page, added = (out / "report.html").read_text("utf-8"), json.loads((out / "linearize.json").read_text())
    made = "commands", "environments"
    assert {name: added[name] for name in report if name not in made} == {
        name: x for name, x in report.items() if name not in made
    }
    assert set(added["beside"]) == {*evaluate[3:5]} and [len(report[name]) for name in made] == [1, 1]
    assert len(added["commands"]) == 3 and len(added["environments"]) == 1 and "--steps 2" in added["commands"][0]
    assert added["environments"][0] | {"device": "cpu", "threads_per_arm": 1} == added["environments"][0]
    batches = [batch_of([row], CPU) for row in evenly_spaced(open_data(data).held_out, 2)]
    lengths = [x["labels"].shape[1] - 1 for x in batches]
    for name, nats in added["beside"].items():
        losses = [load(name)(**x).loss.item() for x in batches]
        assert nats == pytest.approx(statistics.fmean(losses, lengths), rel=1e-5)
        assert f"{nats:.3f}" in page and added["nats"]["transferred"] != nats != added["nats"]["original"]
    for score in ("51.3% ± 1.2%", "not finite", "23.4 ± 0.5", "1024"):
        assert f"{score}</td>" in page
    assert "Not in the picture, as it is not finite: out on lambada_openai acc." in page
    said = refusal("linearize", folder, "--data", tmp_path / "data-128", *beside[4:])
    assert "data-128" in said and "is not that of" in said
    kinds = load(out).config.layer_types
    assert kinds.count("linear_attention") == 1
    for run, longest in {"out-whole": 64, "out-128": 128, "alone": 128}.items():
        model = load(tmp_path / run / "model")
        assert model.config.layer_types == kinds and model.config.max_position_embeddings == longest
        assert not torch.equal(model.lm_head.weight, load(out).lm_head.weight)


def test_a_score_that_is_not_finite_has_no_bar():
    drawn = bars({"old": [0.5, 0.0], "new": [None, 0.4]}, ["a", "b"], "accuracy", "task").axes[0].patches
    assert [bar.get_height() for bar in drawn] == pytest.approx([0.5, 0.0, math.nan, 0.4], nan_ok=True)


def test_the_loss_of_a_model_that_diverged_is_kept(folder, prepared, words, tmp_path, succeeds):
    """It is null in linearize.json, and the next command reads it as the number that it was."""
    succeeds("linearize", folder, *words)
    diverged = load(folder)
    diverged.lm_head.requires_grad_(False).weight.fill_(math.nan)
    tiny.saved(diverged, tmp_path / "diverged")
    for other in (tmp_path / "diverged", folder):
        told = succeeds("linearize", folder, "--data", prepared, "--output", tmp_path / "out", "--beside", other).out
        assert "diverged nan" in told
    report = json.loads((tmp_path / "out" / "linearize.json").read_text(), parse_constant=pytest.fail)
    assert report["beside"][str(tmp_path / "diverged")] is None and list(report["not_finite"].values()) == ["nan"]


def test_rows_of_the_commands_end_where_learned_positions_do():
    one = LinearizeOptions(Path("old"), Path("new"), Path("data"))
    for style, longest in (({"positions": "learned"}, 100), (None, 4 * 32)):
        config = tiny.config("transformer(rotary=false)", style=style, max_position_embeddings=100)
        *_, prepare, train = (shlex.split(line) for line in next_commands(one, 32, config).values())
        assert prepare[prepare.index("--length") + 1] == str(longest) and f"batch_tokens={longest}" in train


def test_the_page_shows_the_parts_of_a_window(folder, words, tmp_path, succeeds):
    succeeds("linearize", folder, *words, "--steps", 2, "--mixer", "lolcats(window=8)", "--keep", "none")
    report = json.loads((tmp_path / "out" / "linearize.json").read_text())
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert list(report["removed"]) == ["0", "1", "2", "all"]
    for number in (*report["removed"]["1"].values(), *report["removed"]["all"].values()):
        assert f"{number:+.3f}" in page
    again = load(tmp_path / "out").model.backbone.layers[0].mixer
    assert again.spec.window == 8 and again.spec.kv_heads == 2
    assert not again.window_factor.eq(again.window_factor[0]).all()


def test_a_command_that_was_killed_before_a_checkpoint_holds_nothing(folder, words, run_command, succeeds):
    with patch.object(module.Updates, "step", side_effect=KeyboardInterrupt):
        assert run_command("linearize", folder, *words).code == 130
    succeeds("linearize", folder, *words, "--lr", 1e-3)


def test_a_killed_command_goes_on(folder, prepared, words, tmp_path, run_command, succeeds, refusal, monkeypatch):
    words, step = [*words, "--steps", 51], module.Updates.step

    def killed(updates):
        if updates.schedule.last_epoch == 50:
            raise KeyboardInterrupt
        return step(updates)

    with monkeypatch.context() as patch:
        patch.setattr(module.Updates, "step", killed)
        result = run_command("linearize", folder, *words)
        assert result.code == 130 and "out was not created; the same command goes on" in result.err
    for option, sentence in {
        ("--lr", 1e-3): "lr is 0.01 there and 0.001 here", ("--steps", 52): "steps is 51 there and 52 here",
    }.items():  # fmt: skip
        assert f"holds another run ({sentence})" in refusal("linearize", folder, *words, *option)
    for part in ("model.backbone.layers.1.mixer.o_proj", "lm_head", "config"):
        changed = load(folder)
        if part == "config":
            changed.config.norm_eps *= 2
        else:
            changed.get_submodule(part).weight.data += 1
        said = refusal("linearize", tiny.saved(changed, tmp_path / part), *words)
        assert "holds another run (model is" in said
    manifest = json.loads((prepared / "manifest.json").read_text("utf-8"))
    shutil.copytree(prepared, tmp_path / "data")
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest | {"seed": 5}), "utf-8")
    said = refusal("linearize", folder, *words, "--data", tmp_path / "data")
    assert "holds another run (seed is 0 there and 5 here)" in said
    steps = []
    monkeypatch.setattr(module.Updates, "step", lambda updates: steps.append(step(updates)))
    succeeds("linearize", folder, *words)
    assert len(steps) == 1 and not list(tmp_path.glob(".out*parts"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--mixer", "mamba"], "--mixer='mamba' is no linear mixer"), (["--mixer", "glaa"], "glaa"),
        (["--keep", "some"], "--keep=some; expected layers"), (["--keep", "9"], "--keep names layer 9"),
        (["--rows", "100000"], "--rows 100000, and the data have"), (["--trains", "some"], "trains='some'"),
        (["--lr", "0"], "lr=0"), (["--seed", "-1"], "Transfer.seed=-1; expected 0 to 4294967295"),
        (["--steps", "0"], "--steps=0; expected at least 1"),
        (["--mixer", "mesa"], "mixer='mesa' adds steps to linear attention"),
        (["--window-dropout", "0.5"], f"--window-dropout=0.5 with --mixer='{HEDGEHOG}', which has"),
        (["--window-dropout", "2"], "window_dropout=2.0; expected 0 to 1, a share"),
        (["--machine", "1xH101"], "unknown device; expected one of"),
    ],
)  # fmt: skip
def test_bad_options_are_one_sentence(wrong, sentence, folder, words, tmp_path, refusal):
    said = refusal("linearize", folder, *words, *wrong)
    assert sentence in said and len(said.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_latent_attention_is_named(words, tmp_path, refusal):
    said = refusal("linearize", tiny.saved(tiny.build("mla", vocab_size=257), tmp_path / "model"), *words)
    assert "no attention layer that could become linear: its k and v are" in said


def test_layers_without_weights_of_their_own_are_refused(folder, words, refusal):
    said = refusal("linearize", folder, *words, "--mixer", "taylor-softmax")
    assert "--trains new, and the new layers have no weights that the old do not" in said


def test_models_beside_need_a_report(folder, prepared, tmp_path, refusal):
    words = ["linearize", folder, "--data", prepared, "--output", tmp_path / "out"]
    assert "linearize.json" in refusal(*words, "--beside", folder) and not (tmp_path / "out").exists()
    said = refusal(*words, "--beside", folder, "--machine", "1xH100")
    assert "--machine has no effect with --beside" in said
    assert f"--scores {str(folder)!r} has no scores.csv" in refusal(*words, "--scores", folder)
    assert "nothing" in refusal(*words, "--beside", tmp_path / "nothing")


def imitated(folder, prepared, output, steps, rows, mixer):
    """What a process prints, and the report."""
    from headrace.cli.linearize import linearize as command

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        given = {"steps": steps, "rows": rows, "held_out": 2, "threads": 1, "mixer": mixer}
        given["window_dropout"] = 0.5 * mixer.startswith("lolcats")
        report = command(checkpoint=folder, data=prepared, output=output, keep="none", **given)
    return said.getvalue(), json.loads(json.dumps(report))


def test_processes_share_the_rows(teacher, prepared, tmp_path):
    """In float64, where the order of a sum is no more than 1e-9 of an error after a few steps."""
    folder = tiny.saved(copy.deepcopy(teacher).double(), tmp_path / "model")
    given = folder, prepared
    _, alone = imitated(*given, tmp_path / "alone", 4, 2, "lolcats(window=4)")
    given = *given, tmp_path / "both", 4, 2, "lolcats(window=4)"
    (said, report), (nothing, same) = groups.run(2, tmp_path, imitated, *given)
    assert "step 4 of 4: error" in said and "is a model of headrace" in said and not nothing
    assert len(report["curve"]) == 4 and report["curve"] == pytest.approx(alone["curve"], rel=1e-9)
    for part in ("nats", "layers"):
        for name, found in report[part].items():
            assert same[part][name] == found == pytest.approx(alone[part][name], rel=1e-9)
    ours, theirs = (load(tmp_path / name).state_dict() for name in ("both", "alone"))
    assert max(float((theirs[name] - x).abs().max()) for name, x in ours.items()) < 1e-9
    assert json.loads((tmp_path / "both" / "linearize.json").read_text()) == report


def killed_and_resumed(folder, prepared, work):
    """The errors of the steps before and after."""
    data, told = open_data(prepared), []
    work.mkdir(exist_ok=True)
    for killed in (True, False):
        torch.manual_seed(0)
        model, processes = load(folder), connect()
        imitation = Imitation(model, linearize(model, HEDGEHOG, [0, 2]), processes=processes)
        drops = lambda settings, step, killed=killed: killed and step == 5 and 1 / 0  # noqa: E731
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ZeroDivisionError):
            patch.setattr(module, "drops_windows", drops)
            _, curve = transfer(imitation, data, SETTINGS, work, lambda step, error: told.append(step), threads=1)
    return told, curve, imitation.state_dict()


def test_processes_go_on_from_a_checkpoint(teacher, prepared, tmp_path):
    folder = tiny.saved(copy.deepcopy(teacher).double(), tmp_path / "model")
    given = folder, prepared, tmp_path / "work"
    (told, curve, weights), (none, same, others) = groups.run(2, tmp_path, killed_and_resumed, *given)
    assert told == [1, 2, 3, 4, 5, 6] and not none and curve == same and len(curve) == 6
    assert all(torch.equal(x, others[name]) for name, x in weights.items())
    model = load(folder)
    torch.manual_seed(0)
    alone = Imitation(model, linearize(model, HEDGEHOG, [0, 2]))
    _, expected = transfer(alone, open_data(prepared), SETTINGS, tmp_path / "alone", threads=1)
    assert curve == pytest.approx(expected, rel=1e-9)


def uneven(folder, prepared, output):
    try:
        imitated(folder, prepared, output, 1, 3, HEDGEHOG)
    except InputError as error:
        return str(error)


def test_rows_that_processes_cannot_share_are_refused(folder, prepared, tmp_path):
    said = groups.run(2, tmp_path, uneven, folder, prepared, tmp_path / "out")
    assert said == ["--rows=3 with 2 processes; expected a multiple of 2"] * 2 and not (tmp_path / "out").exists()


def test_data_of_another_tokenizer_are_refused(folder, words, tmp_path, refusal):
    from headrace.data import Preparation, prepare

    (tmp_path / "text.txt").write_text("one two three four " * 400)
    prepare(Preparation((str(tmp_path / "text.txt"),), bpe=300, length=32, held_out=0.1), tmp_path / "data")
    said = refusal("linearize", folder, *words, "--data", tmp_path / "data")
    assert f"has another tokenizer than {str(folder)!r}" in said


@pytest.mark.parametrize(
    ("precision", "width", "tokens", "most"), [("float32", 64, 256, 1.05), ("bfloat16", 256, 8, 1.09)]
)
def test_estimated_memory_is_the_peak_of_a_step(precision, width, tokens, most):
    """Of all that PyTorch allocates, with the activations of one layer. The weights of the old model have no copies in
    bfloat16, which would be a twentieth of the peak there."""
    teacher = tiny.build("gqa(kv_heads=2)", num_hidden_layers=6, vocab_size=257, hidden_size=width).float()
    settings, changed = Transfer(rows=4, steps=1, precision=precision), [0, 1, 2, 4, 5]
    imitation = Imitation(teacher, linearize(teacher, HEDGEHOG, changed))
    set_backend(imitation, "torch")
    updates = Updates(imitation, settings, mean_error, ALONE, precision)
    ids = torch.randint(257, (4, tokens))

    def step():
        updates.backward([{"input_ids": ids, "labels": ids}])
        updates.step()

    step()
    peak = peak_of(step, [teacher, imitation], updates.optimizer)
    found = costs(teacher.config, HEDGEHOG, changed, settings, tokens)
    assert 0.85 < peak / sum(found["bytes"].values()) < most
    P, N = teacher.num_parameters(), sum(p.numel() for p in imitation.parameters())
    assert found["flops"] == 4 * tokens * (2 * P + 6 * N)


def test_experts_that_are_not_chosen_compute_nothing():
    style = BlockStyle(experts=Experts(4, 1))
    model = tiny.build(Decoder((Layer(AttentionSpec(), "experts"),), style), num_hidden_layers=2, vocab_size=257)
    found = costs(model.config, HEDGEHOG, [1], Transfer(rows=3, steps=2), 8)
    P = sum(p.numel() * (1 if p.dim() < 3 else 1 / 4) for p in model.parameters())
    N = sum(p.numel() for p in linearize(model, HEDGEHOG, [1]).model.backbone.layers[1].mixer.parameters())
    assert found["flops"] == 2 * 3 * 8 * (2 * P + 6 * N)


def test_a_model_of_the_hub_is_fetched_with_its_tokenizer(folder, words, succeeds, monkeypatch):
    monkeypatch.setattr("headrace.convert.checkpoint.snapshot_download", lambda name, **patterns: folder)
    succeeds("linearize", "someone/model", *words, "--machine", "1xH100")


def test_command_says_what_a_machine_needs(folder, words, tmp_path, succeeds):
    said = succeeds("linearize", folder, *words, "--machine", "1xH100").out
    assert "fits" in said and " s on one H100" in said and not list(tmp_path.iterdir())
