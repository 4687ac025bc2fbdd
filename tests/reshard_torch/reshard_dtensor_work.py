"""What the ranks of the DTensor tests run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sennit.reshard.dtensor_torch import dtensor_boxes, mesh_of, redistribute
from sennit.reshard.execute_torch import Executor
from sennit.reshard.serve_torch import serve_dtensor


def device_mesh(ranks: Sequence[int], shape: tuple[int, ...]) -> DeviceMesh:
    names = ("x", "y", "z")[: len(shape)]
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)


def dtensor(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of `whole`, built from DTensor's own definition of its pieces; pending values are whole on coordinate
    0.
    """
    rank = dist.get_rank()
    if mesh.get_coordinate() is None:
        local = torch.empty(0, dtype=whole.dtype)
    else:
        local = oracle(whole, mesh, placements, rank)
        for place, placement in enumerate(placements):
            if isinstance(placement, Partial) and mesh.get_local_rank(place) != 0:
                local = torch.zeros_like(local)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def oracle(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], rank: int) -> torch.Tensor:
    """The piece of a rank, by DTensor's rule: each axis in turn cuts what is left."""
    piece = whole
    point = mesh_of(mesh).coordinate(rank)
    for place, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            pieces = placement._split_tensor(piece, mesh.size(place), with_padding=False, contiguous=True)[0]
            piece = pieces[point[place]]
        elif isinstance(placement, Shard):
            length = -(-piece.shape[placement.dim] // mesh.size(place))
            start = min(point[place] * length, piece.shape[placement.dim])
            stop = min(start + length, piece.shape[placement.dim])
            piece = piece.narrow(placement.dim, start, stop - start)
    return piece.contiguous()


def check(y: DTensor, whole: torch.Tensor, placements: Sequence[Placement]) -> str | None:
    rank, mesh = dist.get_rank(), y.device_mesh
    if mesh.get_coordinate() is None:
        return None
    want = oracle(whole, mesh, placements, rank)
    if tuple(y.placements) != tuple(placements):
        return f"placements {y.placements}"
    return None if torch.equal(y.to_local(), want) else f"want {want.tolist()}, got {y.to_local().tolist()}"


def random_placements(chance: random.Random, axes: int, dims: int, *, pending: bool) -> tuple[Placement, ...]:
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    return tuple(chance.choice([*choices, Partial()] if pending else choices) for _ in range(axes))


def random_dtensors(rank: int, seeds: range) -> list[str]:
    """Random even and uneven problems on 2x2, 3x2 and 4, some to another mesh: which went wrong."""
    meshes = [device_mesh([0, 1, 2, 3], (2, 2)), device_mesh(range(6), (3, 2)), device_mesh([5, 4, 2, 1], (4,))]
    wrong: list[str] = []
    executor = Executor(timeout=10.0)
    for seed in seeds:
        chance = random.Random(seed)
        mesh = chance.choice(meshes)
        other = chance.choice(meshes) if chance.random() < 0.3 else mesh
        shape = [chance.choice((4, 5, 6, 7, 9, 12, 1)) for _ in range(chance.randint(1, 3))]
        source = random_placements(chance, mesh.ndim, len(shape), pending=True)
        target = random_placements(chance, other.ndim, len(shape), pending=False)
        whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
        if mesh.get_coordinate() is None and other.get_coordinate() is None:
            continue
        y = redistribute(dtensor(whole, mesh, source), target, other, executor=executor)
        fault = check(y, whole, target)
        if fault:
            wrong.append(f"{seed}: {shape} {source} on {mesh.shape} -> {target} on {other.shape}: {fault}")
    return wrong


def nested_uneven(rank: int) -> list[str]:
    """(5, 3) with Shard(0) on both axes of 2 x 2 to replicated, with a flattened mesh around: torch 2.13 gets it wrong."""
    mesh = device_mesh([0, 1, 2, 3], (2, 2))
    mesh._flatten("flat")  # makes a process group, so all ranks call it
    whole = torch.arange(15.0).reshape(5, 3)
    if rank > 3:
        return []
    boxes = dtensor_boxes(mesh_of(mesh), (5, 3), (Shard(0), Shard(0)))
    assert [boxes[r].shape[0] for r in range(4)] == [2, 1, 1, 1]
    x = dtensor(whole, mesh, (Shard(0), Shard(0)))
    y = redistribute(x, (Replicate(), Replicate()))
    faults = [check(y, whole, (Replicate(), Replicate()))]
    with serve_dtensor() as log:
        z = x.redistribute(placements=(Replicate(), Replicate()))
    assert log.served == 1, log
    faults.append(check(z, whole, (Replicate(), Replicate())))
    return [fault for fault in faults if fault]


def special_placements(rank: int) -> list[str]:
    """Strided shards, averages, negative dims, max; each against the definition."""
    mesh = device_mesh([0, 1, 2, 3], (2, 2))
    if rank > 3:
        return []
    whole = torch.randint(0, 99, (8, 6), generator=torch.Generator().manual_seed(0)).double()
    problems: list[tuple[Sequence[Placement], Sequence[Placement]]] = [
        ((_StridedShard(0, split_factor=2), Shard(0)), (Replicate(), Shard(1))),
        ((Shard(1), Replicate()), (_StridedShard(0, split_factor=2), Shard(0))),
        ((Shard(0), Shard(1)), (Replicate(), Shard(-1))),
    ]
    faults: list[str | None] = []
    for source, target in problems:
        normal = [Shard(1) if placement == Shard(-1) else placement for placement in target]
        faults.append(check(redistribute(dtensor(whole, mesh, source), target), whole, normal))
    parts = torch.stack([whole * (place + 1) for place in range(2)])
    average = DTensor.from_local(parts[mesh.get_local_rank(1)], mesh, (Shard(0), Partial("avg")), run_check=False)
    got = redistribute(average, (Replicate(), Shard(1))).full_tensor()
    want = torch.cat([whole, whole]) * 1.5
    faults.append(None if torch.equal(got, want) else f"average: {got.tolist()}")
    greatest = DTensor.from_local(parts[mesh.get_local_rank(1)], mesh, (Shard(0), Partial("max")), run_check=False)
    got = redistribute(greatest, (Replicate(), Replicate())).to_local()
    faults.append(None if torch.equal(got, torch.cat([whole, whole]) * 2) else f"max: {got.tolist()}")
    return [fault for fault in faults if fault]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.embed(x)))
        return self.down(self.norm(hidden))


