"""Which place a run's checkpoints have, decided once by all ranks together, before the first step."""

from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.commit import sweep
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.places.addressed import AtAddress
from shoal.checkpoint.places.folders import Folders, find_folders
from shoal.checkpoint.places.hosts import HostFolders
from shoal.checkpoint.places.storage import OneFolder, Storage
from shoal.comm.world import World
from shoal.core.errors import AgreedError


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A place, and what people should hear of it."""

    storage: Storage
    said: str = ""


def open_storage(root: Path, *, world: World, config: CheckpointConfig) -> Opened:
    """The place that a recipe asks for, swept of what dead saves have left. All ranks call it together.

    Args:
        root: this rank's folder of checkpoints, in its run directory.
        world: the ranks.
        config: names the place.

    Raises:
        AgreedError: it has to be one folder, and the ranks see several; names them. All ranks raise together.
        RunError: a rank cannot write there.
    """
    folders = find_folders(world, root.parent)
    if config.address is not None:
        return Opened(storage=AtAddress(config.address, root, folders, world=world))
    if folders.is_shared:
        if world.is_first and root.is_dir():
            sweep(root)
        world.barrier()
        return Opened(storage=OneFolder(root, rank=world.rank))
    if config.place == "shared":
        raise AgreedError(_describe_refusal(root, folders))
    storage = HostFolders(root, folders, world=world, gathers=config.place != "hosts")
    said = ""
    if config.place == "auto":
        said = (
            f"the ranks have no run directory in common ({folders.describe()}): checkpoints are gathered to {storage.where}; set "
            "checkpoint.place to choose otherwise"
        )
    return Opened(storage=storage, said=said)


def _describe_refusal(root: Path, folders: Folders) -> str:
    return (
        f'checkpoint.place = "shared", and {root.parent} is {len(folders.all_leaders)} folders that do not share their files '
        f'({folders.describe()}); give a --run-dir that all hosts mount, or set checkpoint.place to "first", which gathers '
        f'checkpoints to {folders.hosts[0]}, to "hosts", with which each host keeps its part, or to an address'
    )
