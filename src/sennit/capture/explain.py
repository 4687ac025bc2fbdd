"""Why a model was not captured: the cause, the module, the user's line, and what to change.

Two moments tell. Torch may fail while it traces: then the traceback has the line, and the innermost module whose
`forward` is on the stack is the one (`explain`). Or it traces an operator that has no fixed shape, or reads a value
back into Python: that stands in the forward graph, and would fail later with nothing to point at (`refuse_dynamic`).

| cause | what to do |
|---|---|
| `if` or `while` on a tensor, `.item()`, `int(tensor)` | `torch.where`, or an argument that is no tensor |
| a size that depends on values: `x[mask]`, `nonzero`, `unique`, `bincount` | multiply by the mask; `scatter_add` into a fixed size |
| numpy, or another library, on a tensor | the same in torch |
| a result that is no tensor | tuples, dicts or data classes of tensors |
| an element type that plans do not know | a real type |
| a write to an argument or a parameter | a copy |
| the model fails on the sample by itself | the sample |
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
from torch import fx, nn

from sennit.errors import CaptureError

__all__ = ["explain", "line_of", "place_of", "refuse_dynamic"]


def explain(model: nn.Module, error: BaseException) -> CaptureError:
    """The error of a trace in the user's words."""
    frames = [frame for frame, _ in _walk(error.__traceback__)]
    lines = [(frame, line) for frame, line in _walk(error.__traceback__) if _is_users(frame.f_code.co_filename)]
    where, code = _place(model, frames), ""
    if lines:
        frame, number = lines[-1]
        code = linecache.getline(frame.f_code.co_filename, number).strip()
        where += f", {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{number}: {code}"
    what, fix = _cause(type(model).__name__, error, code)
    return CaptureError(what, where=where, fix=fix)


def _walk(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _is_users(path: str) -> bool:
    """Whether a file is neither torch's nor ours, so that its line means something to the user."""
    ours, python = __file__.rpartition("/")[0], linecache.__file__.rpartition("/")[0]
    is_python = path.startswith(python) and "/site-packages/" not in path
    return not (is_python or "/torch/" in path or path.startswith((ours, "<")))


def _place(model: nn.Module, frames: list[FrameType]) -> str:
    """The innermost module whose method is on the stack."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = [frame.f_locals.get("self") for frame in frames]
    inner = [owner for owner in found if isinstance(owner, nn.Module) and id(owner) in paths]
    if not inner or not paths[id(inner[-1])]:
        return f"module {type(model).__name__}"
    return f"module {paths[id(inner[-1])]!r} ({type(inner[-1]).__name__})"


def _cause(model: str, error: BaseException, code: str) -> tuple[str, str]:
    kind, text = type(error).__name__, str(error)
    first = next((line for line in text.strip().splitlines() if line.strip()), kind)
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError"):
        return f"{model} branches on the value of a tensor", _branch_remedy(code)
    if kind == "DynamicOutputShapeException":
        return f"{model} makes a tensor whose size depends on values ({first})", _SIZE_REMEDY
    if ".numpy()" in text or "numpy" in code:
        return f"{model} leaves torch: {first}", "write that line with torch operators, which can be traced"
    if "not a known type" in text or "Unsupported output type" in text or "unsupported output type" in text.lower():
        found = re.search(r"<class '([^']+)'>", text)
        return (
            f"{model} returns {'an object of type ' + found[1] if found else 'something'} that is no tensor",
            "return tensors, alone or in tuples, dicts or data classes; for a model of transformers set "
            "config.use_cache = False, since its cache is such an object",
        )
    if isinstance(error, (AssertionError, NotImplementedError)):
        return (
            f"torch could not trace {model}: {kind}: {first}",
            "report this with the model: it may be a gap of sennit",
        )
    return (
        f"{model} fails while it is traced: {kind}: {first}",
        "call the model on the sample without capturing it: if that fails too, the sample does not fit the model; "
        "else this line does something that cannot be traced",
    )


_SIZE_REMEDY = (
    "keep sizes fixed: multiply by the mask instead of selecting with it, add with scatter_add into a tensor of known size "
    "instead of counting with bincount or unique"
)


def _branch_remedy(code: str) -> str:
    if "layerdrop" in code:
        return "layers that are skipped by chance cannot be planned: set encoder_layerdrop = decoder_layerdrop = 0 in the config"
    if "expert" in code:
        return 'a loop over the experts that were hit: load the model with experts_implementation="batched_mm"'
    return (
        "compute both sides and choose with torch.where, or pass what it depends on as an argument that is no tensor; "
        "a value read with .item() or int() counts as a branch"
    )


def refuse_dynamic(model: nn.Module, module: fx.GraphModule) -> None:
    """Raise for the first operator of a forward graph whose shape, or result in Python, depends on values."""
    for node in module.graph.nodes:
        tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
        if torch.Tag.dynamic_output_shape in tags and _has_open_size(node.meta.get("val")):
            raise CaptureError(
                f"{type(model).__name__} makes a tensor whose size depends on values ({node.target})",
                where=place_of(node),
                fix=_SIZE_REMEDY,
            )
        if torch.Tag.data_dependent_output in tags:
            raise CaptureError(
                f"{type(model).__name__} reads the value of a tensor into Python ({node.target})",
                where=place_of(node),
                fix=_branch_remedy(""),
            )


def _has_open_size(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_open_size, value))
    return isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape)


def place_of(node: fx.Node) -> str:
    """The module and the line of a node, for messages."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    line = line_of(node)
    return (f"module {path!r}" if path else "the model's own forward") + (f", {line}" if line else "")


def line_of(node: fx.Node) -> str:
    """The user's line nearest to an operator: the last frame outside of torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    mine = [(path, line) for path, line in frames if _is_users(path)]
    return f"{mine[-1][0].rsplit('/', 1)[-1]}:{mine[-1][1]}" if mine else ""
