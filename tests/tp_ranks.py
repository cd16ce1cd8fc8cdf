"""What each process of a group computes in test_tensor_parallel.py, and how far it is from one process."""

import copy
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from groups import refused
from headrace import GateWarning, layers, load, quantize, tensor_parallel
from headrace.layers.blocks.moe import MixtureOfExperts
from headrace.layers.tensor_parallel import clip_grad_norm_, cuts_of, whole_state_dict
from headrace.ops.parallel.tensor import Ranks
from headrace.spec.stack import Experts
from headrace.studies.verify import relative
from tiny import build

T, D, H = 7, 16, 4
STACK = ["softmax-gated-deltanet", "rwkv6", "gqa"]


def check(names, shared, folder):
    """Two groups of two processes, each with half of the names, and then all four processes.

    shared: names of mixers whose heads of q or k are fewer than four."""
    warnings.simplefilter("ignore", GateWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "tp"))
    two, four = mesh["tp"], init_device_mesh("cpu", (4,))
    results = {name: layer_error(name, two) for name in names[mesh["group"].get_local_rank() :: 2]}
    results |= {f"{name} in four": layer_error(name, four) for name in shared}
    results["single precision"] = layer_error("softmax-kda", two, torch.float32)
    results["model"], results["norm"] = model_error(two)
    return results | {"bytes": sent(four), "refused": refusals(two), "served": served(folder)}


def layer(name, dtype=torch.float64):
    torch.manual_seed(1)
    built = layers.Mixer(name, hidden_size=D, num_heads=H).to(dtype)
    with torch.no_grad():
        for p in built.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return built


def layer_error(name, mesh, dtype=torch.float64):
    """Of the outputs, the state's use, all gradients, and the parameters put together again."""
    whole = layer(name, dtype)
    part = tensor_parallel(copy.deepcopy(whole), mesh)
    x = torch.randn(2, T, D, dtype=dtype)
    weight = torch.randn_like(x)
    (y, gradient), (got, mine) = (_run(mixer, x, weight) for mixer in (whole, part))
    errors = [relative(got, y), relative(mine, gradient)]
    gradients = dict(whole.named_parameters())
    for key, p in part.named_parameters():
        cut, ranks = cuts_of(part)[key]
        errors.append(relative(p.grad, cut.take(gradients[key].grad, ranks.rank)))
    mask = torch.arange(T) > torch.tensor([[0], [2]])
    errors.append(relative(part(x, mask=mask)[0], whole(x, mask=mask)[0]))
    errors.append(relative(_decoded(part, x), _decoded(whole, x)))
    errors += [relative(value, whole.state_dict()[key]) for key, value in whole_state_dict(part).items()]
    return max(errors)


def _run(mixer, x, weight):
    x = x.clone().requires_grad_()
    y, _ = mixer(x)
    (y * weight).sum().backward()
    return y, x.grad


@torch.no_grad()
def _decoded(mixer, x):
    """The last outputs, of a prompt and single tokens."""
    y, state = mixer(x[:, :4])
    for t in range(4, T):
        y, state = mixer(x[:, t : t + 1], state, in_place=t > 4)
    return y


def model_error(mesh):
    """Of the loss and gradients of a hybrid; and of the norm to which gradients are clipped."""
    whole = build(STACK, num_hidden_layers=3).train()
    part = tensor_parallel(copy.deepcopy(whole), mesh)
    ids = torch.randint(1, 29, (2, T))
    losses = [model(ids, labels=ids, skip_logits=True).loss for model in (whole, part)]
    for loss in losses:
        loss.backward()
    gradients, cuts, errors = dict(whole.named_parameters()), cuts_of(part), [relative(losses[1], losses[0])]
    for clipped in (False, True):
        if clipped:
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
            norm_error = relative(clip_grad_norm_(part, 0.01), norm)
        for key, p in part.named_parameters():
            expected = gradients[key].grad
            if key in cuts:
                cut, ranks = cuts[key]
                expected = cut.take(expected, ranks.rank)
            errors.append(relative(p.grad, expected))
    return max(errors), norm_error


def served(folder):
    """Whether a saved model generates in several processes what it does in one, and is saved whole."""
    torch.manual_seed(0)
    whole, part = load(folder), AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    ids, results = torch.randint(1, 29, (2, 5)), []
    for options in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2}):
        both = []
        for model in (whole, part):
            torch.manual_seed(3)
            both.append(model.generate(ids, max_new_tokens=6, **options))
        results.append(torch.equal(*both))
    part.save_pretrained(f"{folder}/again")
    dist.barrier()
    again, before = load(f"{folder}/again").state_dict(), whole.state_dict()
    results.append(again.keys() == before.keys() and all(torch.equal(again[key], before[key]) for key in before))
    return results


def sent(mesh):
    """The numbers that a process gives to each collective, forward and backward, of a layer by the gates' source."""
    results, reduced, gathered = {}, Ranks.reduced, Ranks.all
    for source in ("none", "hidden", "head", "diag", "query"):
        counts = []
        Ranks.reduced = lambda ranks, x, to=counts: to.append(("sum", *x.shape)) or reduced(ranks, x)
        Ranks.all = lambda ranks, x, to=counts: to.append(("gather", *x.shape)) or gathered(ranks, x)
        name = "retnet" if source == "none" else f"softmax-retnet(competition.source={source})"
        part = tensor_parallel(layer(name), mesh)
        y, _ = part(torch.randn(2, T, D, dtype=torch.float64, requires_grad=True))
        forward = list(counts)
        y.sum().backward()
        results[source] = forward, counts[len(forward) :]
    Ranks.reduced, Ranks.all = reduced, gathered
    return results


def refusals(mesh):
    """The sentences of what cannot be split."""
    messages = {}
    for name in ("mamba", "rwkv7", "s4", "gla-outer", "softmax-rnn-norm"):
        messages[name] = refused(
            lambda name=name: tensor_parallel(layers.Mixer(name, hidden_size=D, num_heads=H), mesh)
        )
    three = layers.Mixer("gla", hidden_size=12, num_heads=3)
    messages["heads"] = refused(lambda: tensor_parallel(three, mesh))
    grouped = layers.Mixer("gated-deltanet(heads.qk_groups=3)", hidden_size=96, num_heads=12)
    messages["groups"] = refused(lambda: tensor_parallel(grouped, mesh))
    messages["width"] = refused(lambda: tensor_parallel(build("gla", intermediate_size=17), mesh))
    shuffled = layers.Mixer(
        "softmax-gla(competition.source=diag, competition.shuffle=true)", hidden_size=D, num_heads=H
    )
    messages["shuffle"] = refused(lambda: tensor_parallel(shuffled, mesh))
    experts = MixtureOfExperts(Experts(4), D, 8, torch.relu, gated=False)
    messages["experts"] = refused(lambda: tensor_parallel(torch.nn.Sequential(experts), mesh))
    messages["int8"] = refused(lambda: tensor_parallel(quantize(build("gla")), mesh))
    messages["other"] = refused(lambda: tensor_parallel(torch.nn.Linear(2, 2), mesh))
    torch.manual_seed(dist.get_rank())
    messages["weights"] = refused(lambda: tensor_parallel(layers.Mixer("gla", hidden_size=D, num_heads=H), mesh))
    return messages
