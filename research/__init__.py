"""What makes the evidence of the papers' claims: run from a checkout, and no part of the installed package."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
