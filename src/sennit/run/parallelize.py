"""`parallelize`: a model, a sample and a plan to a model that trains on all ranks, with the loop unchanged.

    torchrun --nproc-per-node 4 train.py

    model = sennit.parallelize(model, sample, plan=zoo.data_parallel, mesh="dp=4")
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

Every rank calls this with the same arguments and compiles the same program, which the ranks compare; from then on a
rank is device number RANK of the mesh. Parameters are taken from rank 0, cut into pieces, and the model that was passed
is not kept.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.capture import capture_call
from sennit.capture.rules.certify import Certifier
from sennit.cluster import Cluster, load
from sennit.environment import current_environment
from sennit.errors import RunError
from sennit.ir.mesh import Mesh
from sennit.plan import zoo
from sennit.plan.search import Choice, Space, batch_of, mesh_of, planner_of, search
from sennit.run.child import CompileIn, compiled_in
from sennit.run.compile import Planner, Recipe
from sennit.run.engine import Call, Engine, Options
from sennit.run.module import ParallelModule
from sennit.run.skeleton import device_of, skeleton_of, slots_of
from sennit.run.world import check_mesh, join, together

__all__ = ["Sample", "parallelize"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model is called with: `Sample((tokens,), {"labels": labels})`. Only shapes and types matter."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def parallelize(
    model: nn.Module,
    sample: Sample | tuple[Any, ...] | Mapping[str, Any] | Tensor,
    *,
    plan: Planner | Choice | Literal["auto"],
    mesh: Mesh | str | None = None,
    cluster: Cluster | str | None = None,
    pins: Mapping[str, Mapping[str, object]] | None = None,
    inputs: Literal["whole", "local"] = "whole",
    results: Sequence[str] = (),
    losses: Sequence[str] | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    dynamic: bool = False,
    device: torch.device | str | None = None,
    broadcast: bool = True,
    certify: bool = True,
    certifier: Certifier | None = None,
    fused_attention: bool = True,
    compile_in: CompileIn = None,
) -> ParallelModule:
    """A model that computes what `model` does, split over all ranks as `plan` says.

    - `sample`: the arguments of one call, for the whole batch: a tuple (positional), a dict (keywords), a tensor, or a
      `Sample`.
    - `plan`: a function from a graph and a mesh to a plan: of `sennit.plan.zoo`, or one's own; or `"auto"`: the fastest
      that a search finds for
      `cluster`; or the `Choice` of an earlier search (`Choice.parse` reads what `sennit plan --out` wrote). The search counts the state of Adam.
    - `cluster`: for `plan="auto"`: a description, a preset (`"dgx-h100:4"`) or a TOML file, with as many devices as
      ranks. Left out: this machine
      as the preset `laptop` describes one.
    - `pins`: for `plan="auto"`: decisions by module name that the search must keep (docs/plan-search.md).
    - `mesh`: the ranks as a mesh (`"dp=2,tp=2;mb=4"`: a time axis is micro-batches). Left out: all ranks along the axis
      of a plan
      of the zoo (`dp`, `tp`, `cp`, `ep`, `pp` with twice as many micro-batches), or along `dp`.
    - `inputs`: each call gets the whole batch on every rank, and each rank takes its part; or `"local"`: only this
      rank's part.
    - `results`: what a training call returns beside the losses (`["logits"]`); the rest is None there. Evaluation
      returns all.
    - `losses`: which of several losses are differentiated; all where left out.
    - `seed`: of dropout. With the training step it determines every random number, on any plan and number of ranks.
    - `dtype`: compute in this type; parameters, gradients and optimizer state stay in the model's own (master weights).
    - `autocast`: capture under `torch.autocast` to this type.
    - `scaler`: a `sennit.GradScaler`, for float16.
    - `dynamic`: compile again for new argument shapes, instead of refusing them.
    - `device`: where the pieces go for a model on `meta`, which has no values: load a checkpoint before use.
    - `broadcast`: take the values of rank 0; `False` where all ranks have the same anyway.
    - `certify`: execute every operator rule that the proof relies on, once: on small tensors, on the CPU. Certificates
      are kept in
      the cache folder (`SENNIT_CACHE_DIR`), so a model is certified once a machine. `False` takes the rules at their word.
    - `certifier`: one's own, which keeps its certificates elsewhere.
    - `fused_attention`: run what the model calls `F.scaled_dot_product_attention` as the kernel that torch has for it,
      which stores no scores,
      wherever a rank's pieces allow. `False` runs its mathematical form, operator by operator.
    - `compile_in`: `"child"`: a forked process compiles, and sends this one what a rank needs; the memory that capture
      and planning take goes with it. `"here"`: this process
      compiles, as a plan that must change something in it needs. Left out: a child where a fork is safe (Linux, nothing on a GPU), else here.
    """
    join()
    if inputs not in ("whole", "local"):
        raise RunError(f"inputs={inputs!r}", fix='use "whole" or "local"')
    if dynamic and inputs == "local":
        raise RunError('dynamic shapes with inputs="local"', fix="pass whole inputs, or keep their shapes")
    if compile_in not in (None, "child", "here"):
        raise RunError(f"compile_in={compile_in!r}", fix='use "child" or "here", or leave it out')
    call = _call(sample)
    if plan == "auto" or isinstance(plan, Choice):
        if mesh is not None:
            raise RunError("a chosen plan with a mesh", fix="leave the mesh out: the choice has one; or pass a planner")
        choice = (
            plan
            if isinstance(plan, Choice)
            else _search(model, call, _cluster(cluster), pins or {}, fused_attention, compile_in)
        )
        plan, mesh = planner_of(choice), mesh_of(choice)
    elif pins:
        raise RunError("pins with a plan of one's own", fix='pins are for plan="auto": change the plan instead')
    laid = _mesh(plan, mesh)
    check_mesh(laid)
    place = together(lambda: device_of(model, device), lambda place: place.type, "find the model on one device")
    slots = slots_of(model)
    options = Options(
        local_inputs=inputs == "local",
        dynamic=dynamic,
        dtype=dtype,
        losses=None if losses is None else tuple(losses),
        seed=seed,
        scaler=scaler,
        compile_in=compile_in,
    )
    if certify and certifier is None:
        certifier = Certifier(current_environment().cache_dir)
    recipe = Recipe(plan, laid, tuple(results), autocast, certifier if certify else None, fused_attention)
    engine = Engine(skeleton_of(model, dtype), slots, recipe, options, call, place)
    first = engine.program(model.training, call)
    engine.skeleton.train(model.training)
    return ParallelModule(engine, first, _value_of(model, broadcast=broadcast))


def _search(
    model: nn.Module,
    call: Call,
    cluster: Cluster,
    pins: Mapping[str, Mapping[str, object]],
    fused_attention: bool,
    compile_in: CompileIn,
) -> Choice:
    """The fastest plan. Every rank searches, and finds the same."""

    def work() -> Choice:
        graph = capture_call(model, call.args, dict(call.kwargs)).graph
        sizes = tuple(size for size in (1, 2, 4, 8, 16, 32) if batch_of(graph) % size == 0)
        space = Space(sizes=sizes, fused_attention=fused_attention)
        return search(graph, cluster, space=space, optimizer="adam", pins=pins).choice

    places = {tensor.device for tensor in model.parameters()}
    choice = compiled_in(compile_in, places.pop() if places else torch.device("cpu"), work)
    _log.info("plan=auto: %s, %.3g s a step (simulated)", choice.title, choice.step)
    return choice


def _cluster(cluster: Cluster | str | None) -> Cluster:
    """The cluster to search for: as many devices as ranks."""
    ranks = dist.get_world_size()
    described = cluster if isinstance(cluster, Cluster) else load(cluster or f"laptop:{ranks}")
    if described.devices != ranks:
        raise RunError(
            f"cluster {described.name!r} has {described.devices} devices, and there are {ranks} ranks",
            fix="describe as many devices as ranks, as in NAME:N",
        )
    return described


def _mesh(plan: Planner, mesh: Mesh | str | None) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    ranks = dist.get_world_size()
    inner: Any = plan
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inner is zoo.tensor_parallel:
        return Mesh.make({"tp": ranks})
    if inner is zoo.context_parallel:
        return Mesh.make({"cp": ranks})
    if inner is zoo.expert_parallel:
        return Mesh.make({"ep": ranks})
    if inner is zoo.pipeline:
        return Mesh.make({"pp": ranks}, {"mb": 2 * ranks})
    return Mesh.make({"dp": ranks})


def _call(sample: Sample | tuple[Any, ...] | Mapping[str, Any] | Tensor) -> Call:
    match sample:
        case Sample(args, kwargs):
            return Call(args, kwargs)
        case tuple():
            return Call(sample, {})
        case Mapping():
            return Call((), dict(sample))
        case Tensor():
            return Call((sample,), {})
        case _:
            raise RunError(
                f"a sample of type {type(sample).__name__}",
                fix="pass a tuple of positional arguments, a dict of keywords, or sennit.Sample(args, kwargs)",
            )


def _value_of(model: nn.Module, *, broadcast: bool) -> Callable[[str], Tensor]:
    """The values of a model by path. With `broadcast` asking is a collective: all ranks ask for all, in one order."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}

    def value_of(path: str) -> Tensor:
        value = tensors[path].detach()
        if value.device.type == "meta" or not broadcast or dist.get_world_size() == 1:
            return value
        value = value.clone(memory_format=torch.contiguous_format)
        dist.broadcast(value, 0)
        return value

    return value_of
