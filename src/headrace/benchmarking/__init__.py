"""Efficiency: memory, throughput and latency of mixers with and without competition, and of models of transformers."""
