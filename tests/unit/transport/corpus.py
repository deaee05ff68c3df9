"""Log sets with the verdict that each must get, and what its reason or diagnosis must say.

Every set is a healthy job of ``builder.job`` in some version, changed by the few lines shown here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.unit.transport.builder import (
    EXPECTED_BYTES,
    Job,
    RankLog,
    Versions,
    job,
    to_sockets,
    to_tcp_provider,
)
from training.transport.verdict import Verdict


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[Path], Path]
    verdict: Verdict
    says: str = ""
    diagnosis: str | None = None
    gpudirect_required: bool = False


_CASES: list[Case] = []


def _cut(folder: Path, host_part: str, keep: Callable[[str], str]) -> None:
    path = next(iter(sorted(folder.glob(f"*{host_part}*.log"))))
    path.write_text(keep(path.read_text()))


def case(
    verdict: Verdict, says: str = "", *, diagnosis: str | None = None, gpudirect_required: bool = False
) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    def add(build: Callable[[Path], Path]) -> Callable[[Path], Path]:
        name = build.__name__.strip("_").replace("_", "-")
        _CASES.append(Case(name, build, verdict, says, diagnosis, gpudirect_required))
        return build

    return add


# -- healthy, over the versions
# ---------------------------------------------------------------------------------

VERSIONS = (
    Versions("2.18.6", "1.7.4"),
    Versions("2.19.3", "1.8.1"),
    Versions("2.20.5", "1.9.1"),
    Versions("2.21.5", "1.11.0"),
    Versions("2.22.3", "1.12.1"),
    Versions("2.23.4", "1.13.2"),
    Versions("2.25.1", "1.14.2"),
    Versions("2.26.2", "1.15.0"),
    Versions("2.27.5", "1.16.3"),
    Versions("2.28.3", "1.18.0"),
    Versions("2.29.7", "1.20.0"),
    Versions("2.30.4", "1.22.0"),
)

for _versions in VERSIONS:

    def _build(folder: Path, versions: Versions = _versions) -> Path:
        return job(versions=versions).write(folder)

    _CASES.append(
        Case(f"healthy-nccl-{_versions.nccl}-plugin-{_versions.plugin}", _build, "efa", "all 8 ranks")
    )

for _versions in (VERSIONS[0], VERSIONS[3], VERSIONS[4], VERSIONS[9], VERSIONS[10], VERSIONS[11]):
    for _split in (False, True):

        def _build_hybrid(folder: Path, versions: Versions = _versions, split: bool = _split) -> Path:
            return job(versions=versions, hybrid=True, split=split).write(folder)

        _name = f"healthy-hybrid-{'split' if _split else 'own'}-nccl-{_versions.nccl}"
        _CASES.append(Case(_name, _build_hybrid, "efa", "all 8 ranks"))


@case("efa", "all 8 ranks on 4 hosts")
def healthy_four_hosts(folder: Path) -> Path:
    return job(hosts=4, gpus=2).write(folder)


@case("efa", "all 2 ranks on 2 hosts")
def healthy_one_gpu_per_host(folder: Path) -> Path:
    return job(gpus=1).write(folder)


@case("efa", "all 16 ranks", gpudirect_required=True)
def healthy_p5_gpudirect(folder: Path) -> Path:
    return job(gpus=8, num_channels=16, num_nics=32, gpudirect=True).write(folder)


@case("efa")
def healthy_pxn_and_shared(folder: Path) -> Path:
    """PXN sends through another GPU of the node, which the sending end prints in parentheses."""

    def pxn(rank: RankLog) -> None:
        rank.messages = [
            m.replace("via NET/Libfabric/0", "via NET/Libfabric/0(2)/GDRDMA(PCI)/Shared")
            if "[send]" in m
            else m
            for m in rank.messages
        ]

    return job().each(pxn).write(folder)


@case("efa")
def healthy_provider_with_old_suffix(folder: Path) -> Path:
    return (
        job(versions=Versions("2.18.6", "1.7.4"))
        .each(lambda rank: rank.replace("is efa", "is efa;ofi_rxr"))
        .write(folder)
    )


@case("efa")
def healthy_net_named_ofi(folder: Path) -> Path:
    """The plugin takes the name that NCCL_NET asks for."""

    def rename(rank: RankLog) -> None:
        rank.messages = [
            m.replace("Libfabric/", "OFI/").replace("network Libfabric", "network OFI") for m in rank.messages
        ]

    return job().each(rename).write(folder)


@case("efa")
def healthy_timestamps_on_every_line(folder: Path) -> Path:
    job().write(folder)
    for path in folder.glob("*.log"):
        lines = path.read_text().splitlines()
        path.write_text("".join(f"[2026-11-30 08:15:02] {line}\n" for line in lines))
    return folder


@case("efa")
def healthy_all_ranks_interleaved_in_one_file(folder: Path) -> Path:
    """NCCL_DEBUG_FILE without %h.%p: all processes write into one file, line by line."""
    built = job()
    built.write(folder)
    for path in folder.glob("*.log"):
        path.unlink()
    queues = [rank.lines() for rank in built.ranks]
    longest = max(len(queue) for queue in queues)
    mixed = [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
    (folder / "nccl.log").write_text("".join(f"{line}\n" for line in mixed))
    return folder


@case("efa")
def healthy_counter_wraps(folder: Path) -> Path:
    built = job()
    device = built.counters[built.hosts[0]]["rdmap0s6"]
    device["before"]["tx_bytes"] = 2**64 - 1000
    device["after"]["tx_bytes"] = EXPECTED_BYTES
    return built.write(folder)


@case("efa")
def healthy_expected_bytes_at_the_top(folder: Path) -> Path:
    """counters.json with the expected bytes of all hosts in one object."""
    built = job()
    built.counters["expected_bytes"] = {h: built.counters[h].pop("expected_bytes") for h in built.hosts}
    return built.write(folder)


# -- another transport
# ------------------------------------------------------------------------------------------


def _no_efa_bytes(built: Job) -> Job:
    return built.count_bytes(share=0.0)


@case("tcp", "network Socket", diagnosis="plugin-not-found")
def sockets_plugin_missing_new(folder: Path) -> Path:
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        to_sockets(rank, built.versions)
        rank.messages[1:1] = built.versions.missing_plugin_lines()
    return built.write(folder)


@case("tcp", "network Socket", diagnosis="plugin-not-found")
def sockets_plugin_missing_old(folder: Path) -> Path:
    built = _no_efa_bytes(job(versions=Versions("2.18.6", "1.7.4")))
    for rank in built.ranks:
        to_sockets(rank, built.versions)
        rank.messages[1:1] = built.versions.missing_plugin_lines()
    return built.write(folder)


@case("tcp", "network Socket", diagnosis="plugin-not-found")
def sockets_plugin_missing_2_25(folder: Path) -> Path:
    built = _no_efa_bytes(job(versions=Versions("2.25.1", "1.14.2")))
    for rank in built.ranks:
        to_sockets(rank, built.versions)
        rank.messages[1:1] = built.versions.missing_plugin_lines()
    return built.write(folder)


@case("tcp", diagnosis="plugin-failed")
def sockets_after_plugin_failed(folder: Path) -> Path:
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        to_sockets(rank, built.versions)
        rank.messages[1:1] = [
            "WARN NET/OFI Unable to find a protocol that worked.  Failing initialization.",
            "WARN NET/OFI aws-ofi-nccl initialization failed",
        ]
    return built.write(folder)


@case("tcp", diagnosis="plugin-glibc")
def sockets_plugin_needs_newer_glibc(folder: Path) -> Path:
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        to_sockets(rank, built.versions)
        rank.messages.insert(
            1,
            "NET/Plugin: libnccl-net-ofi.so: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not "
            "found (required by libnccl-net-ofi.so)",
        )
    return built.write(folder)


@case("tcp", diagnosis="wrong-interface")
def sockets_on_the_pod_identity_link(folder: Path) -> Path:
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        to_sockets(rank, built.versions)
        rank.messages = [
            m.replace(f"eth0:10.0.{rank.rank}.12", "pod-id-link0:169.254.170.23") for m in rank.messages
        ]
    return built.write(folder)


@case("tcp", diagnosis="plugin-disabled")
def sockets_asked_for_by_the_tcp_leg(folder: Path) -> Path:
    """The TCP leg of `finetune compare`: NCCL_NET=Socket, NCCL_NET_PLUGIN=none."""
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        to_sockets(rank, built.versions)
        rank.messages[1:1] = [
            "NCCL_NET set by environment to Socket",
            "NCCL_NET_PLUGIN set by environment to none",
        ]
        rank.drop("NCCL_NET_PLUGIN set by environment to ofi")
    return built.write(folder)


@case("tcp", "network Socket")
def sockets_without_channel_lines(folder: Path) -> Path:
    """No other network was there to carry data, so that channels need not be shown."""
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        to_sockets(rank, built.versions)
        rank.messages = [m for m in rank.messages if "via NET/" not in m]
    return built.write(folder)


@case("tcp", "provider tcp", diagnosis="provider-forced")
def tcp_through_libfabric_new(folder: Path) -> Path:
    built = _no_efa_bytes(job())
    return built.each(lambda rank: to_tcp_provider(rank, built.versions)).write(folder)


@case("tcp", "provider tcp", diagnosis="provider-forced")
def tcp_through_libfabric_old(folder: Path) -> Path:
    built = _no_efa_bytes(job(versions=Versions("2.21.5", "1.11.0")))
    return built.each(lambda rank: to_tcp_provider(rank, built.versions)).write(folder)


@case("tcp", "provider sockets", diagnosis="provider-forced")
def sockets_provider_through_libfabric(folder: Path) -> Path:
    built = _no_efa_bytes(job(versions=Versions("2.19.3", "1.8.1")))
    return built.each(lambda rank: rank.replace("Provider is efa", "Provider is sockets")).write(folder)


@case("tcp")
def sockets_without_counters(folder: Path) -> Path:
    built = job()
    built.counters = {}
    return built.each(lambda rank: to_sockets(rank, built.versions)).write(folder)


@case("tcp", "gloo")
def gloo_two_hosts(folder: Path) -> Path:
    built = job()
    built.backend, built.counters = "gloo", {}
    for rank in built.ranks:
        rank.messages = []
    return built.write(folder)


@case("mixed", "rank 4 on TCP")
def one_rank_fell_back_to_sockets(folder: Path) -> Path:
    built = job()
    to_sockets(built.ranks[4], built.versions)
    return built.write(folder)


@case("mixed", "rank 3 on TCP", diagnosis="provider-forced")
def one_rank_on_the_tcp_provider(folder: Path) -> Path:
    built = job()
    to_tcp_provider(built.ranks[3], built.versions)
    return built.write(folder)


@case("mixed", "rank 4-7 on TCP")
def one_host_fell_back(folder: Path) -> Path:
    built = job(hybrid=True)
    for rank in built.ranks[4:]:
        to_sockets(rank, built.versions)
    return built.write(folder)


@case("mixed", "rank 7 on both")
def one_channel_on_sockets(folder: Path) -> Path:
    built = job()
    built.ranks[7].replace("via NET/Libfabric/", "via NET/Socket/", only_first=True)
    return built.write(folder)


@case("mixed", "rank 2 on both")
def one_communicator_on_sockets(folder: Path) -> Path:
    built = job(hybrid=True)
    built.ranks[2].replace("Using network Libfabric", "Using network Socket", only_first=True)
    return built.write(folder)


@case("mixed", "must use GPUDirect RDMA", gpudirect_required=True)
def p5_without_gpudirect(folder: Path) -> Path:
    built = job(gpus=8, num_channels=16, num_nics=32, gpudirect=True)
    built.ranks[5].replace("/GDRDMA", "", only_first=True)
    return built.write(folder)


# -- nothing crossed
# --------------------------------------------------------------------------------------------


@case("none", "nothing crossed")
def one_host(folder: Path) -> Path:
    return job(hosts=1).write(folder)


@case("none", "nothing crossed")
def one_host_one_gpu(folder: Path) -> Path:
    return job(hosts=1, gpus=1).write(folder)


@case("none", "nothing crossed")
def one_host_without_logs(folder: Path) -> Path:
    built = job(hosts=1)
    built.counters = {}
    for rank in built.ranks:
        rank.messages = []
    return built.write(folder)


@case("none", "gloo")
def gloo_one_host(folder: Path) -> Path:
    built = job(hosts=1)
    built.backend, built.counters = "gloo", {}
    for rank in built.ranks:
        rank.messages = []
    return built.write(folder)


# -- evidence is missing or contradicts itself
# ------------------------------------------------------------------


@case("unknown", "ranks.json is missing")
def nothing_at_all(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@case("unknown", "no NCCL log of rank 0-7", diagnosis="no-log")
def nccl_debug_unset(folder: Path) -> Path:
    built = job()
    for rank in built.ranks:
        rank.messages = []
    return built.write(folder)


@case("unknown", "no 'Using network' line", diagnosis=None)
def nccl_debug_warn_only(folder: Path) -> Path:
    built = job()
    for rank in built.ranks:
        rank.messages = ["WARN NET/OFI something to warn of"]
    return built.write(folder)


@case("unknown", "no NCCL log of rank 6", diagnosis="no-log")
def one_rank_without_a_log(folder: Path) -> Path:
    built = job()
    built.ranks[6].messages = []
    return built.write(folder)


@case("unknown", "ranks.json lists 7")
def one_rank_not_recorded(folder: Path) -> Path:
    built = job()
    lost = built.ranks.pop()
    folder = built.write(folder)
    (folder / f"{lost.host}.{lost.pid}.log").write_text("".join(f"{line}\n" for line in lost.lines()))
    return folder


@case("unknown", "but ranks.json lists 4")
def other_host_not_recorded_and_not_collected(folder: Path) -> Path:
    built = job(hosts=3, gpus=2)
    built.ranks = built.ranks[:4]
    return built.write(folder)


@case("unknown", "NCCL saw one node in every communicator, but ranks.json lists 2 hosts")
def hosts_recorded_that_were_one_node(folder: Path) -> Path:
    """NCCL_NET_DISABLE_INTRA=0 on one node: the network carries what never left it."""
    return job().each(lambda rank: rank.replace("nNodes 2", "nNodes 1")).write(folder)


@case("unknown", "NCCL saw 3 nodes in a communicator, but ranks.json lists 2 hosts")
def more_nodes_than_recorded_hosts(folder: Path) -> Path:
    return job().each(lambda rank: rank.replace("nNodes 2", "nNodes 3")).write(folder)


@case("unknown", "of an unknown form")
def line_ends_lost(folder: Path) -> Path:
    job().write(folder)
    _cut(folder, "a7x2q", lambda text: text.replace("\n", "\r") + "\n")
    return folder


@case("unknown", "logged by one end only")
def one_line_logged_twice(folder: Path) -> Path:
    built = job()
    rank = built.ranks[3]
    rank.messages.append(next(m for m in rank.messages if "via NET/" in m))
    return built.write(folder)


@case("efa")
def healthy_with_warnings_and_ends_of_communicators(folder: Path) -> Path:
    def add(rank: RankLog) -> None:
        rank.log(
            "WARN Call to ibv_create_qp failed",
            "NET/OFI Setting NCCL_TOPO_FILE environment variable to /proc/self/fd/150",
            "NET/IB : No device found.",
            "RAS client listening socket at 127.0.0.1<28028>",
            "Init timings - ncclCommInitRankConfig: rank 0 nranks 8 total 0.43 (kernels 0.41, alloc 0.00)",
            f"comm 0x55a05a3d557 rank {rank.rank} nranks 8 cudaDev 0 busId 180 - Destroy COMPLETE",
            "misc/socket.cc:64 -> 3",
            "raw ",
            "raw libfabric:7:1747438790::efa:fabric:efa_fabric():12<info> some message",
        )

    return job().each(add).write(folder)


@case("efa")
def healthy_process_group_made_again(folder: Path) -> Path:
    """destroy_process_group and a new one: the same ranks, other communicators."""
    built, again = job(), job(world_id="0x99cd2ca05a3d557")
    for rank, later in zip(built.ranks, again.ranks, strict=True):
        start = next(i for i, message in enumerate(later.messages) if message.startswith("Using network"))
        rank.messages += later.messages[start:]
    return built.write(folder)


@case("unknown", "alone, but")
def one_host_recorded_of_two(folder: Path) -> Path:
    built = job()
    built.ranks = built.ranks[:4]
    return built.write(folder)


@case("unknown", "no rank of this attempt")
def stale_logs_beside_the_new_ones(folder: Path) -> Path:
    job(first_pid=801, world_id="0x77cd2ca05a3d557").write(folder)
    return job().write(folder)


@case("unknown", "no rank of this attempt")
def stale_logs_only(folder: Path) -> Path:
    """The ranks of a second attempt logged nothing; the first one's healthy logs lie in the folder."""
    job(first_pid=801).write(folder)
    built = job()
    for rank in built.ranks:
        rank.messages = []
    return built.write(folder)


