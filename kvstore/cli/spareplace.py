"""`kvstore cluster replace-node` with a spare: the first one that answers and is no smaller than the nodes beside it
gets the place.

Four steps, each good to stop after; given again the command goes on with the next one:

1. The server of the old node is asked. One that answers as that node is left alone.
2. The map is written: the spare leaves the list and has the place. A place whose server says that it is a spare is
   one whose replacement came so far.
3. The root of its group, if it is here, notes the new node.
4. The server of the spare is told. From then on it answers as that node.
"""

from __future__ import annotations

from dataclasses import dataclass

from efs.clock import SystemClock
from efs.clusterfile import ClusterConfig, Spare, place_spare, require_number
from efs.clustermap import parse_etcd_url
from efs.endpoint import Endpoint
from efs.errors import EfsError, InvalidArgument
from efs.limits import STRIPE_SHARDS
from efs.nodedir import NodePlace
from efs.osio import Io, SystemIo
from efs.replace import note_in_root, require_root_of
from efs.spares import Standing, first_spare, standing, tell_spare, why_not
from efs.types import SpareInfo
from kvstore.cli.description import Description, described, rewritten, run_alone, tokens_of, with_etcd
from kvstore.cli.failures import NOT_ALL
from kvstore.cli.terminal import Terminal


@dataclass(frozen=True, slots=True)
class _Placed:
    """The map with the spare in the place, what the spare said, and those that did not answer. changed: by this."""

    config: ClusterConfig
    info: SpareInfo
    skipped: list[tuple[Spare, str]]
    changed: bool


def replace_by_spare(terminal: Terminal, where: str, number: int, root: str | None) -> int:
    """The exit code. root: of the node's group, None for that of the cluster."""
    io, clock = SystemIo(), SystemClock()
    description = described(io, where)
    require_number(number, len(description.config.node_ids))
    place = NodePlace(description.config.cluster_id, *divmod(number, STRIPE_SHARDS))
    if root is not None:
        require_root_of(io, root, place)
    placed = _placed(io, description, number)
    config, endpoint = placed.config, placed.config.endpoints[number]
    note_in_root(io, root or description.root, place, placed.info.directory, placed.info.node_id)
    why: str | None = None
    try:
        run_alone(tell_spare(config, number, tokens_of(io, config), clock))
    except EfsError as error:
        why = why_not(endpoint, error)
    terminal.result(
        {"node": number, "node_id": placed.info.node_id, "address": str(endpoint),
         "incarnation": config.incarnations[number], "version": config.version, "directory": placed.info.directory,
         "changed": placed.changed, "told": why is None,
         "skipped": [{"node_id": spare.node_id, "address": str(spare.endpoint), "why": reason}
                     for spare, reason in placed.skipped]},
        lambda console: console.print(
            f"node {number} is {placed.info.node_id} at {endpoint} (incarnation {config.incarnations[number]}) in "
            f"version {config.version} of the map; {_next(endpoint, why)}"),
    )
    for spare, reason in placed.skipped:
        terminal.remark(f"skipped: the spare {spare.node_id} at {spare.endpoint}: {reason}")
    return 0 if why is None else NOT_ALL


def _next(endpoint: Endpoint, why: str | None) -> str:
    if why is None:
        return "now run kvstore repair"
    return f"its server was not told of that: {why}; give this command again"


def _placed(io: Io, description: Description, number: int) -> _Placed:
    config, clock = description.config, SystemClock()
    tokens = tokens_of(io, config)
    how, untold = run_alone(standing(config, number, tokens, clock))
    if how is Standing.SERVED:
        raise InvalidArgument(f"node {number} is being served at {config.endpoints[number]}: stop its server first")
    if untold is not None:
        return _Placed(config, untold, [], changed=False)
    if not config.spares:
        raise InvalidArgument("the cluster has no spare: add one with `kvstore cluster add-spare`, or give --directory "
                              "and --address")
    _require_no_lease(description, number)
    spare, info, skipped = run_alone(first_spare(config, number, tokens, clock))
    changed = rewritten(description, lambda path, held: place_spare(io, path, held, number, spare.node_id),
                        lambda found: found.with_spare_placed(number, spare.node_id))
    return _Placed(changed, info, skipped, changed=True)


def _require_no_lease(description: Description, number: int) -> None:
    """A server that cannot be reached from here may be there for others."""
    if description.held is None:
        return
    notes = with_etcd(parse_etcd_url(description.where), lambda store: store.servers())
    if description.config.node_ids[number] in notes:
        raise InvalidArgument(f"node {number} is being served at {description.config.endpoints[number]}: stop its "
                              "server first, and wait for its lease to end")
