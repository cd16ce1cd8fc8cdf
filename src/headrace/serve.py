"""The OpenAI-compatible server of `transformers serve` with our models: one checkpoint, one stream at a time.

Requests wait for each other; nothing is batched. /v1/completions, and /v1/chat/completions where the tokenizer has a
chat template, streamed or not.
"""

from pathlib import Path
from typing import Any

import transformers
import uvicorn
from fastapi import FastAPI, HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

from .generate import read_tokenizer
from .hf import HeadraceForCausalLM, load


class Checked:
    """What a handler must refuse before it generates, with a sentence."""

    longest = 0  # tokens of a prompt

    def _resolve_model(self, body: dict[str, Any]):
        found = super()._resolve_model(body)  # type: ignore[misc]  # refuses a model that is not served
        tokenizer, messages = found[2], body.get("messages")
        if messages is not None and tokenizer.chat_template is None:
            raise HTTPException(400, "this model's tokenizer has no chat template; use /v1/completions")
        if (count := _tokens(tokenizer, body)) > self.longest:
            raise HTTPException(400, f"the prompt has {count} tokens; expected at most {self.longest}")
        if not count:
            raise HTTPException(400, "the prompt has no tokens; expected some text")
        return found


def _tokens(tokenizer: Any, body: dict[str, Any]) -> int:
    messages = body.get("messages")
    if messages is None:
        return len(tokenizer(str(body.get("prompt", ""))).input_ids)
    return len(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])


class Completion(Checked, CompletionHandler):
    pass


class Chat(Checked, ChatCompletionHandler):
    pass


def application(checkpoint: Path, longest: int) -> FastAPI:
    """The server's application; prompts of more than `longest` tokens are refused."""
    load(checkpoint), read_tokenizer(checkpoint)  # what is wrong with them is said before anything is served
    vars(transformers)[HeadraceForCausalLM.__name__] = HeadraceForCausalLM  # where the server looks for a class
    manager, state = ModelManager(force_model=str(checkpoint)), GenerationState(continuous_batching=False)
    chat, completion = Chat(manager, state), Completion(manager, state)
    chat.longest = completion.longest = longest
    others = (ResponseHandler(manager, state), TranscriptionHandler(manager, state), SystemOneHandler(manager, state))
    return build_server(manager, chat, completion, *others, state)


def serve(checkpoint: Path, host: str, port: int, longest: int) -> None:
    """Until interrupted."""
    uvicorn.run(application(checkpoint, longest), host=host, port=port, log_level="info")
