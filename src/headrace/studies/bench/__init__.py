"""Efficiency: memory, throughput and latency of our mixers, with and without competition, beside others' models."""
