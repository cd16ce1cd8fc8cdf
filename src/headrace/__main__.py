"""`python -m headrace`, as `torchrun -m headrace` needs it."""

from .cli import main

main()
