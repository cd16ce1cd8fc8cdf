"""The harness's needle and recall tasks on local files: what the definitions that `localize` writes name."""

import re
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks.fda.task import FDA
from lm_eval.tasks.squad_completion.task import SQUADCompletion
from lm_eval.tasks.swde.task import SWDE

from .tasks import essays


def niah_single_2(**settings: Any) -> dict[str, datasets.Dataset]:
    """Numbers hidden in essays: see `hidden_in_essays`."""
    return hidden_in_essays("numbers", **settings)


def niah_single_3(**settings: Any) -> dict[str, datasets.Dataset]:
    """UUIDs hidden in essays: see `hidden_in_essays`."""
    return hidden_in_essays("uuids", **settings)


def hidden_in_essays(
    values: str, data: str, max_seq_lengths: list[int], tokenizer: str, **_: Any
) -> dict[str, datasets.Dataset]:
    """The harness's 500 prompts of each length, with the essays of the folder `data` in place of those of the Hub."""
    from lm_eval.tasks.ruler.common_utils import get_tokenizer
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE, download_dataset
    from lm_eval.tasks.ruler.prepare_niah import generate_samples

    haystack = re.sub(r"\s+", " ", " ".join(essays(Path(data)))).split(" ")
    return download_dataset(
        generate_samples(
            haystack,
            max_seq_length=length,
            template=TEMPLATE,
            type_haystack="essay",
            type_needle_k="words",
            type_needle_v=values,
            num_samples=500,
            TOKENIZER=get_tokenizer(tokenizer),
        )
        for length in max_seq_lengths
    )


class LocalRows(ConfigurableTask):
    """A task that the harness defines as a class, on the JSON Lines files that its YAML names."""

    def __init__(self, config: dict[str, Any]):
        self.source = config["dataset_kwargs"]
        super().__init__()

    def download(self, dataset_kwargs: Any = None, **_: Any) -> None:
        self.dataset = datasets.load_dataset("json", **self.source)


# Named as the tasks, by which `localize` refers to them.
swde, squad_completion, fda = (type(kind.__name__, (LocalRows, kind), {}) for kind in (SWDE, SQUADCompletion, FDA))