@case("unknown", "no log shows its rank 3")
def stale_log_under_the_right_name(folder: Path) -> Path:
    """Process ids repeat in containers: rank 3's file is of the attempt before, same host and pid."""
    built = job()
    built.ranks[3].messages = job(world_id="0x77cd2ca05a3d557").ranks[3].messages
    return built.write(folder)


@case("unknown", "no rank of this attempt")
def two_attempts_in_one_folder(folder: Path) -> Path:
    """An attempt on sockets and one on EFA: whichever is meant, the folder does not say."""
    first = job(first_pid=801, world_id="0x77cd2ca05a3d557")
    first.each(lambda rank: to_sockets(rank, first.versions)).write(folder)
    return job().write(folder)


@case("unknown", "is cut off")
def one_log_cut_in_a_line(folder: Path) -> Path:
    job().write(folder)
    _cut(folder, "b7x2q", lambda text: text[:-30])
    return folder


@case("unknown", "logged by one end only")
def one_log_cut_between_lines(folder: Path) -> Path:
    job().write(folder)
    _cut(folder, "a7x2q", lambda text: "".join(text.splitlines(keepends=True)[:-2]))
    return folder


@case("unknown", "was never complete")
def one_log_cut_in_communicator_set_up(folder: Path) -> Path:
    job().write(folder)
    _cut(folder, "a7x2q", lambda text: text[: text.index("Trees")].rpartition("\n")[0] + "\n")
    return folder


