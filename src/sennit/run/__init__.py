"""Program -> readable Python per lane, executed on torch.distributed or in one process."""

from sennit.run.emit import emit_lane
from sennit.run.processes import LocalRanks, RunResult
from sennit.run.threads import run_in_process

__all__ = ["LocalRanks", "RunResult", "emit_lane", "run_in_process"]
