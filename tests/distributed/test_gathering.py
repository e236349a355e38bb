"""What launchers of several machines agree on, with words and times that the tests make up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from fastsiam.distributed.gathering import WRONG_USAGE, Gathering, Order, Word
from fastsiam.errors import RANK_LOST


def refuse_uneven(ranks: int) -> None:
    """Share a batch of 24."""
    if 24 % ranks:
        raise ValueError


@dataclass
class Table:
    """Machines that speak with one, called a, and what they were told last."""

    nodes: int = 2
    restarts: int = 0
    gpus: int = 4
    shares: Callable[[int], None] = refuse_uneven
    words: dict[str, Word] = field(default_factory=dict)
    told: dict[str, Order] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.gathering = Gathering(
            self.come("a"),
            nodes=self.nodes,
            restarts=self.restarts,
            timeout=100,
            silence=10,
            shares=self.shares,
            more=("--out", "r"),
            port=lambda: 4711,
            now=0,
        )

    def come(self, name: str, **how: object) -> Word:
        word = Word(id=name, host=name, command=("train",), gpus=self.gpus)
        self.words[name] = replace(word, **how)  # type: ignore[arg-type]
        return self.words[name]

    def says(self, name: str, **changes: object) -> Order:
        self.words[name] = replace(self.words[name], **changes)  # type: ignore[arg-type]
        self.told[name] = self.gathering.hear(self.words[name], self.now)
        return self.told[name]

    def all_say(self, *, seconds: float = 0) -> list[str]:
        """Let so many seconds go by, in which all speak; return what each is to do."""
        until = self.now + seconds
        while True:
            did: list[str] = [self.says(name).do for name in self.words]
            if self.now >= until:
                return did
            self.now += 1

    def begin(self) -> Table:
        """Bring all machines to work."""
        for name in "bcdefgh"[: self.nodes - 1]:
            self.come(name)
        self.all_say()
        return self.start()

    def start(self) -> Table:
        """Have all that are told to start do it."""
        for name in self.words:
            if (order := self.says(name)).do == "start":
                self.words[name] = replace(
                    self.words[name], start=order.start, is_ready=False, code=None
                )
        return self

    def end(self, name: str, code: int, *, lost: bool = False) -> None:
        self.says(name, code=code, lost=lost)

    def is_ready_again(self) -> None:
        """Have all whose ranks ended be ready for others."""
        for name, word in self.words.items():
            if word.code is not None:
                self.words[name] = replace(word, is_ready=True)


def test_they_wait_for_all_and_start_in_one_order() -> None:
    table = Table(nodes=3)
    table.come("c")
    assert table.all_say(seconds=50) == ["wait", "wait"]
    table.come("b")
    table.all_say()
    assert table.all_say() == ["start"] * 3
    assert [(table.told[x].rank, table.told[x].nodes, table.told[x].gpus) for x in "abc"] == [
        (0, 3, 4), (1, 3, 4), (2, 3, 4),
    ]  # fmt: skip
    assert {(x.start, x.port, x.more, x.lines) for x in table.told.values()} == {
        (table.told["a"].start, 4711, ("--out", "r"), ())
    }
    table.start()
    assert table.all_say() == ["wait"] * 3
    for name in "abc":
        table.end(name, 0)
    assert table.all_say() == ["leave"] * 3 and {x.code for x in table.told.values()} == {0}


def test_numbers_that_were_given_are_kept() -> None:
    table = Table(nodes=3)
    table.come("b", node_rank=2)
    table.come("c", node_rank=1)
    table.all_say()
    table.all_say()
    assert [table.told[x].rank for x in "abc"] == [0, 2, 1]


@pytest.mark.parametrize(
    ("of_b", "says"),
    [
        ({"command": ("train", "--seed", "1")}, "the command on b is another one than on a"),
        ({"node_rank": 0}, "--node-rank 0 on b: number 0 is a, the machine of --rendezvous"),
        ({"node_rank": 1}, "--node-rank 1 is c's already"),
    ],
)
def test_who_does_not_fit_is_sent_away(of_b: dict[str, object], says: str) -> None:
    table = Table(nodes=3)
    table.come("c", node_rank=1)
    table.all_say()
    table.come("b", **of_b)
    order = table.says("b")
    assert order.do == "leave" and order.code == WRONG_USAGE and says in order.lines[0]
    assert table.says("a").do == "wait"


def test_a_machine_that_never_comes_is_one_line_after_the_timeout() -> None:
    table = Table(nodes=3)
    table.come("b")
    assert set(table.all_say(seconds=100)) == {"wait"}
    assert table.all_say(seconds=2) == ["leave", "leave"]
    (line,) = table.told["a"].lines
    assert line.startswith("error: 2 of 3 machines came within 100 s (a, b): start the same")
    assert table.told["a"].code == RANK_LOST and table.gathering.is_over(table.now)


def test_a_lost_machine_stops_the_others_who_leave_resumable() -> None:
    table = Table(nodes=3).begin()
    del table.words["b"]
    assert set(table.all_say(seconds=10)) == {"wait"}
    assert table.all_say(seconds=2) == ["stop", "stop"]
    (line,) = table.told["c"].lines
    assert line == (
        "error: b is lost: nothing was heard of it for 10 s; the same command goes on from the "
        "last checkpoint"
    )
    table.end("a", RANK_LOST, lost=True)
    table.end("c", 143)  # its ranks were stopped by a signal: no ending of their own
    assert table.all_say() == ["leave", "leave"]
    assert {table.told[x].code for x in "ac"} == {RANK_LOST}


def lose_b(table: Table) -> Word:
    """Lose a machine in mid-run; the others end and are ready again."""
    lost = table.words.pop("b")
    table.all_say(seconds=12)
    for name in table.words:
        table.end(name, RANK_LOST, lost=True)
    table.is_ready_again()
    return lost


def test_a_lost_machine_that_is_back_in_time_is_one_of_them_again() -> None:
    table = Table(nodes=2, restarts=1).begin()
    first = table.told["a"].start
    lost = lose_b(table)
    table.words["b"] = lost
    order = table.says("b")  # whose ranks are at work as yet
    assert order.do == "stop" and order.lines == ("error: the other machines gave b up as lost",)
    table.end("b", RANK_LOST, lost=True)
    table.is_ready_again()
    table.all_say()
    assert table.all_say() == ["start", "start"]
    assert table.told["a"].start not in ("", first)
    assert table.told["b"].lines == (
        "error: b is lost: nothing was heard of it for 10 s",
        "restart 1 of 1, from the last checkpoint, on 8 ranks of 2 machines",
    )


def test_without_it_they_go_on_and_it_joins_later_at_no_cost() -> None:
    table = Table(nodes=2, restarts=1).begin()
    lost = lose_b(table)
    assert table.all_say(seconds=8) == ["wait"]  # it may be back at once
    assert table.all_say(seconds=4) == ["start"]
    assert table.told["a"].nodes == 1
    table.start()
    table.words["b"] = replace(lost, code=RANK_LOST, lost=True, is_ready=True)
    assert table.says("b").do == "wait"
    order = table.says("a")
    assert order.do == "stop" and order.lines == ("b came: all save and start together",)
    table.end("a", RANK_LOST, lost=True)
    table.is_ready_again()
    table.all_say()
    assert table.all_say() == ["start", "start"] and table.told["a"].nodes == 2


def test_those_that_cannot_share_the_batch_wait_longer_and_then_go_on_with_fewer_ranks() -> None:
    table = Table(nodes=6, restarts=1).begin()  # 24 images, 24 ranks; 20 cannot share them
    lose_b(table)
    assert set(table.all_say(seconds=95)) == {"wait"}
    table.all_say(seconds=8)
    assert table.all_say() == ["start"] * 4 + ["wait"]  # 4 x 3 ranks; one is too many
    assert (table.told["a"].nodes, table.told["a"].gpus) == (4, 3)
    assert table.start().all_say(seconds=50) == ["wait"] * 5


def test_no_number_of_ranks_that_shares_the_batch_is_the_end() -> None:
    table = Table(shares=refuse_uneven, gpus=0)
    table.come("b")
    table.all_say()
    assert table.all_say() == ["leave", "leave"]
    assert "no number of the GPUs" in table.told["a"].lines[0]


@pytest.mark.parametrize(
    ("endings", "code"),
    [
        ([(1, False), (RANK_LOST, True)], 1),  # an error would come again
        ([(RANK_LOST, True), (143, False)], 143),  # somebody stopped it
        ([(RANK_LOST, True), (137, True)], 137),
    ],
)
def test_what_one_machine_ends_with_all_end_with(
    endings: list[tuple[int, bool]], code: int
) -> None:
    table = Table(restarts=int(code != 137)).begin()
    for name, (own, lost) in zip("ab", endings, strict=True):
        table.end(name, own, lost=lost)
    assert table.all_say() == ["leave"] * 2 and {x.code for x in table.told.values()} == {code}


def test_ranks_that_hang_after_a_failure_elsewhere_are_stopped() -> None:
    table = Table().begin()
    table.end("b", 1)
    assert table.all_say(seconds=9) == ["wait", "wait"]
    assert table.all_say(seconds=3)[0] == "stop"
    table.end("a", 143)
    assert table.all_say() == ["leave"] * 2 and table.told["a"].code == 1


def test_a_machine_more_than_needed_takes_the_place_of_a_lost_one() -> None:
    table = Table(nodes=2, restarts=1).begin()
    table.come("spare")
    assert table.all_say() == ["wait"] * 3
    lose_b(table)
    table.all_say()
    assert table.all_say() == ["start", "start"]


def test_it_is_over_when_all_that_speak_know() -> None:
    table = Table().begin()
    table.end("a", 0)
    table.end("b", 0)
    assert table.says("a").do == "leave" and table.gathering.is_over(table.now)
    table.gathering = Table().gathering
    assert not table.gathering.is_over(0)
