"""Making a group: what `init_process_group("sennit")` and `new_group` call on every member.

| the members | move bytes by |
|---|---|
| one rank | nothing |
| on one host | shared memory |
| on several hosts, as many on each | shared memory inside a host, sockets between counterparts: `Hosts` |
| on several hosts, unevenly | sockets |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from sennit.collective.runtime.backend_torch import SennitGroup
from sennit.collective.runtime.communicator_torch import Communicator, Solo
from sennit.collective.runtime.hosts_torch import Hosts
from sennit.collective.runtime.limits import explained
from sennit.collective.runtime.linked_torch import Linked
from sennit.collective.runtime.p2p_links import Links
from sennit.collective.runtime.private_torch import stay_unrecorded
from sennit.collective.runtime.rendezvous_torch import Rendezvous, group_by_host, host_identity, own_address
from sennit.collective.runtime.shared_torch import Shared
from sennit.collective.runtime.shm_segment import Exchange
from sennit.collective.selection import SelectionTable
from sennit.errors import CollectiveError

__all__ = ["HostSettings", "create_group"]

_COLLECTIVE = 1  # the kind of messages of collectives over all members


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Of this process: `interface` leads to other hosts; `threads` are those of `ShmEndpoint.create`; `local_ranks` is
    how many processes the launcher has started on this host, where it says so.
    """

    interface: str | None = None
    threads: int | None = None
    local_ranks: int | None = None

    @property
    def sharers(self) -> int:
        """Processes that share the cores of this host: those of the default group, if nobody says how many are here."""
        if self.local_ranks is not None:
            return self.local_ranks
        return int(dist.get_world_size()) if dist.is_initialized() else 1


def create_group(
    options: Any, table: SelectionTable | None = None, settings: HostSettings | None = None
) -> SennitGroup:
    """`options` is what c10d passes to a creator: store, rank, size, timeout, name.

    `table` is a tuned table for a group on one host.
    """
    stay_unrecorded("sennit")
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout = options.timeout.total_seconds()
    name = f"{options.group_id}-{rank}"
    if table is not None:
        _check_table(table, size)
    if size == 1:
        return SennitGroup(store, Solo(), None, (0,), name=name, timeout=timeout)
    meet = Rendezvous(store, rank, size, timeout)
    try:
        return _join(options, meet, table, settings or HostSettings(), name)
    except OSError as error:
        told = explained(error, f"rank {rank} cannot set up the group", f"a sennit group of {size} ranks")
        meet.give_up(told)
        raise told from error
    except BaseException as error:
        meet.give_up(error)
        raise


def _join(
    options: Any, meet: Rendezvous, table: SelectionTable | None, settings: HostSettings, name: str
) -> SennitGroup:
    timeout = meet.timeout
    address = own_address(meet.store, settings.interface)
    links = Links(meet.rank, meet, host=host_identity(), address=address, timeout=timeout)
    communicator: Communicator | None = None
    try:
        communicator = _communicator(links, meet, table, settings)
        members = tuple(options.global_ranks_in_group) or tuple(range(meet.size))
        group = SennitGroup(meet.store, communicator, links, members, name=name, timeout=timeout)
        meet(b"")  # from here on it breaks, and whoever is in it is told
        return group
    except BaseException:
        if communicator is not None:
            communicator.close()
        links.close()
        raise


def _communicator(links: Links, meet: Rendezvous, table: SelectionTable | None, settings: HostSettings) -> Communicator:
    hosts = group_by_host([address.host for address in links.addresses])
    if len(hosts) == 1:
        shared = _shared(links.rank, range(links.size), meet, meet.timeout, settings)
        if table is not None:
            shared.group.use(table)
        return shared
    if len({len(ranks) for ranks in hosts}) > 1:
        return Linked(links, range(links.size), _COLLECTIVE)
    mine = next(ranks for ranks in hosts if links.rank in ranks)

    def meet_on_host(data: bytes) -> list[bytes]:
        answers = meet(data)  # all ranks of the group take part, so that all count the same calls
        return [answers[rank] for rank in mine]

    if len(mine) == 1:
        return Hosts(links, hosts, Solo())
    row = _shared(mine.index(links.rank), mine, meet_on_host, meet.timeout, settings)
    row.group.sleep_soon()
    return Hosts(links, hosts, row)


def _shared(rank: int, names: Sequence[int], exchange: Exchange, timeout: float, settings: HostSettings) -> Shared:
    threads, sharers = settings.threads, settings.sharers
    return Shared.create(rank, names, exchange, timeout=timeout, threads=threads, sharers=sharers)


def _check_table(table: SelectionTable, size: int) -> None:
    if not isinstance(table, SelectionTable):
        raise CollectiveError(
            f"pg_options of type {type(table).__name__}",
            where='init_process_group("sennit")',
            fix="pass a sennit.collective.selection.SelectionTable, or nothing",
        )
    if table.nodes * table.per_node != size:
        raise CollectiveError(
            f"a table for {table.nodes} nodes of {table.per_node} ranks in a group of {size}",
            where='init_process_group("sennit")',
            fix="pass a table that was filled for as many ranks",
        )
