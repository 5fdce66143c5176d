"""
Sessions of boto3, which read the descriptions of S3 once in a process. The only module that imports boto3.

The descriptions are megabytes of JSON. boto3 parses them for each session, which takes six times as long as making a
client of parsed ones, and sinks open a store for each checkpoint that they publish.
"""

from __future__ import annotations

import os
from functools import lru_cache

import boto3
from botocore.loaders import Loader
from botocore.session import get_session


class _SharedLoader(Loader):
    @property
    def search_paths(self) -> list[str]:
        """Return the folders; a copy, to which each session of boto3 adds one that clients do not need."""
        return [*super().search_paths]


@lru_cache(4)
def shared_loader(data_path: str | None) -> Loader:
    """Return the loader of all sessions that have this `AWS_DATA_PATH`."""
    folders = data_path.split(os.pathsep) if data_path else []
    return _SharedLoader(extra_search_paths=[os.path.expanduser(os.path.expandvars(folder)) for folder in folders])


def new_session(region: str | None) -> boto3.session.Session:
    """Return a session for one store: boto3's own shared one is not thread-safe."""
    core = get_session()
    core.register_component("data_loader", shared_loader(core.get_config_variable("data_path")))
    return boto3.session.Session(region_name=region, botocore_session=core)
