"""Small sets of rows, as runs of `compare`, of a planned study and of `eval` leave them."""

from dataclasses import replace

from headrace import zoo
from headrace.comparison.defaults import PAIR
from headrace.comparison.plan import Question, Study


def results(scores, plan=PAIR, gates=(), **changes):
    """The results.json of a comparison: a list of final scores (None: diverged) for each of the plan's first mixers.
    changes: {field of an arm: its value for each mixer}."""
    plan = replace(plan, mixers=plan.mixers[: len(scores)], seeds=max(map(len, scores)))
    arms = []
    for i, (mixer, finals) in enumerate(zip(plan.mixers, scores, strict=True)):
        state = 100 * plan.shape.heads // zoo.get(mixer).num_heads(plan.shape.hidden_size, plan.shape.heads)
        for seed, score in enumerate(finals):
            end = {} if score is None else {"loss": 1.0, plan.task.metric.name: score}
            point = {"scores": end, "gates": list(gates)}
            arms.append({
                "comparison": plan.name, "mixer": mixer, "seed": seed, "parameters": 1000, "gate_parameters": 0,
                "state_bytes": state, "intermediate_size": None, "scores": end, "diverged": score is None,
                "curve": [{"step": 0, **point, "scores": end and end | {"loss": 3.0}}, {"step": 2, **point},
                          {"step": 5, **point}], "seconds": 1.0, "speeds": [10.0, 14.0],
                "flops": 500, "lr": plan.recipe.lr, "steps": plan.recipe.steps, "commit": "c0ffee",
            } | {field: values[i] for field, values in changes.items()})  # fmt: skip
    study = Study("s", "S", (plan,)).to_json()
    return {"study": study, "command": "headrace", "environments": [], "arms": arms, "trials": [], "tuned": {}}


def swept(by_value):
    """The results.json of a sweep over pairs: for each value the scores that `results` takes."""
    parts = [results(scores, replace(PAIR, name=f"pair-pairs-{value}")) for value, scores in by_value.items()]
    study = {"name": "s", "title": "S", "plans": [part["study"]["plans"][0] for part in parts]}
    study["sweep"] = {"field": "pairs", "values": list(by_value)}
    return parts[0] | {"study": study, "arms": [arm for part in parts for arm in part["arms"]]}


def gates(load, entropy=0.5):
    return [{"layer": 0, "gate": "write", "load": load, "load_asked": [], "load_other": [], "entropy": entropy}]


def many(seeds, names):
    """The results.json of many mixers: competition adds 0.1 to every backbone, but takes 0.1 from GLA."""
    gain = {name: 0.1 * (name.startswith("softmax-") and "rnn" not in name) for name in names} | {"softmax-gla": -0.1}
    scores = [[0.5 + gain[name] * (1 + 0.01 * seed) for seed in range(seeds)] for name in names]
    return results(scores, replace(PAIR, mixers=names))


def row(mixer, seed, score, **more):
    known = {"comparison": "p", "trial": False, "steps": 100, "reached": None, "loss": score, "by_length": {},
             "scores": {}, "converged": True}  # fmt: skip
    return known | {"mixer": mixer, "seed": seed, "score": score} | more


def rows(**scores):
    """The rows of a planned study: a list of final scores (None: diverged) for each mixer."""
    return [row(mixer, seed, score) for mixer, own in scores.items() for seed, score in enumerate(own)]


def question(measure="score", test="t", pairs=(("a", "b"),)):
    names = tuple((mixer, mixer.upper()) for mixer in sorted({mixer for pair in pairs for mixer in pair}))
    return Question("Does it help?", names, pairs, measure, test)


def record(values, metric="acc", choices=(4,), unigram=None, rows=""):
    """An item of `eval`: the score of each row, and the number of its choices, which repeat. rows: a name of them."""
    samples = [
        {"doc_hash": f"{rows}{n}", "choices": choices[n % len(choices)], "answer": [], "scores": {metric: value}}
        for n, value in enumerate(values)
    ]
    return {"samples": samples, "unigram": unigram or {}, "max_length": 8, "trained_length": 8, "seconds": 0.5}
