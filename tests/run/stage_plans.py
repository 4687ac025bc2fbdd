"""Plans whose stages share devices, lie on all of them, or have other meshes than their neighbours: for a GPT of two
blocks on four devices. They plan training and evaluation alike.
"""

from __future__ import annotations

from sennit.capture.rewrite import take_apart
from sennit.ir.graph import Graph, Op, Phase
from sennit.ir.mesh import Axis, Mesh
from sennit.plan import Plan, data_inputs, place, transform

HALVES = (
    "blocks.0.norm1|blocks.0.attention*",
    "blocks.0.norm2|blocks.0.up|blocks.0.down",
    "blocks.1.norm1|blocks.1.attention*",
    "blocks.1.norm2|blocks.1.up|blocks.1.down",
)


def _forward(graph: Graph, modules: str) -> tuple[Op, ...]:
    return tuple(graph.select(modules, phase=Phase.FORWARD))


def _on(mesh: Mesh, devices: tuple[int, ...], **axes: int) -> Mesh:
    """Space axes on some devices, with the time axes of a mesh."""
    return Mesh((*(Axis(name, size) for name, size in axes.items()), *mesh.time), devices)


def interleaved(graph: Graph, mesh: Mesh) -> Plan:
    """Four stages on two pairs: half a block each, in turns."""
    plan = Plan("interleaved", graph, mesh)
    for stage, modules in enumerate(HALVES):
        plan = place(plan, _forward(graph, modules), mesh.at(pp=stage % 2), stage)
    return transform(plan, data_inputs(graph), dim=0, axis=("mb", "dp"))


def chimera(graph: Graph, mesh: Mesh) -> Plan:
    """Stage i on the devices i and 3 - i: half of the batch goes down the devices, half goes up."""
    plan = Plan("chimera", graph, mesh)
    for stage, modules in enumerate(HALVES):
        plan = place(plan, _forward(graph, modules), _on(mesh, (stage, 3 - stage), dp=2), stage)
    return transform(plan, data_inputs(graph), dim=0, axis=("mb", "dp"))


def interlaced(graph: Graph, mesh: Mesh) -> Plan:
    """The embedding and the head split over all devices, the blocks in stages between them."""
    kinds = "aten._log_softmax.default|aten._log_softmax_backward_data.default"
    graph = take_apart(graph, graph.select(kind=kinds))
    plan = place(Plan("interlaced", graph, mesh), _forward(graph, "tokens"), mesh)
    for stage in range(2):
        plan = place(plan, _forward(graph, f"blocks.{stage}|blocks.{stage}.*"), mesh.at(pp=stage))
    plan = place(plan, _forward(graph, "head"), mesh, 3)
    plan = transform(plan, data_inputs(graph), dim=0, axis=("dp", "mb"))
    plan = transform(plan, graph.select("tokens", "aten.embedding.default", Phase.FORWARD), dim="v", axis="pp")
    return transform(plan, graph.select("head", "aten.mm.default", Phase.FORWARD), dim="n", axis="pp")


def unequal(graph: Graph, mesh: Mesh) -> Plan:
    """The first block data parallel on one device more than the second has, which is tensor parallel, and shares two of
    them.
    """
    plan = Plan("unequal", graph, mesh)
    plan = place(plan, _forward(graph, "blocks.0|blocks.0.*"), _on(mesh, (0, 1, 2, 3), dp=4))
    plan = place(plan, _forward(graph, "blocks.1|blocks.1.*"), _on(mesh, (3, 1), tp=2))
    plan = transform(plan, data_inputs(graph), dim=0, axis=("mb", "dp"))
    products = "aten.addmm.default"
    up = graph.select("blocks.1.up", products, Phase.FORWARD)
    down = graph.select("blocks.1.attention.proj|blocks.1.down", products, Phase.FORWARD)
    qkv = graph.select("blocks.1.attention.qkv", products, Phase.FORWARD)
    plan = transform(plan, qkv, dim="n", axis="tp", chunks=3)
    return transform(transform(plan, up, dim="n", axis="tp"), down, dim="k", axis="tp")


STAGE_PLANS = {
    "interleaved": (interleaved, "pp=2,dp=2;mb=2"),
    "chimera": (chimera, "x=4;mb=2"),
    "interlaced": (interlaced, "pp=2,dp=2;mb=2"),
    "unequal": (unequal, "x=4;mb=2"),
}
