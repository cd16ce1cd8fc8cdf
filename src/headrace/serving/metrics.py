"""What the server counts and measures, in the format of Prometheus: `GET /metrics`."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .prefix import PrefixCache

SECONDS = 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100  # bounds of the buckets


class Metrics:
    """opened, running: functions that return the present numbers, of requests and of streams."""

    def __init__(self, opened: Callable[[], int], running: Callable[[], int], prefixes: PrefixCache):
        self.registry = registry = CollectorRegistry()
        self.prefixes = prefixes
        registry.register(self)  # for `collect`
        Gauge("headrace_requests_open", "Requests that are not answered yet", registry=registry).set_function(opened)
        Gauge("headrace_streams_running", "Streams that get tokens", registry=registry).set_function(running)
        self.prompt = Counter("headrace_prompt_tokens", "Tokens of prompts", registry=registry)
        self.generated = Counter("headrace_generated_tokens", "Generated tokens", registry=registry)
        self.first = Histogram(
            "headrace_first_piece_seconds", "Seconds from the tokens of a prompt to its first piece of text",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.between = Histogram(
            "headrace_between_pieces_seconds", "Seconds between two pieces of a text", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def stream(self, prompt: int) -> "Clock":
        """Counts the tokens of a prompt. Returns the clock of its stream."""
        self.prompt.inc(prompt)
        return Clock(self)

    def collect(self) -> Iterator[Metric]:
        """What the prefix cache counts."""
        cache, name = self.prefixes, "headrace_prefix_cache"
        rate = cache.hits / cache.queried if cache.queried else 0
        yield CounterMetricFamily(f"{name}_queried_tokens", "Tokens of prompts that were looked up", cache.queried)
        yield CounterMetricFamily(f"{name}_hit_tokens", "Tokens of prompts that were not read again", cache.hits)
        yield GaugeMetricFamily(f"{name}_hit_rate", "Hit tokens divided by queried tokens", rate)
        yield GaugeMetricFamily(f"{name}_entries", "Prefixes whose states are kept", len(cache.kept))
        yield GaugeMetricFamily(f"{name}_bytes", "Bytes of kept states", cache.bytes)
        yield GaugeMetricFamily(f"{name}_capacity_bytes", "Bytes that may be kept; 0: none are", cache.capacity)
        yield CounterMetricFamily(f"{name}_evictions", "Prefixes whose states were dropped", cache.evictions)


class Clock:
    """Counts the tokens of one stream and measures the time between its pieces."""

    def __init__(self, metrics: Metrics):
        self.metrics, self.last, self.tokens = metrics, time.perf_counter(), 0

    def tick(self, tokens: int) -> None:
        """tokens: number of generated tokens so far, at a piece of text."""
        now = time.perf_counter()
        (self.metrics.between if self.tokens else self.metrics.first).observe(now - self.last)
        self.metrics.generated.inc(tokens - self.tokens)
        self.last, self.tokens = now, tokens
