"""`headrace generate --save-state` and `--resume`."""

import json

import pytest
import torch

import tiny
from groups import command
from headrace import HeadraceForCausalLM, load
from headrace.data.tokenizer import byte_level

GREEDY = ("--temperature", 0, "--json")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return tiny.saved(tiny.build("hybrid", vocab_size=257).float(), tmp_path_factory.mktemp("models") / "hybrid")


@pytest.fixture
def generated(succeeds):
    """The new tokens of `headrace generate`, greedy."""

    def run(folder, count, *options):
        return json.loads(succeeds("generate", folder, "--max-new-tokens", count, *GREEDY, *options).out)["tokens"]

    return run


@pytest.mark.parametrize("penalty", ["1", "1.5"])
@pytest.mark.parametrize("checkpoint", ["saved_model", "hybrid"])
def test_tokens_are_those_of_one_run(generated, checkpoint, penalty, tmp_path, request):
    """Also with a penalty on all tokens so far, and where the file of the state is replaced."""
    folder, state = request.getfixturevalue(checkpoint), tmp_path / "state"
    options = ("--repetition-penalty", penalty)
    begun = generated(folder, 8, "--prompt", "It was", "--save-state", state, *options)
    again = generated(folder, 8, "--resume", state, "--save-state", state, *options)
    ended = generated(folder, 8, "--resume", state, *options)
    assert begun + again + ended == generated(folder, 24, "--prompt", "It was", *options)


def test_tokens_of_another_process_are_those_of_one_run(generated, saved_model, tmp_path):
    begun = generated(saved_model, 20, "--prompt", "It was", "--save-state", tmp_path / "state")
    words = ["generate", saved_model, "--resume", tmp_path / "state", "--max-new-tokens", 20, *GREEDY]
    process = command(tmp_path, *map(str, words))
    process.join()
    assert not process.exitcode, (tmp_path / "err").read_text()
    resumed = json.loads((tmp_path / "out").read_text())["tokens"]
    assert begun + resumed == generated(saved_model, 40, "--prompt", "It was")


def test_further_prompt_follows_the_tokens(generated, hybrid, tmp_path):
    tokenizer = byte_level()
    begun = generated(hybrid, 6, "--prompt", "It was", "--save-state", tmp_path / "state")
    resumed = generated(hybrid, 6, "--resume", tmp_path / "state", "--prompt", " and")
    ids = torch.tensor([[*tokenizer("It was").input_ids, *begun, *tokenizer(" and").input_ids]])
    whole = load(hybrid).generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert resumed == whole[0, ids.shape[1] :].tolist()


def test_state_after_proposed_tokens_is_that_after_single_ones(generated, saved_model, tmp_path):
    prompt = ("--prompt", "It was it was it was", "--prompt-lookup", 3)
    begun = generated(saved_model, 8, *prompt, "--save-state", tmp_path / "state")
    resumed = generated(saved_model, 8, "--resume", tmp_path / "state")
    assert begun + resumed == generated(saved_model, 16, *prompt[:2])


def test_text_so_far_is_printed(run_command, saved_model, tmp_path):
    options = ("--max-new-tokens", 5, "--temperature", 0)
    first = run_command("generate", saved_model, "--prompt", "It was", "--save-state", tmp_path / "state", *options).out
    second = run_command("generate", saved_model, "--resume", tmp_path / "state", "--prompt", "!", *options).out
    assert second.startswith(first.rstrip("\n") + "!")


def test_refusals(run_command, generated, saved_model, hybrid, tmp_path, monkeypatch):
    state = tmp_path / "state"
    generated(saved_model, 2, "--prompt", "It was", "--save-state", state)
    content = state.read_bytes()

    def refused(*words):
        code, out, error = run_command("generate", *words)
        assert code == 2 and not out and error.splitlines()[-1].startswith("headrace: ")
        assert state.read_bytes() == content
        return error

    assert "exists; expected the name of a new file" in refused(saved_model, "--prompt", "a", "--save-state", state)
    assert "is of another model: its digest is" in refused(hybrid, "--resume", state)
    assert "cannot be read: " in refused(saved_model, "--resume", tmp_path / "missing")
    both = ("--resume", state, "--prompt-lookup", 3)
    assert "--prompt-lookup has no effect with --resume" in refused(saved_model, *both)
    monkeypatch.setattr(HeadraceForCausalLM, "generate", lambda *_, **__: pytest.fail("the file is refused before"))
    refused(saved_model, "--resume", saved_model / "model.safetensors", "--save-state", state)
    refused(saved_model, "--resume", saved_model / "model.safetensors")