@case("unknown", "log collector collapsed")
def lines_collapsed_by_ray(folder: Path) -> Path:
    """Ray's driver log collapses equal lines of many ranks into one."""
    built = job()
    for rank in built.ranks[1:]:
        rank.drop("Using network")
    built.ranks[0].replace("Using network Libfabric", "Using network Libfabric [repeated 7x across cluster]")
    return built.write(folder)


@case("unknown", "rank 0, 4: another rank in the communicator of all ranks")
def logs_of_two_ranks_exchanged(folder: Path) -> Path:
    built = job()
    first, second = built.ranks[0], built.ranks[4]
    first.messages, second.messages = second.messages, first.messages
    return built.write(folder)


@case("unknown", "more than one log line")
def two_lines_glued_together(folder: Path) -> Path:
    job().write(folder)
    _cut(folder, "a7x2q", lambda text: text.replace("Trees", "Tre" + text.splitlines()[3], 1))
    return folder


@case("unknown", "counters.json is missing")
def no_counters(folder: Path) -> Path:
    built = job()
    built.counters = {}
    return built.write(folder)


@case("unknown", "the rest took another way")
def counters_stood_still(folder: Path) -> Path:
    return _no_efa_bytes(job()).write(folder)


@case("unknown", "the rest took another way")
def counters_of_one_host_moved_half(folder: Path) -> Path:
    built = job()
    device = built.counters[built.hosts[1]]["rdmap0s6"]
    device["after"]["tx_bytes"] = EXPECTED_BYTES // 2
    return built.write(folder)


