"""Checks request bodies of OpenAI's completions and chat completions.

A field that is not implemented and would change the answer is refused, never ignored.
"""

import reprlib
from typing import Annotated, Any, ClassVar, Literal, Self

from jinja2 import TemplateError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from .refusals import Refused
from .sampling import Sampling

# Fields that are not implemented: those that do not affect the text, and the values at which others do not affect it.
IGNORED = {
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],), "audio": (), "best_of": (1,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": ([],), "logit_bias": ({},), "modalities": (["text"],), "presence_penalty": (0,),
    "response_format": ({"type": "text"},), "suffix": ("",), "tool_calls": ([],), "tool_choice": ("none", "auto"),
    "tools": ([],), "top_logprobs": (),
}  # fmt: skip


class ImplementedFields(BaseModel):
    """The implemented fields; other fields are accepted only if they have no effect. Null means the default."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _nothing_else(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name not in IGNORED and value not in NEUTRAL.get(name, ()):
                raise Refused(400, f"{name[:40]}={reprlib.repr(value)} is not available; leave it out", name[:40])
        return self


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    tokens = isinstance(value, list) and value and isinstance(value[0], int)
    return [value] if tokens or isinstance(value, str) else value


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(ImplementedFields):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted without effect: packets are not padded


class Generation(ImplementedFields):
    """The fields of both kinds of requests."""

    model: str | None = None
    n: int = Field(1, ge=1, le=16)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)  # None: that of the model
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[Stop], BeforeValidator(_listed)] = Field([], max_length=4)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _finite_when_divided(self) -> Self:
        if 0 < self.temperature < 0.01:  # logits divided by less may be infinite
            raise Refused(400, f"temperature={self.temperature}; expected 0, or 0.01 to 2", "temperature")
        return self

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The request of a JSON body. Refused with the first invalid field."""
        try:
            return cls.model_validate(from_json(body, allow_inf_nan=False))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            value = "" if first["type"] == "missing" else f"={reprlib.repr(first['input'])}"
            param = str(first["loc"][0]) if first["loc"] else None
            raise Refused(400, f"{where}{value}: {first['msg']}", param) from None
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {error}") from None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of an answer, and its value."""
        name = "max_completion_tokens" if getattr(self, "max_completion_tokens", None) else "max_tokens"
        return name, getattr(self, name)

    def sampling(self, longest: int, choice: int) -> Sampling:
        """The sampling settings of one of the n choices, with `longest` tokens where the request has no limit."""
        limit, seed = self.limit[1], None if self.seed is None else self.seed + choice
        tokens, penalty = longest if limit is None else limit, self.repetition_penalty
        return Sampling(tokens, self.temperature, self.top_p, seed, tuple(self.stop), repetition_penalty=penalty)


class Completion(Generation):
    """The body of /v1/completions. max_tokens=0 with echo returns the prompt alone, with its log-probabilities."""

    object: ClassVar[tuple[str, str]] = "text_completion", "text_completion"  # of an answer, and of a stream's piece
    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)] = Field(min_length=1, max_length=64)
    max_tokens: int | None = Field(None, ge=0)  # None: 16, or as many as the server gives
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False

    @model_validator(mode="after")
    def _something_to_return(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise Refused(400, "max_tokens=0 without echo; expected at least 1", "max_tokens")
        return self

    def sampling(self, longest: int, choice: int) -> Sampling:
        return super().sampling(min(16, longest), choice)._replace(logprobs=self.logprobs, echo=self.echo)

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """The tokens of every prompt, with the special tokens that the tokenizer is set to add to a text."""
        return [tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt for prompt in self.prompt]

    def part(self, text: str, first: bool) -> dict[str, Any]:
        """A choice's text in an answer, or a piece of it in a stream."""
        return {"text": text}


class Part(ImplementedFields):
    type: Literal["text"]
    text: str


class Message(ImplementedFields):
    role: str
    content: Annotated[list[Part], BeforeValidator(_parts)]

    def plain(self) -> dict[str, str]:
        """The message with the parts of its content joined by newlines."""
        return {"role": self.role, "content": "\n".join(part.text for part in self.content)}


class Chat(Generation):
    """The body of /v1/chat/completions."""

    object: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    messages: list[Message] = Field(min_length=1)
    logprobs: Literal[False] = False
    max_completion_tokens: int | None = Field(None, ge=1)  # another name of max_tokens

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        names = "max_tokens", "max_completion_tokens"
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise Refused(400, f"{' and '.join(names)} are both given; expected one of them", names[0])
        return self

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """The tokens of the messages after the chat template, as a single prompt."""
        messages = [message.plain() for message in self.messages]
        try:
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise Refused(400, f"the chat template refuses the messages: {error}", "messages") from None
        return [encoded["input_ids"]]

    def part(self, text: str, first: bool) -> dict[str, Any]:
        """A choice's text in an answer, or a piece of it in a stream, whose first piece names the role."""
        return {"delta" if self.stream else "message": ({"role": "assistant"} if first else {}) | {"content": text}}