def _shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Odd on purpose: rows here, columns there, so that operators must redistribute."""
    places: dict[str, Sequence[Placement]] = {
        "embed.weight": (Shard(1), Replicate()),
        "up.weight": (Shard(0), Replicate()),
        "up.bias": (Shard(0), Replicate()),
        "down.weight": (Shard(0), Shard(1)),
    }
    for key, parameter in list(module._parameters.items()):
        if parameter is not None:
            place = places.get(f"{name}.{key}", (Replicate(), Replicate()))
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, place)))


def model_step(rank: int, served: bool) -> dict[str, object]:
    """Loss and gradients of a small sharded model, with stock DTensor or served."""
    mesh = device_mesh([0, 1, 2, 3], (2, 2))
    if rank > 3:
        return {}
    torch.manual_seed(0)
    net = distribute_module(_Net().double(), mesh, _shard)
    x = distribute_tensor(torch.randint(0, 12, (4, 6)), mesh, (Replicate(), Shard(0)))

    def step() -> dict[str, object]:
        out = net(x)
        out = out.redistribute(placements=(Shard(1), Shard(2)))
        loss = (out * out).redistribute(placements=(Replicate(), Replicate())).sum()
        loss.backward()
        result: dict[str, object] = {"loss": loss.full_tensor().tolist()}
        for name, parameter in net.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            result[name] = parameter.grad.full_tensor().tolist()
        return result

    if not served:
        return step()
    with serve_dtensor() as log:
        result = step()
    result["served"], result["left"] = log.served, dict(log.left)
    return result


def dtensor_gradient(rank: int) -> list[str]:
    """Backward to the input's placements, twice over, also from another mesh."""
    first, second = device_mesh([0, 1, 2, 3], (2, 2)), device_mesh(range(6), (6,))
    whole = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    faults: list[str] = []
    for target, placements in ((first, (Shard(1), Replicate())), (second, (Shard(1),))):
        if rank > 3 and target is first:
            continue
        x = dtensor(whole, first, (Shard(0), Replicate())).detach().requires_grad_()
        y = redistribute(x, placements, target)
        # d/dx sum(x^3) = 3 x^2, and again 6 x
        (gradient,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        fault = check(gradient.detach(), 3 * whole * whole, (Shard(0), Replicate()))
        (again,) = torch.autograd.grad(gradient.sum(), x)
        faults += [f for f in (fault, check(again, 6 * whole, (Shard(0), Replicate()))) if f]
    return faults


def masked_embedding(rank: int) -> tuple[bool, list[str]]:
    """An embedding split by rows gives a masked Partial, which only torch knows how to reduce."""
    mesh = device_mesh([0, 1, 2, 3], (4,))
    if rank > 3:
        return True, []
    weight = torch.arange(24.0).reshape(8, 3)
    index = torch.tensor([0, 7, 3, 3])
    with serve_dtensor() as log:
        rows = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        found = nn.functional.embedding(distribute_tensor(index, mesh, [Replicate()], src_data_rank=None), rows)
        whole = found.redistribute(placements=[Replicate()]).to_local()
    return torch.equal(whole, weight[index]), list(log.left)