@case("unknown", "the rest took another way")
def counters_sent_but_did_not_receive(folder: Path) -> Path:
    built = job()
    device = built.counters[built.hosts[0]]["rdmap0s6"]
    device["after"]["rx_bytes"] = device["before"]["rx_bytes"] + 1_000_000
    return built.write(folder)


@case("unknown", "far more than")
def counters_far_above_the_expected(folder: Path) -> Path:
    """Before-values of the boot of the node, or another job on it: the difference says nothing of this
    job.
    """
    return job().count_bytes(share=40).write(folder)


@case("unknown", "no counters of this host")
def counters_of_one_host_missing(folder: Path) -> Path:
    built = job()
    del built.counters[built.hosts[1]]
    return built.write(folder)


@case("unknown", "replaced or reset")
def counters_reset_by_a_new_node(folder: Path) -> Path:
    built = job()
    device = built.counters[built.hosts[0]]["rdmap0s6"]
    device["before"]["tx_bytes"] = 2**40
    return built.write(folder)


@case("unknown", "no EFA device", diagnosis="no-efa-device")
def counters_without_a_device(folder: Path) -> Path:
    built = job()
    for host in built.hosts:
        built.counters[host] = {
            "expected_bytes": EXPECTED_BYTES,
            "problems": ["before the job: no EFA device in /sys"],
        }
    return built.write(folder)


