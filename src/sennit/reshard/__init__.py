"""Distribution change -> sequence of collectives."""

from sennit.reshard.moves import Move, MoveKind, moves

__all__ = ["Move", "MoveKind", "moves"]
