"""Runs a function on several ranks with a real gloo process group: one process each, results back in rank order."""

from __future__ import annotations

import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    local_size: int | None = None,
    timeout: float = 240.0,
) -> list[Any]:
    """Calls function(*arguments) on every rank; returns the results by rank, or raises with the first traceback."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["training.loop"]
    )  # so that the ranks start in moments, not each importing torch
    results = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=_entry,
            args=(function, arguments, rank, world_size, local_size or world_size, port, results),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    collected: dict[int, Any] = {}
    try:
        while len(collected) < world_size:
            try:
                rank, value, failure = results.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(
                    f"only ranks {sorted(collected)} of {world_size} answered in {timeout:.0f} s"
                ) from None
            if failure is not None:
                raise AssertionError(f"rank {rank} failed:\n{failure}")
            collected[rank] = value
    finally:
        for process in processes:
            process.join(timeout=10 if len(collected) == world_size else 0)
            if process.is_alive():
                process.kill()
    return [collected[rank] for rank in range(world_size)]


def _entry(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world_size: int,
    local_size: int,
    port: int,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % local_size),
        LOCAL_WORLD_SIZE=str(local_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        results.put((rank, function(*arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
