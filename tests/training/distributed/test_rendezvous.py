"""Rendezvous of processes before JAX connects them, over real sockets between threads."""

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from systolic.core.errors import RunError
from systolic.training.distributed import HostReport, differing, meet
from systolic.training.distributed.detect import Member


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def places(count: int, hosts: tuple[str, ...] = ()) -> list[Member]:
    address = f"127.0.0.1:{free_port()}"
    return [
        Member(by="a test", count=count, index=index, coordinator=address, hosts=hosts)
        for index in range(count)
    ]


def all_meet(places: list[Member], seconds: float = 20.0) -> list[Any]:
    """Result of each process: the reports, or the text of its error."""

    def one(place: Member) -> Any:
        try:
            return meet(place, {"jax": f"0.{place.index // 3}"}, seconds)
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, places))


def test_all_get_the_reports_of_all():
    answers = all_meet(places(4))
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert [report.index for report in answers[0]] == [0, 1, 2, 3]
    assert all(abs(each.ahead_seconds) <= each.error_seconds + 0.1 for each in answers[0])
    values = differing(answers[0], "jax")
    assert {value: [each.index for each in told] for value, told in values.items()} == {
        "0.0": [0, 1, 2],
        "0.1": [3],
    }


def test_who_does_not_come_is_named_in_all():
    answers = all_meet(places(4, ("a", "b", "c", "d"))[:2], 1.0)
    assert answers[0] == answers[1]
    assert re.search(
        r"process 2 on c, process 3 on d did not connect to \S+ within 1 s", answers[0]
    )


def test_a_first_process_that_does_not_come_is_named():
    [answer] = all_meet(places(2, ("a", "b"))[1:], 0.5)
    assert "process 1 on b could not reach process 0 on a" in answer


def test_a_number_given_twice():
    first, second, *_ = places(3)
    answers = all_meet([first, second, second])
    assert all("process index 1 is used twice" in answer for answer in answers)


def test_processes_told_of_different_jobs():
    first, second = places(2)
    other = Member(by="a test", count=3, index=1, coordinator=second.coordinator)
    answers = all_meet([first, other])
    assert all("expects 3 processes" in answer for answer in answers)


def test_a_port_that_is_taken_is_named():
    first, _ = places(2)
    with (
        socket.create_server(("", int(first.coordinator.rpartition(":")[2]))),
        pytest.raises(RunError, match="is in use"),
    ):
        meet(first, {}, 1.0)


def test_strangers_at_the_port_are_left_alone():
    first, second = places(2)
    port = int(first.coordinator.rpartition(":")[2])

    def knock() -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    return
            except ConnectionRefusedError:
                continue

    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(meet, first, {}, 20.0)
        threading.Thread(target=knock).start()
        assert len(meet(second, {}, 20.0)) == 2
        assert len(met.result()) == 2


def test_a_missing_fact_is_a_value():
    reports = [
        HostReport(index=0, host="a", facts={}),
        HostReport(index=1, host="b", facts={"jax": "1"}),
    ]
    assert set(differing(reports, "jax")) == {"absent", "1"}