@case("unknown", "recorded no expected bytes")
def expected_bytes_not_recorded(folder: Path) -> Path:
    return job().count_bytes(expected=None).write(folder)


@case("unknown", "completed no step")
def no_step_completed(folder: Path) -> Path:
    built = job()
    for host in built.hosts:
        built.counters[host]["expected_bytes"] = 0
    return built.write(folder)


@case("tcp", "those of something else")
def tcp_logs_with_efa_bytes(folder: Path) -> Path:
    """Another job used the devices: what this one's channels say of themselves decides."""
    built = job()
    return built.each(lambda rank: to_sockets(rank, built.versions)).write(folder)


@case("unknown", "no rank of")
def no_channel_between_hosts(folder: Path) -> Path:
    """Selected provider and network are process start-up; without a channel nothing shows that data
    crossed.
    """
    built = job()
    for rank in built.ranks:
        rank.messages = [m for m in rank.messages if "via NET/" not in m]
    return built.write(folder)


@case("unknown", "neither EFA nor TCP")
def infiniband(folder: Path) -> Path:
    built = job()

    def to_ib(rank: RankLog) -> None:
        rank.messages = [
            m.replace("Libfabric/", "IB/").replace("network Libfabric", "network IB") for m in rank.messages
        ]

    return built.each(to_ib).write(folder)


