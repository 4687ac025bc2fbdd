"""The edges of a captured call: by which paths tensors go in and come out, which results are losses, what is tied."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from sennit.capture.signature import BuiltIn, ResultLeaf, Signature, argument_paths, leaves, result_paths, type_of
from sennit.capture.torch_private import Forward, flat_arguments, storage_key
from sennit.ir.dtype import TensorType

__all__ = ["Edges", "tied_paths"]


class Edges:
    """Paths of what goes into a call and of what comes out of it."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward) -> None:
        self.model = model
        self.forward = forward
        self.tied = tied_paths(model)
        own = {*self.tied, "seed", "tangent"}
        self.arguments = argument_paths(model, args, kwargs)
        self.renamed = {path: f"inputs.{path}" for path in self.arguments if path in own}
        by_identity = {id(leaf): path for path, leaf in self.arguments.items() if isinstance(leaf, Tensor)}
        self.argument_path = [
            by_identity[id(leaf)] if isinstance(leaf, Tensor) else None for leaf in flat_arguments(args, kwargs)
        ]
        numbered = forward.assemble(list(range(len(forward.results))))
        order = [leaf for _, leaf in leaves(numbered, "")]
        paths = dict(zip(order, result_paths(numbered, own), strict=True))
        paths.pop(None, None)  # fields of a registered dataclass that hold nothing are no results
        self.result_path: list[str] = [paths[leaf] for leaf in range(len(paths))]
        self.is_bare = isinstance(numbered, int)

    def losses(self) -> tuple[int, ...]:
        """The leaves of the result that may be differentiated: the one called loss, or else all floating scalars."""
        scalars = [
            leaf
            for leaf, value in enumerate(self.forward.results)
            if isinstance(value, Tensor) and value.shape == () and value.dtype.is_floating_point
        ]
        named = [leaf for leaf in scalars if self.result_path[leaf] == "loss"]
        return tuple(named or scalars)

    def loss_path(self, leaf: int) -> str:
        return "" if self.is_bare else self.result_path[leaf]

    def signature(self, losses: set[int], with_gradient: frozenset[int]) -> Signature:
        def kind(leaf: object) -> TensorType | BuiltIn:
            return type_of(leaf) if isinstance(leaf, Tensor) else BuiltIn(leaf)

        def result(position: int, value: object) -> ResultLeaf:
            if not isinstance(value, Tensor):
                return ResultLeaf(None, value)
            path = "loss" if self.is_bare and position in losses else self.result_path[position]
            return ResultLeaf(path, requires_grad=position in with_gradient)

        return Signature(
            type(self.model).__name__,
            inspect.signature(self.model.forward),
            {path: kind(leaf) for path, leaf in self.arguments.items()},
            self.renamed,
            tuple(result(position, value) for position, value in enumerate(self.forward.results)),
            self.forward.assemble,
        )


def tied_paths(model: nn.Module) -> dict[str, str]:
    """Each path of a parameter or buffer to the first path of the same memory: tied weights are one value."""
    first: dict[tuple[object, ...], str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {path: first.setdefault(storage_key(tensor), path) for path, tensor in named}
