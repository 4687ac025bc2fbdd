"""What other systems could do, tuned as an expert would, as spaces for the same search and the same simulator.

| | splits | stages | schedules | replicas share | units |
|---|---|---|---|---|---|
| Megatron-LM | tensor, with or without sequence | any, equal meshes | 1F1B, interleaved | nothing, or optimizer state | keep all, products, or nothing, layer by layer |
| DeepSpeed ZeRO | none | one | - | state, gradients, parameters | keep all or nothing |
| Alpa | tensor | any, with as many replicas each as suits it | 1F1B | nothing, or optimizer state | keep all or nothing |

Each is searched exhaustively (by branch and bound) over its meshes and micro-batch sizes, and is given more than its
default: what to keep is chosen for each stage under its memory, which Megatron leaves to a flag. Alpa's stages may have
meshes of different sizes (`unequal.py`), as in its own search; all of them are split the same way.

`published` are the same systems as the SuperScaler paper could run them (January 2023): Megatron-LM with one flag for
recomputation in all layers, equally many layers in each stage, 1F1B, no split of the sequence and no sharing of
optimizer state; DeepSpeed's ZeRO-3 with all layers recomputed or none; Alpa with stages cut by time, 1F1B, all layers
recomputed or none. Each is tuned as exhaustively, over its meshes and micro-batch sizes.
"""

from __future__ import annotations

from dataclasses import replace

from sennit.plan.search.choice import Kind
from sennit.plan.search.space import Space
from sennit.plan.search.ways import Keep

__all__ = ["baselines", "published"]


def baselines() -> tuple[Space, ...]:
    return (
        Space(name="Megatron-style", zeros=(0, 1), kinds=(Kind.ONE_F_ONE_B, Kind.INTERLEAVED), unequal=False),
        Space(name="DeepSpeed-ZeRO-style", tps=(1,), most_pp=1, zeros=(1, 2, 3), keeps=(Keep.ALL, Keep.NONE)),
        Space(
            name="Alpa-style",
            sequence=(False,),
            zeros=(0, 1),
            keeps=(Keep.ALL, Keep.NONE),
            kinds=(Kind.ONE_F_ONE_B,),
        ),
    )


def published() -> tuple[Space, ...]:
    """Several spaces of one name are one system with a flag: its best plan is the best of all."""
    found: list[Space] = []
    for keep in (Keep.ALL, Keep.NONE):
        one_keep = Space(keeps=(keep,), kinds=(Kind.ONE_F_ONE_B,), sequence=(False,), zeros=(0,))
        found += [
            replace(one_keep, name="Megatron-LM", equal_stages=True, unequal=False),
            replace(one_keep, name="DeepSpeed ZeRO-3", tps=(1,), most_pp=1, zeros=(3,)),
            replace(one_keep, name="Alpa"),
        ]
    return tuple(found)
