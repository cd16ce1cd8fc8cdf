"""Modules for which the operations of a program stand."""

import operator
from typing import Any

from torch import nn


class Modules:
    """Modules of which a call does exactly what their classes do, as lists that are fast to check."""

    def __init__(self) -> None:
        self.modules: list[nn.Module | None] = []
        self.classes: list[type] = []
        self.places: list[tuple[dict[str, Any], str]] = []  # the parent's modules, and the name there
        self.hooks: list[dict] = []
        self.attributes: list[dict[str, Any]] = []

    def add(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self.add_other(parent, name, module)
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        self.attributes.append(vars(module))

    def add_other(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """Adds a module that no operation stands for."""
        self.modules.append(module)
        self.classes.append(type(module))
        self.places.append((parent._modules, name))

    def are_plain(self) -> bool:
        """Whether no module has a hook or a forward of its own. (Those of a backward never run in a program.)"""
        return not any(self.hooks) and not any("forward" in attributes for attributes in self.attributes)

    def are_same(self, plain: bool) -> bool:
        """Whether the modules are in their places, of their classes, and plain or not."""
        held = [modules.get(name) for modules, name in self.places]
        same = all(map(operator.is_, held, self.modules)) and list(map(type, held)) == self.classes
        return same and self.are_plain() == plain