@case("unknown", "no 'Using network' line", diagnosis="no-network")
def nccl_net_forbade_the_fallback(folder: Path) -> Path:
    """NCCL_NET=Libfabric and a plugin that does not start: NCCL fails instead of taking sockets."""
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        rank.messages = [
            *rank.messages[:5],
            "WARN NET/OFI Unable to find a protocol that worked.  Failing initialization.",
            "Failed to initialize NET plugin Libfabric",
            "WARN Failed to initialize any NET plugin",
        ]
    return built.write(folder)


@case("unknown", "was never complete", diagnosis="security-group")
def security_group_drops_efa(folder: Path) -> Path:
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        rank.messages = [m for m in rank.messages if "COMPLETE" not in m and "Channel" not in m]
        rank.log("WARN NET/OFI Unable to insert remote address into address vector for device 0. RC: -22")
    return built.write(folder)


_EFA_LIST_EMPTY = (
    "libfabric:1201:1747438790::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list"
)


@case("unknown", "no 'Using network' line", diagnosis="device-not-mounted")
def pod_did_not_ask_for_the_device(folder: Path) -> Path:
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        rank.messages = [
            *rank.messages[:5],
            f"raw {_EFA_LIST_EMPTY}",
            "NET/OFI No eligible providers were found",
        ]
    return built.write(folder)


@case("unknown", "was never complete", diagnosis="memlock")
def memlock_too_low(folder: Path) -> Path:
    built = _no_efa_bytes(job())
    for rank in built.ranks:
        rank.messages = [m for m in rank.messages if "COMPLETE" not in m and "Channel" not in m]
        rank.log(
            "WARN NET/OFI Unable to register memory (type = 2) for device 0. RC: -12, Error: Cannot "
            "allocate memory"
        )
    return built.write(folder)


@case("unknown", "ranks.json lacks rank 2")
def ranks_with_a_gap(folder: Path) -> Path:
    built = job()
    del built.ranks[2]
    return built.write(folder)


@case("unknown", "more than once")
def ranks_twice(folder: Path) -> Path:
    built = job()
    built.ranks.append(built.ranks[0])
    return built.write(folder)


@case("unknown", "cannot be read")
def ranks_cut_off(folder: Path) -> Path:
    job().write(folder)
    path = folder / "ranks.json"
    path.write_text(path.read_text()[:-20])
    return folder


@case("unknown", "both gloo and nccl")
def two_backends(folder: Path) -> Path:
    folder = job().write(folder)
    records = json.loads((folder / "ranks.json").read_text())
    records[0]["backend"] = "gloo"
    (folder / "ranks.json").write_text(json.dumps(records))
    return folder


def cases() -> Iterator[Case]:
    return iter(_CASES)
