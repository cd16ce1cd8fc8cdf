"""Helpers for all parts: errors, devices, plug-ins, optional packages and atomic files."""
