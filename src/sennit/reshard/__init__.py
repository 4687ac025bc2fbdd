"""Distribution change -> sequence of collectives."""

from sennit.ir.exchange import Transfer, transfers
from sennit.reshard.execute_numpy import run_numpy
from sennit.reshard.moves import Move, MoveKind, moves
from sennit.reshard.planner import Mode, plan
from sennit.reshard.redistribution import Candidate, Certificate, Redistribution, Step, StepKind

__all__ = [
    "Candidate",
    "Certificate",
    "Mode",
    "Move",
    "MoveKind",
    "Redistribution",
    "Step",
    "StepKind",
    "Transfer",
    "moves",
    "plan",
    "run_numpy",
    "transfers",
]
