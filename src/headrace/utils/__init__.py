"""Helpers for all parts: errors, devices, processes and files."""
