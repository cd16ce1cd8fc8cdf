"""What a command asks the Hugging Face Hub and a folder, before it imports PyTorch and the Hub's client."""

import os
import re
import sys
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ..utils.errors import InputError

PATIENCE = 5.0  # seconds for the Hub's answer
OFFLINE = "Note: the Hugging Face Hub does not answer; what is in its cache on this machine is used (HF_HUB_OFFLINE=1)"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^/]*)?")  # of a data set with its configuration
RUN = "run.json"  # in the folder of a run of `headrace train`
ADAPTER = "adapter_config.json"  # in a folder of PEFT, whose tensors are added to those of a model
GGUF = ".gguf"  # suffix of the files of llama.cpp, each of which is a checkpoint


def ask_hub() -> None:
    """Sets HF_HUB_OFFLINE=1, and says so, if the Hub does not answer: its client reads this variable at its import."""
    if not os.environ.get("HF_ENDPOINT", "-"):
        del os.environ["HF_ENDPOINT"]  # empty: the client would take it for an address
    if not hub_answers():
        print(OFFLINE, file=sys.stderr)
        os.environ |= {"HF_HUB_OFFLINE": "1"}


def tokenizer_is_elsewhere(name: str | None) -> bool:
    """Whether a tokenizer is neither bytes nor on this machine."""
    return name not in (None, "bytes") and Path(name).suffix != ".json" and not Path(name).exists()


def hub_answers() -> bool:
    """Whether the Hugging Face Hub, or the place of it that HF_ENDPOINT names, answers to one request. Its client and
    datasets repeat each of many requests for a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True  # as the user knows, nothing is asked
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urlopen(Request(address, method="HEAD"), timeout=PATIENCE):
            return True
    except (OSError, ValueError, HTTPException) as error:  # a status is an answer; the client has its own certificates
        return isinstance(error, HTTPError) or "CERTIFICATE_VERIFY_FAILED" in str(error)


def is_on_the_hub(path: str | Path) -> bool:
    """Whether a checkpoint or a data set is named by its name on the Hub, OWNER/NAME or OWNER/NAME:CONFIGURATION."""
    here = Path(path).exists() or (Path(path).parent / RUN).is_file()
    return not here and Path(path).suffix != GGUF and bool(HUB_NAME.fullmatch(str(path).replace(os.sep, "/")))


def check_config(folder: Path) -> None:
    """Raises InputError for what is neither a GGUF file nor a folder with config.json. It names the model of a run of
    `headrace train`."""
    if folder.suffix == GGUF or (folder / "config.json").is_file():
        return
    if (folder.parent / RUN).is_file() and not folder.exists():
        others = ", ".join(sorted(each.name for each in folder.parent.iterdir() if (each / "config.json").is_file()))
        raise InputError(f"checkpoint {str(folder)!r} does not exist; the run has {others or 'none yet'}")
    if (folder / RUN).is_file():
        model, others = folder / "model", "one of its checkpoints; its model is written at the end"
        expected = f"its model, {model}" if (model / "config.json").is_file() else others
        raise InputError(f"checkpoint {str(folder)!r} is the folder of a run; expected {expected}")
    written = f"a folder written by {'merge_and_unload().' if (folder / ADAPTER).is_file() else ''}save_pretrained"
    raise InputError(f"checkpoint {str(folder)!r} has no config.json; expected {written}")
