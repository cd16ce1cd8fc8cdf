"""The study of gates in linearized layers: the table of its differences, by rows whose differences are known."""

import pytest

from research import linear


def row(arm, seed, loss):
    return {"arm": arm, "seed": str(seed), "nats_trained": str(loss), "nats_replaced": "9"}


def test_differences_are_paired_by_seed():
    noise = (0.01, -0.02, 0.015)
    levels = {"unchanged": 2.0, "none": 3.0, "softmax": 2.5, "sigmoid": 2.5}
    rows = [row(arm, i, level + i + noise[i] * (arm == "softmax")) for i in range(3) for arm, level in levels.items()]
    lines = linear.differences(rows)
    cells = {cells[1]: cells for line in lines[2:] if (cells := [cell.strip() for cell in line.split("|")])}
    assert cells["softmax − none"][3] == f"{-0.5 + sum(noise) / 3:+.3f}".replace("-", "−")
    assert cells["softmax − none"][-2] == "lower" and cells["softmax − sigmoid"][-2] == "not told apart"
    assert not any("replaced" in line for line in lines)
    means = linear.means(rows)
    assert any(line.startswith("| none | 3 | 4.000") for line in means), means


@pytest.mark.parametrize(("names", "told"), [(16, 16), (1, 1)])
def test_prompts_ask_what_they_told(names, told):
    def tokenizer(text):
        return {"input_ids": list(text.encode())}

    for ids, length in linear.prompts(tokenizer, 3, names, [33] * 3000):
        text = bytes(ids.tolist()).decode()
        asked, answer = text[text.rindex(" The code of ") :].split(" is "), text[-length:].strip()
        assert f"{asked[0].strip()} is {answer}." in text and text.count("The code of") == told + 1
