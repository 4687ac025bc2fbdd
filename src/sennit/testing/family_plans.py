"""How each family of models is split: which layers by their outputs (columns), which by their inputs (rows), which
modules are the layers of a pipeline. From these few names the plans of the zoo are made for any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sennit.errors import PlanError
from sennit.ir.graph import Graph, Phase
from sennit.ir.mesh import Mesh
from sennit.plan import Plan, data_inputs, data_parallel, pipeline, tensor_parallel, transform, zoo

__all__ = ["Splits", "family_mesh", "family_plan", "splits"]


@dataclass(frozen=True, slots=True)
class Splits:
    """Globs of modules: of matrix products, of a fused query, key and value product, of convolutions; and the layers in
    their order. A family that needs the whole batch at once (batch statistics) has no micro-batches.
    """

    layers: tuple[str, ...]
    column: str = ""
    row: str = ""
    qkv: str | None = None
    out_channels: str = ""
    in_channels: str = ""
    microbatches: bool = True


def splits() -> Mapping[str, Splits]:
    """By the names of `families_torch.families`, of two layers (or blocks)."""
    projections = "*.q_proj|*.k_proj|*.v_proj"
    llama = Splits(_two("model.layers"), f"{projections}|*.gate_proj|*.up_proj", "*.o_proj|*.down_proj")
    vit = Splits(_two("vit.layers"), f"{projections}|*.fc1", "*.o_proj|*.fc2")
    fused = Splits(_two("model.blocks"), "*.mlp.fc1", "*.attn.proj|*.mlp.fc2", qkv="*.attn.qkv")
    resnet = Splits(
        ("resnet.encoder.stages.0", "resnet.encoder.stages.1"),
        out_channels="*.layer.0.convolution",
        in_channels="*.layer.1.convolution",
        microbatches=False,
    )
    return {
        "gpt2": Splits(_two("transformer.h"), "*.c_fc", "*.c_proj", qkv="*.c_attn"),
        "llama": llama,
        # the loss that balances the experts is no sum over samples
        "mixtral": Splits(llama.layers, projections, "*.o_proj", microbatches=False),
        "mixtral batch": Splits(llama.layers, projections, "*.o_proj"),
        "t5": Splits((*_two("encoder.block"), *_two("decoder.block")), "*.q|*.k|*.v|*.wi", "*.o|*.wo"),
        "mbart": Splits(
            (*_two("model.encoder.layers"), *_two("model.decoder.layers")), f"{projections}|*.fc1", "*.out_proj|*.fc2"
        ),
        "bert": Splits(
            _two("bert.encoder.layer"),
            "*.query|*.key|*.value|*.intermediate.dense",
            "*.attention.output.dense|*.layer.[01].output.dense",
        ),
        "vit": vit,
        "swin": Splits(_two("swin.encoder.layers"), vit.column, vit.row),
        "resnet": resnet,
        "timm vit": fused,
        "timm swin": Splits(_two("model.layers"), fused.column, fused.row, fused.qkv),
        "timm resnet": Splits(
            ("model.layer1", "model.layer2"), out_channels="*.conv1", in_channels="*.conv2", microbatches=False
        ),
        # its blocks run several times, each pass on the result of the one before: a cut between them would go back and
        # forth
        "evoformer": Splits(
            ("blocks.0", "residue_head"), "*.up|*.query|*.key|*.value|*.gate", "*.down|*.attention.out"
        ),
    }


def family_plan(name: str, how: str) -> Callable[[Graph, Mesh], Plan]:
    """A plan of a family: by its names (`data`, `tensor`, `pipeline`), or as the zoo finds it in the graph (`found`,
    `sequence`, `context`, `experts`, `co-shard`; `interlaced`, `interleaved`, `zero bubble`, `v`, `chimera`,
    `recycled`).
    """
    split = splits()[name]
    match how:
        case "found":
            return zoo.tensor_parallel
        case "sequence":
            return partial(zoo.tensor_parallel, sequence=True)
        case "context":
            return zoo.context_parallel
        case "experts":
            return zoo.expert_parallel
        case "co-shard":
            return partial(zoo.co_shard, pieces=2)
        case "interlaced":
            return partial(zoo.interlaced, layers=split.layers)
        case "chimera":
            return partial(zoo.chimera, layers=split.layers)
        case "recycled":
            return zoo.recycled
        case "interleaved" | "zero bubble" | "v":
            schedule = {"interleaved": "interleaved", "zero bubble": "zero bubble h1", "v": "dual pipe v"}[how]
            return partial(pipeline, layers=split.layers, schedule=schedule)
        case "data":
            return data_parallel
        case "tensor" if split.column:
            return partial(tensor_parallel, column=split.column, row=split.row, qkv=split.qkv)
        case "tensor":
            return partial(_channels, split=split)
        case "pipeline":
            return partial(pipeline, layers=split.layers)
        case _:
            raise PlanError(f"there is no plan {how!r}", fix="use one of those that family_plan names")


def family_mesh(name: str, how: str, ranks: int) -> Mesh:
    """The plan's axis of two devices, and the batch over the rest; a pipeline with two micro-batches."""
    rest = {} if how == "data" else {"dp": ranks // 2} if ranks > 2 else {}
    match how:
        case "data":
            return Mesh.make({"dp": ranks})
        case "tensor" | "found" | "sequence":
            return Mesh.make({**rest, "tp": 2})
        case "co-shard" if "swin" in name:  # its first layers have two heads: one for each piece
            return Mesh.make({"dp": ranks})
        case "co-shard":
            return Mesh.make({**rest, "tp": 2})
        case "context":
            return Mesh.make({**rest, "cp": 2})
        case "experts":
            return Mesh.make({**rest, "ep": 2})
        case "chimera":  # both ways have rows of each micro-batch
            stages = 4 if ranks >= 4 and len(splits()[name].layers) >= 4 else 2
            return Mesh.make({"pp": stages, "dp": ranks // stages}, {"mb": 2 if stages == ranks else 1})
        case "v":  # twice as many micro-batches as stages
            return Mesh.make({"pp": 2, **rest}, {"mb": 4})
        case _:
            return Mesh.make({"pp": 2, **rest}, {"mb": 2} if splits()[name].microbatches else None)


def _channels(graph: Graph, mesh: Mesh, *, split: Splits) -> Plan:
    """Pairs of convolutions, like the two products of an MLP: the first by output channels, the second by input
    channels.
    """
    plan = Plan("channel parallel", graph, mesh)
    if "dp" in mesh:
        plan = transform(plan, data_inputs(graph), dim=0, axis="dp")
    kind = "aten.convolution.default"
    plan = transform(plan, graph.select(split.out_channels, kind, Phase.FORWARD), dim="o", axis="tp")
    return transform(plan, graph.select(split.in_channels, kind, Phase.FORWARD), dim="c", axis="tp")


def _two(path: str) -> tuple[str, str]:
    return f"{path}.0", f"{path}.1"
