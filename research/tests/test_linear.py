"""The study of gates in linearized layers: the table of its differences, by rows whose differences are known."""

import pytest
import torch

from benchmarks.record import read, write
from headrace import zoo
from headrace.hf import HeadraceConfig, HeadraceForCausalLM
from research import linear


def row(arm, seed, loss):
    return {"arm": arm, "seed": str(seed), "nats_trained": str(loss), "nats_replaced": "9"}


def test_differences_are_paired_by_seed():
    noise = (0.01, -0.02, 0.015)
    levels = {"unchanged": 2.0, "none": 3.0, "softmax": 2.5, "sigmoid": 2.5}
    rows = [row(arm, i, level + i + noise[i] * (arm == "softmax")) for i in range(3) for arm, level in levels.items()]
    found = {one.name: one for one in linear.differences(rows, linear.FORMS[0])}
    assert found["softmax − none"].mean.value == pytest.approx(-0.5 + sum(noise) / 3)
    assert found["softmax − none"].verdict == "lower" and found["softmax − sigmoid"].verdict == "not told apart"
    assert {one.where for one in found.values()} == {"nats trained"}
    assert "| none | trained | 3 |  | 4.000 |" in "\n".join(linear.means(rows))


def test_a_kept_table_has_the_columns_of_all_arms(tmp_path):
    made = {"environment": {"commit": "c", "processor": "p", "torch": "t"}}
    rows = [{**made, "arm": "unchanged", "nats_trained": 2.0}, {**made, "arm": "none", "error_after": 0.5}]
    write(tmp_path / "kept.csv", rows)
    assert read(tmp_path / "kept.csv")[1]["error_after"] == "0.5"


@torch.no_grad()
def test_the_published_form_differs_from_the_softmax_in_the_size_of_its_gates_alone():
    logits = {}
    for form in ("default", "paper", "paper,competition.scale=identity"):
        mixer = zoo.mixer(linear.BASE.format(f",competition={form}"))
        model = HeadraceForCausalLM(HeadraceConfig(vocab_size=50, hidden_size=64, num_heads=4, mixer=mixer))
        for name, parameter in model.double().named_parameters():
            torch.manual_seed(len(name))
            parameter.normal_(0, 0.3)
        logits[form] = model(torch.arange(40)[None]).logits
    default, published, scaled = logits.values()
    assert (scaled - default).abs().max() < 1e-12 < (published - default).abs().max()


@pytest.mark.parametrize(("names", "told"), [(16, 16), (1, 1)])
def test_prompts_ask_what_they_told(names, told):
    def tokenizer(text):
        return {"input_ids": list(text.encode())}

    for ids, length in linear.prompts(tokenizer, 3, names, [33] * 3000):
        text = bytes(ids.tolist()).decode()
        asked, answer = text[text.rindex(" The code of ") :].split(" is "), text[-length:].strip()
        assert f"{asked[0].strip()} is {answer}." in text and text.count("The code of") == told + 1
